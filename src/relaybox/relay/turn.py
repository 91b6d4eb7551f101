"""A lane's place in the line of a destination's rate limit, which all relays share."""

from __future__ import annotations

import asyncio

from relaybox.core.settings import Destination
from relaybox.errors import StoreError
from relaybox.relay.shared import Shared


class Turn:
    """Waits for places in the line, but not once the lane is ``halted``."""

    def __init__(self, destination: Destination, shared: Shared, halted: asyncio.Event) -> None:
        self._name = destination.name
        self._rate = destination.rate_limit
        self._shared = shared
        self._halted = halted

    async def __call__(self, count: int) -> None:
        """Wait for so many places."""
        if self._rate is None:
            return
        try:
            seconds = await self._shared.store.reserve(self._name, count, self._rate)
        except StoreError as error:
            self._shared.observer.trouble(self._name, "reserve", error)
            seconds = count / self._rate
        await self._unless_halted(seconds)

    async def _unless_halted(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self._halted.wait()
        except TimeoutError:
            return
