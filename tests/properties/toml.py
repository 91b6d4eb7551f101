"""Documents like ``relaybox.toml``, from right to hopeless."""

from __future__ import annotations

import json
import math
from random import Random
from typing import Any

from tests.properties import settings
from tests.properties.settings import DESTINATION, GENERAL, ROUTE
from tests.properties.values import HostileDict, HostileInt, HostileList, HostileText

NOISE = (
    *('"', "'", "[", "]", "[[", "]]", "=", "\n", "#", "\0", "{", "}", "\\u", "\ufeff", "é", "1979-05-27"),
    *("0x", "inf", ","),
)
HOPELESS = (
    *("", "a = " + "[" * 3000, "a = " + "{a=" * 3000, "max_payload = " + "9" * 5000),
    *("[relaybox]\nmax_payload = 0x" + "f" * 9000, "[relaybox]\nnotify = 2024-01-01"),
    *("[relaybox]\ndatabase = 5", "relaybox = 5", "destinations = 5", "destinations = []"),
    *("[destinations]\nrunner = 'http://a'", "routes = {}", "routes = [5]", "[[routes]]", "tool = 5"),
    *("[tool]\nrelaybox = 5", "[tool.relaybox]\nroutes = 1", "[relaybox.relaybox]"),
)


def document(r: Random) -> tuple[str, str | None]:
    """Return the text, and the setting that is wrong in it, if that is known."""
    if r.random() < 0.05:
        return r.choice(HOPELESS), None
    table, wrong = r.choice(((GENERAL, "relaybox"), (DESTINATION, "destinations.runner"), (ROUTE, "routes")))
    given, name = settings.one_wrong(r, table, sure=False)
    tables: dict[str, dict[str, Any]] = {
        "relaybox": {},
        "destinations.other": {"sink": "console:"},
        "destinations.runner": {"sink": "console:"},
    }
    route: dict[str, Any] = {"events": "*", "to": "runner"}
    if wrong == "routes":
        route = {**route, **given}
    else:
        tables[wrong] = {**tables[wrong], **given}
    written = "".join(f"[{name}]\n{_settings(one)}" for name, one in tables.items())
    written += f"[[routes]]\n{_settings(route)}"
    if r.random() < 0.3:
        return _noisy(r, written), None
    return written, name


def _noisy(r: Random, text: str) -> str:
    for _ in range(r.randint(1, 4)):
        place = r.randint(0, len(text))
        text = text[:place] + r.choice(NOISE) + text[place + r.choice((0, 0, 1, 5)) :]
    return text


def _settings(given: dict[str, Any]) -> str:
    return "".join(f"{name} = {_value(value)}\n" for name, value in given.items())


def _value(value: Any) -> str:
    match value:
        case HostileInt():
            return "5"
        case float() if not math.isfinite(value):
            return str(value)
        case int() | float():
            return hex(value) if isinstance(value, int) and value > 2**70 else json.dumps(value)
        case HostileList() | HostileDict():
            return json.dumps(type(value).__name__)
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            pairs = [f"{json.dumps(str(name))} = {_value(one)}" for name, one in value.items()]
            return f"{{ {', '.join(pairs)} }}"
    # A value that TOML cannot write becomes a text.
    plain = isinstance(value, str) and not isinstance(value, HostileText)
    return json.dumps(value if plain else type(value).__name__)
