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
        self._destination = destination
        self._shared = shared
        self._next = SHORTEST_POLL
        self._longest = self._destination.poll_interval

    async def sleep(self) -> bool:
        """Sleep for the next pause; return True if woken before its end."""
        seconds = self._next
        if self._shared.wake.alive:
            seconds = max(seconds, SHORTEST_POLL_WITH_WAKE)
        seconds = min(seconds, self._longest)
        self._next = 2 * seconds
        woken = await self._shared.wake.wait(self._destination.name, seconds)
        if woken:
            self.shorten()
        return woken

    def after_claim(self, *, refused: bool) -> None:
        """Set the limit after a claim: the ``poll_interval``, or a random pause if the store refused it."""
        self._longest = self._destination.poll_interval
        if refused:
            self._longest = self._next = self._shared.pause(self._destination.poll_interval)

    def shorten(self) -> None:
        """Begin with the shortest pause again."""
        self._next = SHORTEST_POLL
