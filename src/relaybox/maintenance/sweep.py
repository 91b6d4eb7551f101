"""Makes parked rows due that have nothing before them.

Claims and settles see to that themselves. Left over is what a change of the configuration leaves behind (a
destination that is no longer ordered, or where a failed event no longer blocks its key), and what a relay
does that dies after it settled an event and before it made the next of its key due.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from relaybox.config import Destination
from relaybox.maintenance.round import Batch, Rest, Round, Work, take_turns
from relaybox.relay.clock import Clock
from relaybox.upkeep import Upkeep

BATCH = 1000
"""Parked rows looked at in one transaction."""
BATCHES = 200
"""In one round: with their rests it is over before the next one is due."""


class Sweep:
    """Sweeps round by round; a long line of parked rows is gone on with where the last round left it."""

    def __init__(self, upkeep: Upkeep, destinations: Iterable[Destination], clock: Clock, rest: Rest) -> None:
        self._upkeep = upkeep
        self._destinations = tuple(destinations)
        self._clock = clock
        self._rest = rest
        self._after: dict[str, int | None] = {}

    async def __call__(self, term: int) -> Round:
        """One round under this term."""
        works: list[Work] = [
            partial(self._ordered if destination.ordered else self._unordered, destination)
            for destination in self._destinations
        ]
        return await take_turns(term, works, self._clock, self._rest, BATCHES)

    async def _ordered(self, destination: Destination, term: int) -> Batch | None:
        name, block = destination.name, destination.on_failed == "block"
        swept = await self._upkeep.sweep(term, name, block, self._after.get(name), BATCH)
        if swept is None:
            return None
        self._after[name] = swept.after
        return Batch(swept.changed, more=swept.after is not None)

    async def _unordered(self, destination: Destination, term: int) -> Batch | None:
        changed = await self._upkeep.unpark(term, destination.name, BATCH)
        return None if changed is None else Batch(changed, more=changed == BATCH)
