"""Run an operation with heartbeats, and record how it ended.

A runner does not stop the work by itself. Work in batches looks at ``reason`` between two of them; other work
is interrupted by ``guard``.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Coroutine
from typing import Any, Protocol, Self, TypeVar
from uuid import UUID

from relaybox.core.scrub import scrub
from relaybox.errors import RelayboxError, StoreError
from relaybox.relay.process import died
from relaybox.stores.journal import STALLED, OperationState

BEAT = 1.0
"""Seconds between two heartbeats of an operation."""

PATIENCE = 5.0
"""Seconds to keep trying to record how an operation ended."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class Cancelled(RelayboxError):
    """An operator cancelled the operation."""


class Record(Protocol):
    """Where a runner writes of its operation, such as the journal."""

    async def advance(self, id_: UUID, done: int, skipped: int) -> bool:
        """Write a heartbeat and the progress; return False if the operation was cancelled."""

    async def finish(
        self, id_: UUID, state: OperationState, done: int, skipped: int, error: str | None = None
    ) -> None:
        """Record how the operation ended, unless another process owns it now. May be repeated."""


class Runner:
    """Gives signs of life during its block, then records how the block ended.

    ``interrupted`` is the error to record if the block is cancelled. ``failure`` is raised if the operation
    must end: it was cancelled, or the database did not answer for ``silence`` seconds.
    """

    def __init__(
        self,
        id_: UUID,
        record: Record,
        interrupted: str,
        *,
        failure: type[RelayboxError] = Cancelled,
        silence: float = math.inf,
    ) -> None:
        self.id = id_
        self.done = self.skipped = 0
        self.patience = PATIENCE
        self.reason: RelayboxError | None = None
        """Why the operation must end, or None."""
        self._record = record
        self._interrupted = interrupted
        self._failure = failure
        self._silence = silence
        self._must_end = asyncio.Event()
        self._end: tuple[OperationState, str | None] = ("done", None)

    async def __aenter__(self) -> Self:
        self._beating = asyncio.create_task(self._beat())
        return self

    async def __aexit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, asyncio.CancelledError):
            self.end_as("cancelled", self._interrupted)
        elif error is not None:
            known = isinstance(error, RelayboxError)
            self.end_as("failed", scrub(str(error) if known else f"{type(error).__name__}: {error}"))
        await to_its_end(self._finish(), PATIENCE)

    def stop(self, reason: RelayboxError) -> None:
        """Give the reason why the operation must end, if there is none yet."""
        self.reason = self.reason or reason
        self._must_end.set()

    def end_as(self, state: OperationState, error: str | None) -> None:
        """Set what is recorded at the end of the block."""
        self._end = state, error

    def check(self) -> None:
        """Raise the reason if the operation must end."""
        if self.reason is not None:
            raise self.reason

    async def beat(self) -> None:
        """Write a heartbeat now."""
        if not await self._record.advance(self.id, self.done, self.skipped):
            self.stop(self._failure("it was cancelled"))

    async def guard(self, work: Awaitable[T], *guards: Awaitable[None]) -> T:
        """Do the work. If the operation must end or a guard raises, cancel the work and raise that error."""
        task = asyncio.ensure_future(work)
        watching = [asyncio.ensure_future(guard) for guard in (self._wait(), *guards)]
        try:
            done, _ = await asyncio.wait([task, *watching], return_when=asyncio.FIRST_COMPLETED)
            if task not in done:
                [ended, *_] = done
                ended.result()
            return task.result()
        finally:
            for one in (task, *watching):
                one.cancel()
            await asyncio.gather(task, *watching, return_exceptions=True)

    async def _wait(self) -> None:
        await self._must_end.wait()
        self.check()

    async def _beat(self) -> None:
        seen = time.monotonic()
        while True:
            try:
                await self.beat()
                seen = time.monotonic()
            except Exception as error:
                log.warning("the operation %s cannot give a sign of life: %s", self.id, error)
                if time.monotonic() - seen > self._silence:
                    self.stop(self._failure(f"the database does not answer: {error}"))
            await asyncio.sleep(BEAT)

    async def _finish(self) -> None:
        """End the heartbeat, then record the end; try again while the database is unavailable."""
        self._beating.cancel()
        await asyncio.wait([self._beating])
        began = time.monotonic()
        while True:
            try:
                state, error = self._end
                await self._record.finish(self.id, state, self.done, self.skipped, error)
                break
            except StoreError as trouble:
                # Without a record it shows as stalled.
                log.warning("the operation %s cannot say how it ended: %s", self.id, trouble)
            if time.monotonic() - began >= self.patience:
                break
            await asyncio.sleep(BEAT)


async def to_its_end(work: Coroutine[Any, Any, T], patience: float | None = None) -> T:
    """Do the work, even if the caller is cancelled meanwhile, but then for ``patience`` seconds at most."""
    task = asyncio.create_task(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
            if patience is not None:
                asyncio.get_running_loop().call_later(patience, task.cancel)
    if cancelled is not None:
        task.cancelled() or task.exception()
        raise cancelled
    return task.result()


def is_abandoned(silent: float, process: object) -> bool:
    """True if the process of an unfinished operation, silent for so many seconds, does not work on it."""
    return silent > STALLED or died(str(process))
