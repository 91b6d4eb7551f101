"""Settings: valid ones, and what a slip of the hand or a hostile caller makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

from relaybox.core.values import Secret
from tests.properties import values

DESTINATION: dict[str, tuple[Any, ...]] = {
    "sink": ("https://example.org/events", "handler:shop:take", "console:", "memory:", "celery:"),
    "ordered": (True, False),
    "ordering": ("aggregate", "tenant", "event_type", "none"),
    "on_failed": ("block", "skip"),
    "max_attempts": (1, 5, 100),
    "timeout": ("30s", "50ms", 1.5, 2),
    "backoff": ({"base": "1s", "cap": "1h", "factor": 2, "jitter": 0.1}, {"jitter": "full"}, {}),
    "concurrency": (1, 50),
    "rate_limit": ("100/s", "600/m", 0.5, 10),
    "lease": ("60s", "1h", 90),
    "batch_size": (1, 100, 1000),
    "poll_interval": ("1s", "20ms", 0.5),
    "retention": ("7d", "0s", 0),
    "dead_letter": ("other",),
    "format": ("json", "flat", "cloudevents", "payload"),
    "secret": ("whsec_c2VjcmV0", "env:HOME", "file:/dev/null", "plain"),
    "auth": ("token", "env:HOME"),
    "allow": (["10.0.0.0/8"], [], ["::1/128", "127.0.0.1"]),
    "options": ({}, {"maxlen": 10, "tls": True, "names": ["a"]}),
}
GENERAL: dict[str, tuple[Any, ...]] = {
    "database": (
        *("postgresql://me@host:5432/db", "sqlite:///a.db", "mysql+pymysql://u:p@h/d", "env:HOME"),
        "sqlite://",
    ),
    "schema": ("public", "shop_1"),
    "prefix": ("", "shop_"),
    "unrouted": ("raise", "store"),
    "notify": (True, False),
    "max_payload": ("1MiB", 1000, "512KiB"),
    "app": ("shop:outbox",),
}
ROUTE: dict[str, tuple[Any, ...]] = {"events": ("order.*", ["a", "b.*"], "*"), "to": ("runner", ["runner"])}

WORDS = (
    *("", " ", "0", "-1", "1e9", "nan", "5 m", "1h30m", "999999999999d", "1/0", "0/s", "1 MiB", "whsec_"),
    *("env:", "true"),
    *("file:/", "handler:", "http://", "https://[::1", "http://a:b@c:d/e", "sqlite:///\0"),
    *("postgres://h:x/y", "://"),
    *("10.0.0.0/33", "256.1.1.1", "1.2.3.4/", "*", "a" * 500, "\ud800", "\0", "é", "runner\n"),
    *("select; drop", "../.."),
)

ODD: tuple[Callable[[], Any], ...] = (
    *(lambda: None, lambda: True, lambda: 0, lambda: -1, lambda: 2**31, lambda: 2**63, lambda: 10**30),
    *(lambda: 1 << 40_000, lambda: math.nan, lambda: math.inf, lambda: -math.inf, lambda: 1e300),
    *(lambda: 1e-320, lambda: -0.0, lambda: timedelta.max, lambda: timedelta(-1), lambda: b"bytes", list),
    *(dict, lambda: [None], lambda: [[]], lambda: {"base": 5, "nothing": 1}, lambda: {"cap": "1ms"}),
    *(lambda: {1: 2}, object, lambda: Secret("x"), lambda: print, lambda: len, values.HostileObject),
    *(
        values.HostileMapping,
        lambda: values.HostileText("30s"),
        lambda: values.HostileInt(5),
        lambda: values.HostileList(["a"]),
    ),
    lambda: values.HostileDict(base=1),
)
"""Return a value that is not valid, or only just."""


def odd(r: Random) -> Any:
    """Anything but what was asked for."""
    return r.choice(ODD)() if r.random() < 0.6 else r.choice((*WORDS, values.text(r), values.bad_text(r)))


def mutated(r: Random, valid: Any) -> Any:
    """Return a valid value with a mistake in it."""
    match valid:
        case bool():
            return not valid
        case int() | float():
            return r.choice(
                (-valid, valid * 10 ** r.randint(0, 20), valid + 0.5, str(valid), [valid], valid - 1)
            )
        case str():
            return _slip(r, valid)
        case list():
            return r.choice(([*valid, odd(r)], tuple(valid), [_slip(r, one) for one in valid], valid * 2))
        case dict():
            name = r.choice([*valid, "base", "bas"])
            return {**valid, name: r.choice((odd(r), mutated(r, valid.get(name, "1s"))))}
    return odd(r)


def _slip(r: Random, text: str) -> str:
    place = r.randint(0, len(text))
    match r.randrange(5):
        case 0:
            return text[:place] + text[place + 1 :]
        case 1:
            return text[:place] + r.choice("0 9-:/.@[]%?#\0é\\\"'\nZ") + text[place:]
        case 2:
            return text[:place] + text[place:].swapcase()
        case 3:
            return r.choice((text * 2, text[::-1], f" {text} ", text.upper()))
    return text[:place]


def one_wrong(
    r: Random, table: dict[str, tuple[Any, ...]], *, sure: bool = True
) -> tuple[dict[str, Any], str]:
    """Return settings of a table with a mistake in one of them, and that one's name."""
    chosen = {name: r.choice(given) for name, given in table.items() if r.random() < 0.2}
    name = r.choice(list(table))
    chosen[name] = odd(r) if sure and r.random() < 0.5 else mutated(r, r.choice(table[name]))
    return chosen, name
