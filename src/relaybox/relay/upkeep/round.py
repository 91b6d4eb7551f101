"""A round of upkeep: several works in turns, batch by batch, with rests that leave the database to others."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from relaybox.core.clock import Clock
from relaybox.errors import Locked, RowRefused, StoreError

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
    """Do about ``batches`` in all, at least one of each work; each gets its turn until it has no more to do.

    A work that meets a lock or a row that cannot be written ends for this round. The others go on, and then
    the first such error is raised.
    """
    changed, line = 0, list(works)
    problem: StoreError | None = None
    for _ in range(max(batches, len(works))):
        if not line:
            break
        work = line.pop(0)
        began = clock.now()
        try:
            batch = await work(term)
        except (Locked, RowRefused) as error:
            problem = problem or error
            continue
        if batch is None:
            return Round(changed, done=False, led=False)
        changed += batch.changed
        if batch.more:
            line.append(work)
        idle = not (batch.changed or batch.more)
        if not await rest(0.0 if idle else max(REST, clock.now() - began)):
            return Round(changed, done=False)
    if problem is not None:
        raise problem
    return Round(changed, done=not line)
