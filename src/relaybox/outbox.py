"""The composition root: what an application makes of its settings, and calls."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar

import sqlalchemy as sa

from relaybox.core.event import Emitted
from relaybox.core.rollout import RouteFile, changed, is_sent
from relaybox.core.settings import Destination, Route, Settings, find_file
from relaybox.core.values import known_only, reveal_database
from relaybox.database.schema import make_tables
from relaybox.emit.emitter import Calls, Emitter
from relaybox.emit.row import Call
from relaybox.emit.transaction import Transaction
from relaybox.emit.wakes.open import open_bell
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.emit.event_source import Recorder
    from relaybox.operate.admin import Admin
    from relaybox.receive.inbox import Inbox
    from relaybox.relay.observer import Observer
    from relaybox.relay.relay import Relay
    from relaybox.sinks.open import OpenSink

Target = TypeVar("Target")
Function = TypeVar("Function", bound=Callable[..., Any])


class Outbox:
    """An outbox: its settings, its tables, and the calls that write events.

    ``database`` is a URL, ``env:NAME`` or ``file:PATH``. Left out, ``relaybox.toml`` or ``[tool.relaybox]``,
    RELAYBOX_DATABASE and DATABASE_URL are read; what is given here is then added, and goes before the file.
    ``handlers`` are functions by the names of destinations whose sink is ``handler:``; ``handler`` adds more.
    The other ``settings`` are those of ``relaybox.core.settings.Settings``.
    """

    def __init__(
        self,
        database: str | None = None,
        *,
        destinations: Iterable[Destination] = (),
        routes: Iterable[Route] = (),
        handlers: Mapping[str, Callable[..., Any]] | None = None,
        **settings: Any,
    ) -> None:
        self.settings, in_file = _settings(database, destinations, routes, settings)
        self.tables = make_tables(sa.MetaData(), schema=self.settings.schema, prefix=self.settings.prefix)
        self._emitter = Emitter(self.settings, self.tables)
        self._recorder: Recorder | None = None
        self._handlers = dict(handlers or {})
        self._bell = open_bell(self.settings)
        self._emitter.caller = self._bell
        self._changing = threading.Lock()
        self.file: Path | None = None
        """The file that settings of it come from."""
        if database is None and (file := find_file(None, os.environ)) is not None:
            self.follow(file, len(self.settings.routes) - in_file)
        # Set while a test runs, so that no relay of it sends anything away by accident.
        self._sink_of: OpenSink | None = None

    def emit(
        self,
        connection: Any,
        aggregate_type: str,
        aggregate_id: Any,
        event_type: str,
        payload: Any,
        *,
        idempotency_key: str | None = None,
        key: str | EllipsisType | None = ...,
        headers: Mapping[str, Any] | None = None,
        tenant: str | None = None,
        max_attempts: int | None = None,
        deliver_at: datetime | None = None,
        destinations: Sequence[str] | None = None,
        autocommit: bool = False,
    ) -> Emitted:
        """Write an event inside the caller's transaction; it exists if and only if that commits.

        ``connection`` is a SQLAlchemy Session, scoped_session or Connection, a SQLModel Session, or a
        connection of psycopg, psycopg2, sqlite3, PyMySQL or mysqlclient. A session is flushed first.

        - ``idempotency_key``: a second event of its type and key writes nothing, and gets the first one's id.
        - ``key``: the ordering key instead of the destination's own; ``None`` for no order.
        - ``headers``: travel with the event. ``tenant``: one of them, and the key where order is by tenant.
        - ``max_attempts``: instead of the destination's. ``deliver_at``: not before; refused where ordered.
        - ``destinations``: names, instead of the routes.
        - ``autocommit``: let the event commit by itself where no transaction is open, instead of raising.

        Raises an ``EmitError`` before anything reaches the database: ``InvalidField``, ``PayloadError``,
        ``Unrouted``, ``UnknownDestination``, ``UnsupportedConnection``, ``NotInTransaction``,
        ``TransactionFailed`` or ``ConnectionClosed``. ``SchemaError`` where the tables are missing; other
        errors of the database arrive as they are.
        """
        event = (aggregate_type, aggregate_id, event_type, payload)
        call = Call(*event, idempotency_key, key, headers, tenant, max_attempts, deliver_at, destinations)
        return self._emitter.write(connection, [call], autocommit)[0]

    async def aemit(
        self,
        connection: Any,
        aggregate_type: str,
        aggregate_id: Any,
        event_type: str,
        payload: Any,
        *,
        idempotency_key: str | None = None,
        key: str | EllipsisType | None = ...,
        headers: Mapping[str, Any] | None = None,
        tenant: str | None = None,
        max_attempts: int | None = None,
        deliver_at: datetime | None = None,
        destinations: Sequence[str] | None = None,
        autocommit: bool = False,
    ) -> Emitted:
        """``emit`` on a SQLAlchemy AsyncSession, async_scoped_session or AsyncConnection, or on a connection
        of psycopg (asynchronous), asyncpg (also of a pool), aiosqlite or asyncmy.
        """
        event = (aggregate_type, aggregate_id, event_type, payload)
        call = Call(*event, idempotency_key, key, headers, tenant, max_attempts, deliver_at, destinations)
        return (await self._emitter.awrite(connection, [call], autocommit))[0]

    def emit_many(self, connection: Any, calls: Calls, *, autocommit: bool = False) -> list[Emitted]:
        """Write several events in few statements; positions follow the order given.

        Each is a ``Call``, or a mapping of ``emit``'s arguments. If one is refused, none is written.
        """
        return self._emitter.emit_many(connection, calls, autocommit=autocommit)

    async def aemit_many(self, connection: Any, calls: Calls, *, autocommit: bool = False) -> list[Emitted]:
        """``emit_many``, for asynchronous connections and sessions."""
        return await self._emitter.aemit_many(connection, calls, autocommit=autocommit)

    def transaction(self, connection: Any) -> Transaction:
        """A transaction on any connection or session that ``emit`` or ``aemit`` takes.

        ``with`` on a synchronous one, ``async with`` on an asynchronous one: begins, commits at the end of
        the block, rolls back when the block raises. Where a transaction is open already the block is a
        savepoint in it, and whoever began that transaction still has to commit it. In autocommit the
        connection is in autocommit again afterwards; SQLAlchemy's AUTOCOMMIT, in which it begins nothing,
        raises ``NotInTransaction``.
        """
        return self._emitter.transaction(connection)

    def attach(self, target: Target) -> Target:
        """Emit the events that ``EventSource`` objects record in these sessions; returns ``target``.

        ``target`` is a session, a class of sessions, a sessionmaker or a scoped_session, asynchronous or not.
        Attaching twice is the same as once; a session belongs to one outbox.
        """
        from relaybox.emit.event_source import Recorder

        if self._recorder is None:
            self._recorder = Recorder(self._emitter)
        self._recorder.attach(target)
        return target

    def handler(
        self, *events: str, name: str | None = None, **options: Any
    ) -> Callable[[Function], Function]:
        """Make a function a destination of its own, with its own rows, retries and order.

        ``events`` are the patterns it takes, ``options`` those of ``Destination``; the name defaults to
        ``module.function``. The function gets an ``Event`` and may be synchronous or asynchronous.

        With ``once=True`` it runs in a transaction of the outbox's database, together with the inbox's mark
        of the event: a delivery that comes again is acknowledged without a call. A second argument, if it
        takes one, is the SQLAlchemy ``Connection`` of that transaction (``AsyncConnection`` where it is
        asynchronous); it holds one for as long as it runs.
        """
        if len(events) == 1 and callable(events[0]):
            raise ConfigError("handler: say which events it takes, as in @outbox.handler('order.*')")

        def register(function: Function) -> Function:
            called = name or f"{function.__module__}.{function.__qualname__}"
            destination = Destination(called, "handler:", **options)
            route = Route(events, to=called)
            self._change(
                lambda settings: dataclasses.replace(
                    settings,
                    destinations=(*settings.destinations, destination),
                    routes=(*settings.routes, route),
                )
            )
            self._handlers[called] = function
            return function

        return register

    def enabled(self, route: Route | str, aggregate_id: Any) -> bool:
        """Whether what the route takes of this aggregate is really sent: in its rollout, and not in shadow.

        Where it is not, an application goes on with what it did before. ``route`` is a ``Route``, one of a
        route's patterns, the name of a destination, or an event type; where that names several routes or
        destinations, all of them send it. Raises ``ConfigError`` where there is no such.
        """
        self._look()
        return is_sent(self._emitter.routes, route, aggregate_id)

    def rollout(self, route: Route | str, percent: float) -> None:
        """Take the events of so many percent of the aggregates from now on, in this process.

        ``route`` is a ``Route``, a pattern, or the name of a destination for all routes to it.
        """
        self._change(lambda settings: changed(settings, route, rollout=percent))

    def shadow(self, route: Route | str, on: bool) -> None:
        """Send what it takes, or store it and send nothing, from now on, in this process."""
        self._change(lambda settings: changed(settings, route, shadow=on))

    def follow(self, file: Path, first: int = 0) -> None:
        """Take over what changes in ``rollout`` and ``shadow`` of the routes that were read from this file.

        They begin with number ``first`` of the settings' routes. It is looked at once a second at most,
        when something is emitted, asked or routed; every other change in it is left for the next start.
        """

        def take(new: Mapping[int, Route]) -> None:
            self._change(lambda settings: _with_routes(settings, first, new))

        self.file = file
        self._emitter.look = RouteFile(file, self.settings.routes[first:], take).look

    def _look(self) -> None:
        if self._emitter.look is not None:
            self._emitter.look()

    def _latest_routes(self) -> Sequence[Route]:
        self._look()
        return self.settings.routes

    def _change(self, change: Callable[[Settings], Settings]) -> None:
        with self._changing:
            self.settings = change(self.settings)
            self._emitter.configure(self.settings)

    @functools.cached_property
    def inbox(self) -> Inbox:
        """An inbox in the outbox's own tables, with its ``inbox_window``."""
        from relaybox.receive.inbox import Inbox

        return Inbox(window=self.settings.inbox_window, tables=self.tables)

    @property
    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        """The functions that were registered, by the names of their destinations."""
        return self._handlers

    def relay(self, *, patience: float = 30.0, observers: Sequence[Observer] = ()) -> Relay:
        """A relay for every destination: ``await outbox.relay().run()``, or ``async with outbox.relay():``.

        It holds at most five connections to the database, whatever the number of destinations, and for a
        moment a sixth when it proves that its LISTEN gets through; one more for each call of a handler that
        says ``once``. Asked to stop, it waits ``patience`` seconds for what it is sending and gives the rest
        back. ``observers`` are told of what it does, as ``relaybox.relay.observer`` says.
        """
        from relaybox.operate.open_relay import open_relay

        return open_relay(
            self.settings,
            self.tables,
            self._handlers,
            self._bell,
            patience=patience,
            observers=observers,
            sink_of=self._sink_of,
            routes=self._latest_routes,
        )

    def wake(self, *destinations: str) -> None:
        """Have relays look now: for events that were committed on a raw connection of your own.

        Sessions and ``outbox.transaction`` do so by themselves. Returns at once and never raises; without
        names all destinations are meant.
        """
        self._bell.call(destinations or [destination.name for destination in self.settings.destinations])

    async def adrain(self) -> None:
        """Deliver what is due, then return. What failed and is to be tried again later stays for later."""
        # Without a relay that runs for long, nobody else finds what a drain that died left parked.
        await self.relay().drain(sweep=True)

    def drain(self) -> None:
        """``adrain``, from synchronous code."""
        from relaybox.core.event_loop import run

        run(self.adrain())

    def migrate(self) -> list[int]:
        """Bring the tables to this version, as ``relaybox migrate`` does; the versions applied.

        Safe to repeat, and to run from several processes at once.
        """
        from relaybox.database.migrations import migrate

        return migrate(self.settings.database, schema=self.settings.schema, prefix=self.settings.prefix)

    @asynccontextmanager
    async def admin(self, actor: str = "application", *, connections: int = 2) -> AsyncIterator[Admin]:
        """The operators' service, ``async with outbox.admin("ann") as admin:``.

        ``actor`` is who the audit names; ``admin.acting_as`` is the same for another. At most so many
        connections to the database are held, until the end of the block.
        """
        from relaybox.operate.admin import Admin
        from relaybox.stores.open import open_store
        from relaybox.stores.sql.ledger import SqlLedger

        store = open_store(self.settings.database, self.tables, connections=connections)
        try:
            yield Admin(SqlLedger(store), self.settings.destinations, actor)
        finally:
            await store.close()

    async def amigrate(self) -> list[int]:
        """``migrate``, without holding up the event loop."""
        return await asyncio.to_thread(self.migrate)


