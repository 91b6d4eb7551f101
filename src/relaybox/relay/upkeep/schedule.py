"""Run jobs of upkeep on a schedule. In a round, works take turns, with rests to spare the database."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from relaybox.core.clock import Clock
from relaybox.errors import Locked, RowRefused, StoreError

log = logging.getLogger(__name__)

Job = Callable[[], Awaitable[Any]]

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


class Schedule:
    """Runs jobs and lets them rest until ``stop``."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._stopping = asyncio.Event()
        self._troubled: set[str] = set()

    def stop(self) -> None:
        """Let every job end after its current run."""
        self._stopping.set()

    async def every(self, seconds: float, doing: str, job: Job, *, again: float = math.inf) -> None:
        """Run a job every ``seconds``; after a failure run it ``again`` seconds later, if that is sooner."""
        pause = seconds
        while await self.rest(pause):
            pause = seconds if await self.attempt(doing, job) else min(seconds, again)

    async def attempt(self, doing: str, job: Job) -> bool:
        """Run a job; return True if it succeeded. Log a failure only once until the job succeeds again."""
        try:
            await job()
        except Exception as error:
            if doing not in self._troubled:
                self._troubled.add(doing)
                known = isinstance(error, StoreError)
                log.warning("upkeep cannot %s: %s; it is tried again", doing, error, exc_info=not known)
            return False
        if doing in self._troubled:
            self._troubled.discard(doing)
            log.info("upkeep can %s again", doing)
        return True

    async def rest(self, seconds: float, *events: asyncio.Event) -> bool:
        """Wait for the time, one of the events, or the stop; return True unless stopped."""
        ends = [event.wait() for event in (self._stopping, *events)]
        waits = [asyncio.ensure_future(wait) for wait in (self.clock.sleep(seconds), *ends)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self._stopping.is_set()
