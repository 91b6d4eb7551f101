"""Bulk actions in the background of a process, recorded where everybody can see and cancel them.

An operation records its progress every second. If its process dies, it shows as ``stalled``. Finished batches
stay done, and starting it again does the rest. A replay starts again from the beginning.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from typing import get_args

import msgspec
from uuid_utils.compat import uuid7

from relaybox.errors import ConfigError, RelayboxError
from relaybox.operate.action import Done, Options
from relaybox.operate.admin import Admin
from relaybox.operate.admin_actions import described
from relaybox.operate.configured import Action
from relaybox.operate.pace import Pace, never
from relaybox.operate.runner import Runner
from relaybox.stores.journal import Operation
from relaybox.stores.ledger import Filter

PATIENCE = 5.0
"""Seconds that ``close`` waits for running batches, and then for a record of their end."""

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


class Bulk:
    """Runs the operations of one process; ``open_admin`` opens the service for one (``Outbox.admin``)."""

    def __init__(self, open_admin: Callable[[str], AbstractAsyncContextManager[Admin]]) -> None:
        self._open_admin = open_admin
        self._tasks: dict[asyncio.Task[None], Runner] = {}
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
        id_ = uuid7()
        self._starting += 1
        try:
            async with AsyncExitStack() as opened:
                admin = await opened.enter_async_context(self._open_admin(actor))
                counted = await admin.count(action, filter, to=to)
                given = {name: value for name, value in (("to", to), ("rate", rate)) if value is not None}
                details = msgspec.to_builtins({"filter": described(filter), **given})
                await admin.journal.begin(id_, action, actor, details, counted)
                operation = await admin.operation(id_)
                assert operation is not None
                stopped = STOPPED_REPLAY if action == "replay" else STOPPED
                runner = Runner(id_, admin.journal, stopped)
                runner.patience = FINISH
                work = _action(admin, runner, action, filter, to, rate)
                task = asyncio.create_task(_run(opened.pop_all(), runner, work, stopped))
            self._tasks[task] = runner
        finally:
            self._starting -= 1
        task.add_done_callback(lambda ended: self._tasks.pop(ended, None))
        return operation

    async def close(self) -> None:
        """Stop running operations after their current batch; they are recorded as cancelled."""
        for runner in self._tasks.values():
            runner.patience = PATIENCE
            runner.stop(_Closing())
        tasks = list(self._tasks)
        if tasks:
            await asyncio.wait(tasks, timeout=PATIENCE)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Closing(RelayboxError):
    """The process stops."""


async def _run(opened: AsyncExitStack, runner: Runner, work: Awaitable[Done], stopped: str) -> None:
    try:
        async with opened, runner:
            done = await work
            runner.done, runner.skipped = done.affected, done.skipped
            if done.stopped:
                runner.end_as("cancelled", stopped if isinstance(runner.reason, _Closing) else None)
    except Exception as error:
        log.warning("the operation %s failed: %s", runner.id, error, exc_info=True)


def _action(
    admin: Admin, runner: Runner, action: Action, filter: Filter, to: str | None, rate: float | None
) -> Awaitable[Done]:
    progress = partial(setattr, runner, "done")
    options: Options = {"rate": rate, "stop": lambda: runner.reason is not None, "progress": progress}
    if action == "move":
        return admin.move(filter.destination or "", to or "", **options)
    if action == "replay":
        return admin.replay(filter, to=to, **options)
    return (admin.retry if action == "retry" else admin.discard)(filter, **options)
