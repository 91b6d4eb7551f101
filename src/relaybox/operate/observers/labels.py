"""Values of labels: few, short and printable, whatever events are called."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

OTHER = "other"
LONGEST = 100

Key = TypeVar("Key", bound=Hashable)


class Known(Generic[Key]):
    """Names values as labels, each once; all that come after the first ``most`` share one name."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._labels: dict[Key, tuple[str, ...]] = {}

    def __call__(self, value: Key, *texts: str) -> tuple[str, ...]:
        """The labels of a value, which are these texts when it is new."""
        found = self._labels.get(value)
        if found is not None:
            return found
        if len(self._labels) >= self._most:
            return (OTHER,) * len(texts)
        self._labels[value] = made = tuple(label(text) for text in texts)
        return made


def label(text: str) -> str:
    """A text from outside as a label may hold it: one line, printable, of a length that can be read."""
    cut = text[:LONGEST]
    if cut.isprintable():
        return cut
    return "".join(character if character.isprintable() else "?" for character in cut)
