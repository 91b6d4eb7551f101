"""What the lanes of a relay have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from relaybox.core.clock import Clock
from relaybox.emit.wakes.wake import Wake
from relaybox.relay.observer import Observer
from relaybox.relay.quarantine import Quarantine
from relaybox.stores.store import Store


def _whole(destination: str, total: int) -> int:
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
    share: Callable[[str, int], int] = _whole
    quarantine: Quarantine = field(init=False)

    def __post_init__(self) -> None:
        self.quarantine = Quarantine(self.store, self.clock, self.observer)

    def pause(self, poll_interval: float) -> float:
        """Seconds until a database that refused is asked again; relays that lost it together come apart."""
        return poll_interval * (1.0 + 0.8 * self.random())
