"""When two documents are the same, which fields differ, and many ids in little memory."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

_EXACT = 2**53
"""Below it a float holds every whole number; an engine that knows only floats rounds larger ones."""

_ABSENT = object()


def version_of(document: Mapping[str, Any]) -> bytes:
    """A hash of what it says: neither the order of its keys nor 1 or 1.0 makes a difference."""
    return blake2b(msgspec.json.encode(canonical(document), order="sorted"), digest_size=16).digest()


def canonical(value: Any) -> Any:
    """The value with every number in the one form that all engines agree on."""
    if isinstance(value, Mapping):
        return {str(name): canonical(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, int) and abs(value) >= _EXACT:
        return _rounded(value)
    return value


def _rounded(value: int) -> float | str:
    try:
        return float(value)
    except OverflowError:
        return str(value)


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that are not the same in both, by name."""
    names = sorted(expected.keys() | found.keys())
    return tuple(name for name in names if _field(expected, name) != _field(found, name))


def _field(document: Mapping[str, Any], name: str) -> object:
    if name not in document:
        return _ABSENT
    return msgspec.json.encode(canonical(document[name]), order="sorted")


class HashedIds:
    """Which ids there are, in eight bytes each; one in 2**64 is taken for another."""

    def __init__(self, part: int = 65_536) -> None:
        self._part = part
        self._parts: list[array[int]] = []
        self._newest: set[int] = set()

    def add(self, id_: str) -> None:
        """Keep it."""
        self._newest.add(_hash(id_))
        if len(self._newest) >= self._part:
            self._parts.append(array("Q", sorted(self._newest)))
            self._newest = set()

    def __contains__(self, id_: str) -> bool:
        value = _hash(id_)
        return value in self._newest or any(_holds(part, value) for part in self._parts)


def _hash(id_: str) -> int:
    return int.from_bytes(blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _holds(part: array[int], value: int) -> bool:
    at = bisect_left(part, value)
    return at < len(part) and part[at] == value