def _settings(
    database: str | None,
    destinations: Iterable[Destination],
    routes: Iterable[Route],
    options: dict[str, Any],
) -> tuple[Settings, int]:
    """The settings, and how many of their routes, the last ones, are those of a file."""
    names = {field.name for field in dataclasses.fields(Settings)} - {"database", "destinations", "routes"}
    known_only(options, names, "Outbox")
    if database is not None:
        url = reveal_database(database, os.environ)
        return Settings(url, destinations, routes, **options), 0
    loaded = Settings.load(None, os.environ)
    # Checked by themselves first: a route may lead to a destination of the file.
    given = Settings(loaded.database, destinations)
    merged = {destination.name: destination for destination in (*loaded.destinations, *given.destinations)}
    both = dataclasses.replace(loaded, destinations=tuple(merged.values()), **options)
    own = dataclasses.replace(both, routes=routes).routes
    return dataclasses.replace(both, routes=(*own, *loaded.routes)), len(loaded.routes)


def _with_routes(settings: Settings, first: int, new: Mapping[int, Route]) -> Settings:
    """With the rollout and shadow of these, which are numbered from the ``first``."""
    routes = list(settings.routes)
    for number, route in new.items():
        before = routes[first + number]
        routes[first + number] = dataclasses.replace(before, rollout=route.rollout, shadow=route.shadow)
    return dataclasses.replace(settings, routes=routes)
