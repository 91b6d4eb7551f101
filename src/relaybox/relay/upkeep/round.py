"""Run a round of upkeep: several works take turns, batch by batch, with rests to spare the database."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple, TypeAlias

from relaybox.core.clock import Clock
from relaybox.errors import Locked, RowRefused, StoreError

REST = 0.05
"""Seconds to rest after a batch that found something; longer if the batch took longer."""


class Round(NamedTuple):
    """The result of a round, or of one batch of a work in it.

    ``done``: nothing is left to do; ``led``: the term lasted until the end.
    """

    changed: int = 0
    done: bool = True
    led: bool = True


Work: TypeAlias = Callable[[int], Awaitable[Round | None]]
"""Does a batch under a term; returns None if the term is over."""
Rest: TypeAlias = Callable[[float], Awaitable[bool]]
"""Waits so many seconds; returns True to go on."""


async def take_turns(term: int, works: Sequence[Work], clock: Clock, rest: Rest, batches: int) -> Round:
    """Run about ``batches`` in all, at least one of each work; works take turns until nothing is left to do.

    A work that meets a lock, or a row that cannot be written, stops for this round. The others go on; at the
    end the first such error is raised.
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
            batch = Round()
        if batch is None:
            return Round(changed, done=False, led=False)
        changed += batch.changed
        if not batch.done:
            line.append(work)
        idle = batch.done and not batch.changed
        if not await rest(0.0 if idle else max(REST, clock.now() - began)):
            return Round(changed, done=False)
    if problem is not None:
        raise problem
    return Round(changed, done=not line)
