"""A round of upkeep: several works in turns, batch by batch, with rests that leave the database to others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from relaybox.core.clock import Clock

REST = 0.05
"""Seconds after a batch that found something, at least; after one that took longer, as long as it took."""


class Batch(NamedTuple):
    """What one batch of a work did, and whether another is worth while."""

    changed: int
    more: bool


class Round(NamedTuple):
    """What a round did. ``done``: nothing was left over; ``led``: the term lasted."""

    changed: int = 0
    done: bool = True
    led: bool = True


Work: TypeAlias = Callable[[int], Awaitable[Batch | None]]
"""Does a batch under a term; None: the term is over."""
Rest: TypeAlias = Callable[[float], Awaitable[bool]]
"""Waits so many seconds; whether to go on."""


async def take_turns(term: int, works: Sequence[Work], clock: Clock, rest: Rest, batches: int) -> Round:
    """Do at most ``batches`` in all, each work in its turn until it has nothing more to do."""
    changed, line = 0, list(works)
    for _ in range(batches):
        if not line:
            break
        work = line.pop(0)
        began = clock.now()
        batch = await work(term)
        if batch is None:
            return Round(changed, done=False, led=False)
        changed += batch.changed
        if batch.more:
            line.append(work)
        idle = not (batch.changed or batch.more)
        if not await rest(0.0 if idle else max(REST, clock.now() - began)):
            return Round(changed, done=False)
    return Round(changed, done=not line)
