"""The project's outbox: ``get_outbox`` opens connections of its own, ``ask`` and drains use Django's.

See ``docs/explanation/django.md`` for the loop and the threads of a drain.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import threading
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from asgiref.sync import async_to_sync, sync_to_async
from django.db import Error, connections, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.conf import get_configuration, get_settings
from relaybox.contrib.django.databases import connection_of, driver_error, execute, get_statements, url_of
from relaybox.contrib.django.greenlets import has_greenlets, without_loop
from relaybox.contrib.django.handlers import with_connections
from relaybox.contrib.django.inbox import in_atomic
from relaybox.contrib.django.private import is_of_testcase, waiting_thread
from relaybox.contrib.django.signals import ThreadedSignals
from relaybox.core.event_loop import in_loop
from relaybox.core.settings import Settings
from relaybox.database.dialects import refusal
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps, drive
from relaybox.database.transactions import BEGIN_WRITING, TRANSACTION
from relaybox.operate.admin import Admin
from relaybox.outbox import Outbox
from relaybox.relay.observer import Observer
from relaybox.relay.relay import Relay
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.sql.store import SqlStore

T = TypeVar("T")
P = ParamSpec("P")

DEADLOCK = 1213
TRIES = 5

_helper = threading.local()


class ProjectOutbox(Outbox):
    """An outbox with relays that send Django's signals."""

    def __init__(self, using: str, **options: Any) -> None:
        super().__init__(**options)
        self.using = using

    def relay(self, *, patience: float = 30.0, observers: Sequence[Observer] = ()) -> Relay:
        """Return a relay for every destination, as ``Outbox.relay`` does."""
        return super().relay(patience=patience, observers=[*observers, ThreadedSignals(self.using, patience)])


def get_outbox(using: str = "default") -> Outbox:
    """Return the outbox of an alias, with the project's destinations, routes and handlers."""
    settings, handlers = in_atomic(using, *get_configuration()[:2])
    notify = settings.notify and get_settings().rings
    settings = dataclasses.replace(settings, database=url_of(using), notify=notify)
    return _made(using, settings, tuple(handlers.items()))


@functools.lru_cache(maxsize=16)
def _made(using: str, settings: Settings, handlers: tuple[tuple[str, Callable[..., Any]], ...]) -> Outbox:
    """Return the same outbox for the same settings: it holds connections for waking relays."""
    options = {field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)}
    called = {name: with_connections(function) for name, function in handlers}
    return ProjectOutbox(using, **options, handlers=called)


def ask(using: str, actor: str, work: Callable[[Admin], Awaitable[T]], *, interruptibly: bool = False) -> T:
    """Run the work with the admin service on Django's connection; ``interruptibly`` lets Ctrl-C stop it."""
    # Opening the store may query the server's kind, which must happen in this thread.
    ledger = SqlLedger(open_store(using))

    async def asked() -> T:
        return await work(Admin(ledger, get_configuration().settings.destinations, actor))

    return enter(asked, interruptibly=interruptibly)


def open_store(using: str) -> SqlStore:
    """Return the store of an alias, on the calling thread's connection."""
    statements = get_statements(connection_of(using))
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
    if has_greenlets():
        with without_loop():
            return _here(work)
    if in_loop():
        with ThreadPoolExecutor(1, "relaybox-drain") as thread:
            return thread.submit(partial(copy_context().run, _alone, work)).result()
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
    before = getattr(_helper, "alone", False)
    _helper.alone = True
    try:
        with asyncio.Runner() as runner:
            return runner.run(work())
    finally:
        _helper.alone = before


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
