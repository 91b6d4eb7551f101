"""Sleep between claims that found nothing."""

from __future__ import annotations

from relaybox.core.settings import Destination
from relaybox.relay.shared import Shared

SHORTEST_POLL = 0.01
SHORTEST_POLL_WITH_WAKE = 0.25
"""Seconds. If wake-ups work, polling only has to find events without one."""


class Rest:
    """The pauses of one lane: each is longer than the one before, up to its ``poll_interval``."""

    def __init__(self, destination: Destination, shared: Shared) -> None:
        self._name = destination.name
        self._poll_interval = destination.poll_interval
        self._shared = shared
        self._next = SHORTEST_POLL

    async def sleep(self, *, refused: bool) -> bool:
        """Sleep until woken, which returns True, or for a while; ``refused``: the store is in trouble."""
        longest = self._poll_interval
        if refused:
            self._next = longest = self._shared.pause(self._poll_interval)
        seconds = self._next
        if self._shared.wake.alive:
            seconds = max(seconds, SHORTEST_POLL_WITH_WAKE)
        seconds = min(seconds, longest)
        self._next = 2 * seconds
        woken = await self._shared.wake.wait(self._name, seconds)
        if woken:
            self.shorten()
        return woken

    def shorten(self) -> None:
        """Begin with the shortest pause again."""
        self._next = SHORTEST_POLL
