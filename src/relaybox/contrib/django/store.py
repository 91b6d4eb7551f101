"""The store on Django's own connection, and the loop for it; see ``docs/explanation/django.md``."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from asgiref.sync import async_to_sync, sync_to_async
from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.databases import connection_of, dialect_of, driver_error, execute, get_statements
from relaybox.contrib.django.private import is_of_testcase, waiting_thread
from relaybox.database.connect import in_loop
from relaybox.database.dialects import refusal
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps, drive
from relaybox.database.transactions import BEGIN_WRITING, TRANSACTION
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.sql.store import SqlStore

T = TypeVar("T")
P = ParamSpec("P")

DEADLOCK = 1213
TRIES = 5

_helper = threading.local()


def open_store(using: str) -> SqlStore:
    """Return the store of an alias, on the calling thread's connection."""
    statements = get_statements(dialect_of(connection_of(using)))
    return SqlStore(StoreSteps(statements), DjangoDriver(using, statements))


def is_busy(connection: BaseDatabaseWrapper) -> bool:
    """True if the application has an open transaction, not counting that of a ``TestCase``."""
    blocks = connection.atomic_blocks
    if blocks:
        return not is_of_testcase(blocks[-1])
    connected = connection.connection is not None
    return not (connection.get_autocommit() if connected else connection.settings_dict["AUTOCOMMIT"])


class DjangoDriver:
    """A driver in the thread that called ``enter``; a run is a transaction, or a savepoint in an open one."""

    def __init__(self, using: str, statements: Statements) -> None:
        self._using = using
        self._preamble = statements("pin_plan") if statements.dialect.one_statement else None

    async def run(self, begin: Callable[[], Steps[T]], *, checked: bool = False, lane: str = "") -> T:
        """Drive the steps; restart them if the database broke a deadlock by rolling them back."""
        try:
            return await call(self._run, begin)
        except Error as error:
            raise refusal(driver_error(error)) from error

    async def close(self) -> None:
        """Do nothing: the connection is Django's."""

    def _run(self, begin: Callable[[], Steps[T]]) -> T:
        connection = connection_of(self._using)
        if connection.in_atomic_block or not connection.get_autocommit():
            with transaction.atomic(using=self._using):
                return self._drive(connection, begin())
        for _ in range(TRIES - 1):
            try:
                return self._transaction(connection, begin())
            except Error as error:
                if driver_error(error).args[:1] != (DEADLOCK,):
                    raise
        return self._transaction(connection, begin())

    def _transaction(self, connection: BaseDatabaseWrapper, steps: Steps[T]) -> T:
        try:
            for statement in BEGIN_WRITING[connection.vendor]:
                execute(connection, statement, ())
            if self._preamble is not None:
                execute(connection, *self._preamble)
            result = self._drive(connection, steps)
            execute(connection, *TRANSACTION.commit)
            return result
        except BaseException:
            # This fails on a broken connection, which has rolled back by closing.
            with suppress(Error):
                execute(connection, *TRANSACTION.rollback)
            connection.close_if_unusable_or_obsolete()
            raise

    def _drive(self, connection: BaseDatabaseWrapper, steps: Steps[T]) -> T:
        return drive(steps, lambda queries: [execute(connection, *query) for query in queries])


def enter(work: Callable[[], Coroutine[Any, Any, T]], *, interruptibly: bool = False) -> T:
    """Run ``work`` to its end; ``interruptibly`` lets Ctrl-C stop it, for commands."""
    alone = partial(copy_context().run, _alone, work)
    if (apply := _native_thread()) is not None:
        return apply(alone)
    if in_loop():
        with ThreadPoolExecutor(1, "relaybox-drain") as thread:
            return thread.submit(alone).result()
    if interruptibly:
        return _here(work)
    entered = _Entered(work)
    try:
        return async_to_sync(entered.run)()
    except BaseException:
        entered.leave()
        raise


class _Entered(Generic[T]):
    """Work that a thread waits for; an interrupt of that thread, such as a time limit, cancels the work."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._left = False
        self._ended: Future[None] = Future()
        self._begun: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any], Any] | None = None

    async def run(self) -> T:
        """Run the work."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._begun = (loop, task, waiting_thread(loop))
        try:
            if self._left:
                raise asyncio.CancelledError
            return await self._work()
        finally:
            self._ended.set_result(None)

    def leave(self) -> None:
        """Cancel the work, and serve its calls to this thread until it ends."""
        self._left = True
        if self._begun is not None and not self._ended.done():
            loop, task, executor = self._begun
            loop.call_soon_threadsafe(task.cancel)
            executor.run_until_future(self._ended)


async def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a synchronous function in the thread that called ``enter``."""
    if getattr(_helper, "alone", False):
        return _outside_loop(function, *args, **kwargs)
    return await sync_to_async(function, thread_sensitive=True)(*args, **kwargs)


def _here(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    _helper.alone = True
    try:
        with asyncio.Runner() as runner:
            return runner.run(work())
    finally:
        _helper.alone = False


def _alone(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    try:
        return _here(work)
    finally:
        connections.close_all()


def _outside_loop(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call a function as if no loop ran here. It may block: this thread does nothing else."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function(*args, **kwargs)
    finally:
        asyncio._set_running_loop(loop)


def _native_thread() -> Callable[[Callable[[], T]], T] | None:
    """Return a function that runs another in a real thread, if this process replaced threads by greenlets."""
    if "gevent" in sys.modules:
        from gevent import get_hub, monkey

        if monkey.is_module_patched("threading"):
            return get_hub().threadpool.apply  # type: ignore[no-any-return]
    if "eventlet" in sys.modules:
        from eventlet import patcher, tpool

        if patcher.is_monkey_patched("thread"):
            return tpool.execute  # type: ignore[no-any-return]
    return None
