"""Hide secret values in payloads and texts, by the names of their fields, for every user and face."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import msgspec

from relaybox.core.text import stored_json
from relaybox.core.values import parse_list, wrong

HIDDEN = "•••"
DEEP = "…"
"""Replaces values nested deeper than ``DEEPEST``."""

NAMES = (
    "password", "passwd", "pwd", "passphrase", "secret", "credential", "token", "authorization", "cookie",
    "session", "signature", "apikey", "accesskey", "privatekey", "card", "cvv", "cvc", "iban", "ssn",
)  # fmt: skip
"""A field is hidden if its name contains one of these; only letters and digits count, without case."""

WORDS = frozenset({"auth", "jwt", "otp", "pass", "pin"})
"""A field is also hidden if one of the words of its name is one of these."""

SCRUBBED = ("error_message", "error", "message", "reason", "retrying", "text")
"""Fields of documents that may quote other systems."""

KEPT = ("paused", "payload", "headers")
"""Members of documents that stay: the words of an operator, and what is redacted when it is read."""

DEEPEST = 100

_CALLED = frozenset({"name", "key", "field", "header"})
_VALUED = frozenset({"value", "values"})
"""Members of an object that describes one field: its name, and its value."""

_VALUE = r"""(?:(?:bearer|basic|digest|negotiate)\s+)?(?:"[^"]*"|'[^']*'|\S+)"""
_ANY = (*NAMES, *WORDS)
_JOINED = str.maketrans("", "", "-_ ")
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_USER_INFO = re.compile(r"://[^/\s?#]+(?=@)")
_BARE = re.compile(r"(?<![\w-])eyJ[\w-]+\.[\w-]+\.[\w-]*|(?i:(?<=\bbearer ))[\w.~+/=-]{16,}")
"""JSON web tokens and bearer tokens, which need no name before them."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What to hide besides ``NAMES``: dotted ``paths`` that may start anywhere in a document."""

    paths: tuple[str, ...] = ()

    @classmethod
    def of(cls, redact: Iterable[str]) -> Rules:
        """Create rules from the setting ``redact``."""
        return cls(tuple(rule.casefold() for rule in redact))

    def hide(self, path: tuple[str, ...]) -> bool:
        """True if the value at this path is hidden."""
        name = re.sub(r"[^0-9a-z]", "", path[-1].casefold())
        words = {word.casefold() for word in _WORD.findall(path[-1])}
        if any(one in name for one in NAMES) or not WORDS.isdisjoint(words):
            return True
        # A name may itself contain dots.
        whole = "." + ".".join(path).casefold()
        return any(whole.endswith(f".{rule}") for rule in self.paths)

    def scrub(self, text: str) -> str:
        """Hide values after secret names, tokens, and credentials in URLs, in a text such as an error."""
        # Most texts have nothing of it, which is faster to see without the patterns.
        folded = text.casefold()
        joined = folded.translate(_JOINED)
        named = any(one in joined for one in _ANY) or any(one in folded for one in self.paths)
        if named or not text.isascii():
            text = _spoken(self).sub(rf"\1{HIDDEN}", text)
        if "eyJ" in text or "bearer" in folded:
            text = _BARE.sub(HIDDEN, text)
        return _USER_INFO.sub(f"://{HIDDEN}", text)


@functools.lru_cache(maxsize=64)
def _spoken(rules: Rules) -> re.Pattern[str]:
    names = ["[-_ ]?".join(map(re.escape, name)) for name in NAMES]
    # "discard" contains "card".
    names = [f"(?<!dis){name}" if name.startswith("c") else name for name in names]
    words = rf"(?<![^\W_])(?:{'|'.join(sorted(WORDS))})(?![^\W_])"
    either = "|".join([*names, words, *map(re.escape, rules.paths)])
    return re.compile(rf"""((?:{either})[\w-]{{0,30}}["']?\s{{0,5}}[=:]\s{{0,5}}){_VALUE}""", re.IGNORECASE)


def parse_rules(value: Iterable[str], setting: str) -> tuple[str, ...]:
    """Check the setting ``redact``."""
    rules = parse_list(value, setting, "['customer.email']")
    for rule in rules:
        if not isinstance(rule, str) or not all(part.strip() for part in rule.split(".")):
            raise wrong(setting, rule, "write the names that lead to a value, as customer.email")
    return rules


def redact(value: Any, rules: Rules, path: tuple[str, ...] = (), depth: int = 0) -> Any:
    """Return the value with hidden parts replaced by ``•••``."""
    if depth > DEEPEST:
        return DEEP
    if isinstance(value, Mapping):
        hidden = _VALUED if _calls(value, rules, path) else ()
        return {
            name: HIDDEN
            if (plain := str(name)).casefold() in hidden or rules.hide(below := (*path, plain))
            else redact(one, rules, below, depth + 1)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        if len(value) == 2 and isinstance(value[0], str) and rules.hide((*path, value[0])):
            return [value[0], HIDDEN]
        return [redact(one, rules, path, depth + 1) for one in value]
    if not isinstance(value, str):
        return value
    holds_json = value.lstrip()[:1] in ("{", "[")
    return _within(value, rules, path, depth + 1) if holds_json else rules.scrub(value)


def _calls(value: Mapping[Any, Any], rules: Rules, path: tuple[str, ...]) -> bool:
    """True if the object describes one field, and its name is to be hidden."""
    called = [one for name, one in value.items() if str(name).casefold() in _CALLED and isinstance(one, str)]
    return any(rules.hide((*path, one)) for one in called)


def _within(text: str, rules: Rules, path: tuple[str, ...], depth: int) -> str:
    try:
        seen = stored_json(text)
        shown = redact(seen, rules, path, depth)
    except RecursionError:
        return HIDDEN
    except ValueError:
        return rules.scrub(text)
    return rules.scrub(text) if shown == seen else json.dumps(shown, ensure_ascii=False)


def redacted_text(text: str | None, rules: Rules) -> Any:
    """Return a stored JSON text as a redacted value; hide it all if it is not JSON."""
    if text is None:
        return None
    try:
        return redact(stored_json(text), rules)
    except (ValueError, RecursionError):
        return HIDDEN


def redacted(document: Any, rules: Rules) -> Any:
    """Return a document as plain values, without secrets in texts of other systems and in details."""

    def member(name: str, value: Any) -> Any:
        if name in SCRUBBED and isinstance(value, str):
            return rules.scrub(value)
        if name in KEPT:
            return value
        if name == "details":
            return redact(value, rules)
        if isinstance(value, dict):
            return {key: member(key, one) for key, one in value.items()}
        return [member("", one) for one in value] if isinstance(value, list | tuple) else value

    return member("", msgspec.to_builtins(document, builtin_types=(datetime,)))
