"""What of a payload, and of a text about it, is not shown: by the names of its fields, whoever looks."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

HIDDEN = "•••"
DEEP = "…"
"""Stands for what is nested too deeply to be shown."""

NAMES = (
    "password", "passwd", "pwd", "passphrase", "secret", "credential", "token", "authorization", "cookie",
    "session", "signature", "apikey", "accesskey", "privatekey", "card", "cvv", "cvc", "iban", "ssn",
)  # fmt: skip
"""What a field's name must not contain to be shown; compared without case, dashes and underscores."""

DEEPEST = 100

_CALLED = frozenset({"name", "key", "field", "header"})
_VALUED = frozenset({"value", "values"})
"""Members of an object that stands for one field: how it is called, and what it holds."""

_VALUE = r"""(?:(?:bearer|basic|digest|negotiate)\s+)?(?:"[^"]*"|'[^']*'|\S+)"""
_USER_INFO = re.compile(r"(?<=://)[^/\s@]+(?=@)")


@dataclass(frozen=True, slots=True)
class Rules:
    """``paths`` are names with dots between them that lead to a value, wherever in a document they begin."""

    paths: tuple[str, ...] = ()

    @classmethod
    def of(cls, redact: Iterable[str]) -> Rules:
        """Made of the setting ``redact``."""
        return cls(tuple(rule.casefold() for rule in redact))

    def hide(self, path: tuple[str, ...]) -> bool:
        """Whether the value at the end of this path is hidden."""
        name = re.sub(r"[^0-9a-z]", "", path[-1].casefold())
        if any(one in name for one in NAMES):
            return True
        # A name may hold dots itself.
        whole = "." + ".".join(path)
        return any(whole.endswith(f".{rule}") for rule in self.paths)

    def scrub(self, text: str) -> str:
        """A text that others wrote, such as an error, without what stands behind such a name."""
        return _USER_INFO.sub(HIDDEN, _spoken(self).sub(rf"\1{HIDDEN}", text))


@functools.lru_cache(maxsize=64)
def _spoken(rules: Rules) -> re.Pattern[str]:
    names = ["[-_ ]?".join(map(re.escape, name)) for name in NAMES]
    # What is discarded is no card.
    names = [f"(?<!dis){name}" if name.startswith("c") else name for name in names]
    either = "|".join([*names, *map(re.escape, rules.paths)])
    return re.compile(rf"""((?:{either})[\w-]{{0,30}}["']?\s{{0,5}}[=:]\s{{0,5}}){_VALUE}""", re.IGNORECASE)


def redact(value: Any, rules: Rules, path: tuple[str, ...] = (), depth: int = 0) -> Any:
    """The same shape, with ``•••`` in place of what is hidden."""
    if depth > DEEPEST:
        return DEEP
    if isinstance(value, Mapping):
        hidden = _VALUED if _calls(value, rules, path) else ()
        return {
            name: HIDDEN
            if (plain := str(name).casefold()) in hidden or rules.hide(below := (*path, plain))
            else redact(one, rules, below, depth + 1)
            for name, one in value.items()
        }
    if isinstance(value, list | tuple):
        return [redact(one, rules, path, depth + 1) for one in value]
    if isinstance(value, str) and value.lstrip()[:1] in ("{", "["):
        return _within(value, rules, path, depth + 1)
    return value


def _calls(value: Mapping[Any, Any], rules: Rules, path: tuple[str, ...]) -> bool:
    """Whether the object stands for one field, by a name whose value is hidden."""
    called = [one for name, one in value.items() if str(name).casefold() in _CALLED and isinstance(one, str)]
    return any(rules.hide((*path, one.casefold())) for one in called)


def _within(text: str, rules: Rules, path: tuple[str, ...], depth: int) -> str:
    """A text that is itself a document, or the beginning of one."""
    try:
        seen = json.loads(text, parse_constant=str)
        shown = redact(seen, rules, path, depth)
    except RecursionError:
        return HIDDEN
    except ValueError:
        return rules.scrub(text)
    return rules.scrub(text) if shown == seen else json.dumps(shown, ensure_ascii=False)


def redacted_text(text: str | None, rules: Rules) -> Any:
    """A stored JSON text as a value that may be shown; what is no JSON cannot be looked through."""
    if text is None:
        return None
    try:
        return redact(json.loads(text, parse_constant=str), rules)
    except (ValueError, RecursionError):
        return HIDDEN
