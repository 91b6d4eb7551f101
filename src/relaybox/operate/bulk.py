"""Bulk actions in the background of a process, recorded where everybody can see and cancel them.

An operation records its progress every second. If its process dies, it shows as ``stalled``. Finished batches
stay done, and starting it again does the rest. A replay starts again from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, get_args
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.errors import ConfigError, RelayboxError, StoreError
from relaybox.operate.admin import Admin
from relaybox.operate.admin_actions import Action, Done, Options, described
from relaybox.operate.pace import Pace, never
from relaybox.stores.journal import Operation, OperationState
from relaybox.stores.ledger import Filter

OpenAdmin: TypeAlias = Callable[[str], AbstractAsyncContextManager[Admin]]

BEAT = 1.0
"""Seconds between two heartbeats of an operation."""

PATIENCE = 5.0
"""Seconds that ``close`` waits for running batches."""

MOST = 8
"""Operations that run in one process; each has its own connection."""

FINISH = 30.0
"""Seconds to keep trying to record how an operation ended."""

STOPPED = "its process was stopped; start it again for the rest"
STOPPED_REPLAY = (
    "its process was stopped; started again it replays those too that it has done: narrow its filter"
)

log = logging.getLogger(__name__)


class TooManyOperations(RelayboxError):
    """This process runs as many operations as it may."""


@dataclass(slots=True)
class _Running:
    id: UUID
    action: Action
    done: int = 0
    skipped: int = 0
    stop: bool = False
    closing: bool = False


class Bulk:
    """Runs the operations of one process; ``open_admin`` opens the service for one (``Outbox.admin``)."""

    def __init__(self, open_admin: OpenAdmin) -> None:
        self._open_admin = open_admin
        self._tasks: dict[asyncio.Task[None], _Running] = {}
        self._starting = 0

    async def start(
        self, actor: str, action: Action, filter: Filter, *, to: str | None = None, rate: float | None = None
    ) -> Operation:
        """Start an action at ``rate`` rows a second; raise as the action would.

        It takes all that the filter finds; a move takes all of the filter's destination.
        """
        if action not in get_args(Action):
            raise ConfigError(f"action = {action!r}: use {', '.join(get_args(Action))}")
        Pace(rate, never)
        if len(self._tasks) + self._starting >= MOST:
            fix = "wait for one of them, or cancel it"
            raise TooManyOperations(f"{MOST} operations run in this process already; {fix}")
        running = _Running(uuid7(), action)
        self._starting += 1
        try:
            async with AsyncExitStack() as opened:
                admin = await opened.enter_async_context(self._open_admin(actor))
                counted = await admin.count(action, filter, to=to)
                given = {name: value for name, value in (("to", to), ("rate", rate)) if value is not None}
                details = msgspec.to_builtins({"filter": described(filter), **given})
                await admin.journal.begin(running.id, action, actor, details, counted)
                operation = await admin.operation(running.id)
                assert operation is not None
                work = _action(admin, running, filter, to, rate)
                task = asyncio.create_task(_run(opened.pop_all(), admin, running, work))
            self._tasks[task] = running
        finally:
            self._starting -= 1
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        return operation

    async def close(self) -> None:
        """Stop running operations after their current batch; they are recorded as cancelled."""
        for running in self._tasks.values():
            running.stop = running.closing = True
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run(
    opened: AsyncExitStack, admin: Admin, running: _Running, work: Coroutine[Any, Any, Done]
) -> None:
    try:
        async with opened:
            beating = asyncio.create_task(_beat(admin, running))
            try:
                state, error = await _ended(work, running)
            finally:
                beating.cancel()
                with suppress(asyncio.CancelledError):
                    await beating
            await _finish(admin, running, state, error)
    except Exception:
        # The database cannot record it, so the operation will show as stalled.
        log.exception("the operation %s cannot be put on record", running.id)


async def _finish(admin: Admin, running: _Running, state: OperationState, error: str | None) -> None:
    """Record the end, and retry while the database is unavailable."""
    clock = asyncio.get_running_loop().time
    give_up = clock() + (PATIENCE if running.closing else FINISH)
    while True:
        try:
            return await admin.journal.finish(running.id, state, running.done, running.skipped, error)
        except StoreError as trouble:
            if clock() >= give_up:
                raise
            log.warning("the operation %s cannot say how it ended: %s", running.id, trouble)
        await asyncio.sleep(BEAT)


async def _ended(work: Coroutine[Any, Any, Done], running: _Running) -> tuple[OperationState, str | None]:
    stopped = STOPPED_REPLAY if running.action == "replay" else STOPPED
    try:
        done = await work
    except asyncio.CancelledError:
        return "cancelled", stopped
    except Exception as error:
        known = isinstance(error, StoreError | ConfigError)
        return "failed", str(error) if known else f"{type(error).__name__}: {error}"
    running.done, running.skipped = done.affected, done.skipped
    if done.stopped:
        return "cancelled", stopped if running.closing else None
    return "done", None


async def _beat(admin: Admin, running: _Running) -> None:
    while True:
        try:
            running.stop |= not await admin.journal.advance(running.id, running.done, running.skipped)
        except Exception as error:
            log.warning("the operation %s cannot say how far it is: %s", running.id, error)
        await asyncio.sleep(BEAT)


def _action(
    admin: Admin, running: _Running, filter: Filter, to: str | None, rate: float | None
) -> Coroutine[Any, Any, Done]:
    def progress(count: int) -> None:
        running.done = count

    options: Options = {"rate": rate, "stop": lambda: running.stop, "progress": progress}
    if running.action == "move":
        return admin.move(filter.destination or "", to or "", **options)
    if running.action == "replay":
        return admin.replay(filter, to=to, **options)
    return (admin.retry if running.action == "retry" else admin.discard)(filter, **options)
