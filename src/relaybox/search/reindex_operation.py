"""A long operation on record: one at a time for a destination, with signs of life, and to be cancelled."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import UUID

from uuid_utils.compat import uuid7

from relaybox.core.commands import command
from relaybox.errors import RelayboxError, StoreError
from relaybox.relay.process import died, this_process
from relaybox.search.workspace import OutboxRecords
from relaybox.stores.journal import STALLED, Operation, OperationState

BEAT = 1.0
"""Seconds between two signs of life."""

LOOKED_AT = 1_000
"""How many of the newest operations are looked through for one that runs."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class ReindexFailed(RelayboxError):
    """The index was not rebuilt; the old one goes on serving. The text says why."""


@dataclass(slots=True)
class Running:
    """An operation of this process, and how far it is."""

    id: UUID
    done: int = 0
    repaired: int = 0


@asynccontextmanager
async def alone(
    records: OutboxRecords, actor: str, destination: str, details: Mapping[str, Any]
) -> AsyncIterator[Running]:
    """Be the one reindex of a destination until the end of the block; raises where another one is alive."""
    running = Running(uuid7())
    about = {"destination": destination, **details, "process": this_process().name}
    journal = records.admin.journal
    await journal.begin(running.id, "reindex", actor, about, None)
    try:
        for other in await others(records, destination, running.id):
            await _take_over(records, other)
        yield running
    except BaseException as error:
        state: OperationState = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
        await _finish(records, running, state, _reason(error))
        raise
    await _finish(records, running, "done", None)


async def others(records: OutboxRecords, destination: str, own: UUID | None = None) -> list[Operation]:
    """The reindexes of a destination that are not at their end, besides one's own."""
    return [
        one
        for one in await records.admin.journal.operations(LOOKED_AT)
        if one.action == "reindex"
        and one.details.get("destination") == destination
        and one.finished_at is None
        and one.id != own
    ]


def is_dead(operation: Operation) -> bool:
    """Whether nobody works on it any more."""
    silent = (operation.seen_at - operation.updated_at).total_seconds()
    if operation.state == "stalled" or (operation.state == "cancelled" and silent > STALLED):
        return True
    return died(str(operation.details.get("process", "")))


async def _take_over(records: OutboxRecords, other: Operation) -> None:
    """Let one that is dead stay so, also if its process wakes up again."""
    if not is_dead(other):
        fix = command(f"reindex --destination {other.details['destination']} --abort")
        raise ReindexFailed(
            f"a reindex of {other.details['destination']!r} is running ({other.actor}, since "
            f"{other.started_at:%H:%M:%S} UTC): wait for it, or end it with {fix}"
        )
    await records.admin.journal.finish(other.id, "failed", other.done, other.skipped, "its process ended")


async def _finish(records: OutboxRecords, running: Running, state: OperationState, error: str | None) -> None:
    try:
        await records.admin.journal.finish(running.id, state, running.done, running.repaired, error)
    except StoreError as trouble:
        # It will show as stalled.
        log.warning("the operation %s cannot say how it ended: %s", running.id, trouble)


def _reason(error: BaseException) -> str:
    if isinstance(error, RelayboxError):
        return str(error)
    return "interrupted" if isinstance(error, asyncio.CancelledError) else f"{type(error).__name__}: {error}"


async def beat(records: OutboxRecords, running: Running) -> None:
    """Give signs of life; ends with a failure where somebody cancelled it, or nobody can see them."""
    seen = time.monotonic()
    while True:
        try:
            if not await records.admin.journal.advance(running.id, running.done, running.repaired):
                raise ReindexFailed("it was cancelled")
            seen = time.monotonic()
        except StoreError as error:
            # Somebody else may begin after STALLED: by then nothing of this one may run.
            if time.monotonic() - seen > STALLED / 2:
                raise ReindexFailed(f"the database does not answer: {error}") from error
        await asyncio.sleep(BEAT)


async def guarded(work: Awaitable[T], *guards: Awaitable[None]) -> T:
    """Do the work for as long as no guard raises; what one raises is raised, after the work is cancelled."""
    task = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(guard) for guard in guards]
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
