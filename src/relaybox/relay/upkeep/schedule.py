"""Run jobs on a schedule until stopped; a job that fails is run again."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

from relaybox.core.clock import Clock
from relaybox.errors import StoreError

log = logging.getLogger(__name__)

Job = Callable[[], Awaitable[Any]]


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
