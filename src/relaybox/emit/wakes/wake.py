"""The contract of a wake: what tells a relay to look now instead of at the next poll.

A wake is a hint. One that is lost costs the time until the next poll, never an event; one given for nothing
costs an empty claim.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Wake(Protocol):
    """Lets the lanes of a relay sleep until there may be something to do."""

    @property
    def alive(self) -> bool:
        """Whether it hears of events that other processes commit."""
        ...

    async def wait(self, destination: str, seconds: float) -> bool:
        """Sleep for ``seconds``, or until the destination was woken since the last wait; whether it was.

        One lane waits for a destination at a time.
        """
        ...

    def wake(self, destination: str | None = None) -> None:
        """Wake one destination's lane, or all; from any thread. Never raises."""
        ...

    async def close(self) -> None:
        """Give up what is held."""
        ...


class Caller(Protocol):
    """The emitter's side: tells relays, wherever they run, that events for destinations are committed."""

    def call(self, destinations: Iterable[str]) -> None:
        """Tell them. Returns at once and never raises."""
        ...

    def close(self) -> None:
        """Give up what is held. A call just made still goes out, if that takes no longer than a second."""
        ...
