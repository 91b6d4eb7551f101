"""What the lanes of a relay share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from relaybox.core.clock import Clock
from relaybox.core.settings import Destination
from relaybox.emit.wakes.local import Wake
from relaybox.errors import StoreError
from relaybox.relay.observer import Observer
from relaybox.relay.quarantine import Quarantine
from relaybox.stores.store import Store


@dataclass
class Shared:
    """What the lanes share. ``share`` returns this relay's part of a destination's concurrency."""

    store: Store
    wake: Wake
    observer: Observer
    clock: Clock
    random: Callable[[], float]
    owner: str
    share: Callable[[str, int], int] = lambda _destination, total: total
    quarantine: Quarantine = field(init=False)

    def __post_init__(self) -> None:
        self.quarantine = Quarantine(self.store, self.clock, self.observer)

    def pause(self, poll_interval: float) -> float:
        """Return the seconds until a failed database call is repeated; random, so that relays spread out."""
        return poll_interval * (1.0 + 0.8 * self.random())


class Turn:
    """Waits for a destination's rate limit, unless the lane is ``halted``."""

    def __init__(self, destination: Destination, shared: Shared, halted: asyncio.Event) -> None:
        self._name = destination.name
        self._rate = destination.rate_limit
        self._shared = shared
        self._halted = halted

    async def __call__(self, count: int) -> None:
        """Wait until ``count`` deliveries may be sent."""
        if self._rate is None:
            return
        try:
            seconds = await self._shared.store.reserve(self._name, count, self._rate)
        except StoreError as error:
            self._shared.observer.trouble(self._name, "reserve", error)
            seconds = count / self._rate
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._halted.wait()
