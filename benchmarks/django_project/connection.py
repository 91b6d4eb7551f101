"""A replacement for the other outbox's connection to a broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


def _nothing(*arguments: Any) -> None:
    pass


class Receiver:
    """Pass bodies to ``handle``; ``closed`` is called when a batch has been published."""

    handle: ClassVar[Callable[[str], Any]] = _nothing
    closed: ClassVar[Callable[[], None]] = _nothing

    def __init__(self, **parameters: Any) -> None:
        self._open = False

    def is_connected(self) -> bool:
        """True if it is open."""
        return self._open

    def connect(self, **credentials: Any) -> None:
        """Open it."""
        self._open = True

    def send(self, body: str, destination: str, headers: Any) -> None:
        """Pass a body on."""
        Receiver.handle(body)

    def disconnect(self) -> None:
        """Close it."""
        self._open = False
        Receiver.closed()
