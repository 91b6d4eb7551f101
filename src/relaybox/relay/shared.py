"""What the lanes of a relay have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from relaybox.observe import Observer
from relaybox.relay.clock import Clock
from relaybox.store import Store
from relaybox.wake import Wake


def _whole(total: int) -> int:
    return total


@dataclass
class Shared:
    """What the lanes of a relay have in common. ``share`` is this relay's part of a destination's limit."""

    store: Store
    wake: Wake
    observer: Observer
    clock: Clock
    random: Callable[[], float]
    owner: str
    share: Callable[[int], int] = _whole
    quarantine: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a suspect is in flight: when it kills the process, no other suspect shall be blamed."""

    def pause(self, poll_interval: float) -> float:
        """Seconds until a database that refused is asked again; relays that lost it together come apart."""
        return poll_interval * (1.0 + 0.8 * self.random())
