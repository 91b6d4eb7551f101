"""Define the contract of a wake, which tells a relay to look now instead of at the next poll.

A wake is only a hint: a lost one delays an event until the next poll, a needless one costs an empty claim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Wake(Protocol):
    """Lets the lanes of a relay sleep until there may be something to do."""

    @property
    def alive(self) -> bool:
        """True if it hears of events that other processes commit."""
        ...

    async def wait(self, destination: str, seconds: float) -> bool:
        """Sleep until woken, at most ``seconds``; True if woken since the last wait. One lane at a time."""
        ...

    def wake(self, destination: str | None = None) -> None:
        """Wake the lane of one destination, or all lanes, from any thread; never raise."""
        ...

    async def close(self) -> None:
        """Stop listening and release connections."""
        ...


class Caller(Protocol):
    """The emitter's side: tells relays in any process that events for destinations are committed."""

    def call(self, destinations: Iterable[str]) -> None:
        """Tell the relays; return at once and never raise."""
        ...

    def close(self) -> None:
        """Release connections; a call just made still goes out if that takes no more than a second."""
        ...
