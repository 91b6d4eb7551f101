"""What the other outbox publishes to, in the place of its connection to a broker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NoConnection:
    """Takes everything and does nothing; ``closed`` is called where a batch has been published."""

    closed: Callable[[], None] | None = None

    def __init__(self, **parameters: Any) -> None:
        self._open = False

    def is_connected(self) -> bool:
        """Whether it is open."""
        return self._open

    def connect(self, **credentials: Any) -> None:
        """Open it."""
        self._open = True

    def send(self, body: str, destination: str, headers: Any) -> None:
        """Nothing."""

    def disconnect(self) -> None:
        """Close it."""
        self._open = False
        if NoConnection.closed is not None:
            NoConnection.closed()
