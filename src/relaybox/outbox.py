"""The composition root: ``Outbox``, the object that an application creates and calls."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import datetime
from pathlib import Path
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import sqlalchemy as sa

from relaybox.core.event import Emitted
from relaybox.core.rollout import changed, is_sent
from relaybox.core.settings import Destination, Route, Settings, find_file
from relaybox.core.values import known_only, reveal_database
from relaybox.database.schema import make_tables
from relaybox.emit.emitter import Emitter, LiveSettings
from relaybox.emit.row import Call, Calls, EmitOptions, as_calls
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

    ``database`` is a URL, ``env:NAME`` or ``file:PATH``. Without it, settings come from ``relaybox.toml`` or
    ``[tool.relaybox]``, RELAYBOX_DATABASE and DATABASE_URL; arguments are added and take precedence.
    ``handlers`` maps names of destinations with the sink ``handler:`` to functions; ``handler`` adds more.
    Other ``settings`` are those of ``relaybox.core.settings.Settings``.
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
        first, in_file = _settings(database, destinations, routes, settings)
        self._live = LiveSettings(first)
        self.tables = make_tables(sa.MetaData(), schema=first.schema, prefix=first.prefix)
        self._bell = open_bell(first)
        self._emitter = Emitter(self._live, self.tables, self._bell)
        self._recorder: Recorder | None = None
        self._handlers = dict(handlers or {})
        self.file: Path | None = None
        if database is None and (file := find_file(None, os.environ)) is not None:
            self.follow(file, len(first.routes) - in_file)
        # Tests set this, so that a relay does not send anything by accident.
        self._sink_of: OpenSink | None = None

    @property
    def settings(self) -> Settings:
        """The settings, with the current rollout and shadow of each route."""
        return self._live.settings

    @settings.setter
    def settings(self, settings: Settings) -> None:
        self._live.settings = settings

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

        - ``idempotency_key``: a second event with the same type and key writes nothing and returns the
          first's id.
        - ``key``: the ordering key instead of the destination's own; ``None`` for no order.
        - ``headers``: sent with the event. ``tenant``: one of them, and the key if order is by tenant.
        - ``max_attempts``: overrides the destination's.
        - ``deliver_at``: the earliest time to send it; refused for ordered destinations.
        - ``destinations``: names, instead of the routes.
        - ``autocommit``: without an open transaction, let the event commit by itself instead of raising.

        Raise an ``EmitError`` before anything reaches the database: ``InvalidField``, ``PayloadError``,
        ``Unrouted``, ``UnknownDestination``, ``UnsupportedConnection``, ``NotInTransaction``,
        ``TransactionFailed`` or ``ConnectionClosed``. Raise ``SchemaError`` if the tables are missing. Other
        database errors are not translated.
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
        autocommit: bool = False,
        **options: Unpack[EmitOptions],
    ) -> Emitted:
        """Write an event as ``emit`` does, with the same options, on an asynchronous connection or session.

        ``connection`` is a SQLAlchemy AsyncSession, async_scoped_session or AsyncConnection, or an
        asynchronous connection of psycopg, asyncpg (also from a pool), aiosqlite or asyncmy.
        """
        call = Call(aggregate_type, aggregate_id, event_type, payload, **options)
        return (await self._emitter.awrite(connection, [call], autocommit))[0]

    def emit_many(self, connection: Any, calls: Calls, *, autocommit: bool = False) -> list[Emitted]:
        """Write several events, each a ``Call`` or a mapping of ``emit``'s arguments, in few statements.

        Positions follow the given order. If one is refused, nothing is written.
        """
        return self._emitter.write(connection, as_calls(calls), autocommit, many=True)

    async def aemit_many(self, connection: Any, calls: Calls, *, autocommit: bool = False) -> list[Emitted]:
        """Write several events as ``emit_many`` does, on an asynchronous connection or session."""
        return await self._emitter.awrite(connection, as_calls(calls), autocommit, many=True)

    def transaction(self, connection: Any) -> Transaction:
        """Return a transaction on any connection or session that ``emit`` or ``aemit`` takes.

        Use it with ``with`` or ``async with``. In an open transaction the block is a savepoint, and the outer
        one still has to be committed. A connection in autocommit returns to it afterwards. SQLAlchemy's
        AUTOCOMMIT level raises ``NotInTransaction``.
        """
        return self._emitter.transaction(connection)

    def attach(self, target: Target) -> Target:
        """Emit the events that ``EventSource`` objects record in these sessions, and return ``target``.

        ``target`` is a session, a session class, a sessionmaker or a scoped_session, synchronous or
        asynchronous. Attaching twice has no effect. A session belongs to one outbox.
        """
        from relaybox.emit.event_source import Recorder

        if self._recorder is None:
            self._recorder = Recorder(self._emitter)
        self._recorder.attach(target)
        return target

    def handler(
        self, *events: str, name: str | None = None, **options: Any
    ) -> Callable[[Function], Function]:
        """Register a function as a destination of its own, with its own rows, retries and order.

        ``events`` are the patterns it takes, ``options`` those of ``Destination``. The name defaults to
        ``module.function``. The function receives an ``Event`` and may be synchronous or asynchronous.

        With ``once=True`` it runs in a transaction on the outbox's database, together with the inbox's mark
        of the event. A repeated delivery is acknowledged without a call. If the function takes a second
        argument, it gets the transaction's SQLAlchemy ``Connection`` (``AsyncConnection`` if asynchronous).
        Each running call holds one connection.
        """
        if len(events) == 1 and callable(events[0]):
            raise ConfigError("handler: say which events it takes, as in @outbox.handler('order.*')")

        def register(function: Function) -> Function:
            called = name or f"{function.__module__}.{function.__qualname__}"
            destination = Destination(called, "handler:", **options)
            route = Route(events, to=called)
            self._live.change(
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
        """True if the route's events of this aggregate are sent: in its rollout and not in shadow.

        ``route`` is a ``Route``, a pattern, a destination's name or an event type. If it names several routes
        or destinations, all of them must send. Raise ``ConfigError`` if nothing matches.
        """
        self._live.look()
        return is_sent(self._live.builder.routes, route, aggregate_id)

    def rollout(self, route: Route | str, percent: float) -> None:
        """Set the percentage of aggregates that a route takes, in this process, from now on.

        ``route`` is a ``Route``, a pattern, or a destination's name, which means all routes to it.
        """
        self._live.change(lambda settings: changed(settings, route, rollout=percent))

    def shadow(self, route: Route | str, on: bool) -> None:
        """Turn shadow mode on (store events, send nothing) or off, in this process, from now on."""
        self._live.change(lambda settings: changed(settings, route, shadow=on))

    def follow(self, file: Path, first: int = 0) -> None:
        """Apply later changes of ``rollout`` and ``shadow`` in this file to its routes, from ``first`` on.

        The file is checked at most once a second, when an event is emitted or routed or ``enabled`` is
        called. Other changes in it take effect at the next start.
        """
        self.file = file
        self._live.follow(file, first)

    @functools.cached_property
    def inbox(self) -> Inbox:
        """Return an inbox in the outbox's own tables, with its ``inbox_window``."""
        from relaybox.receive.inbox import Inbox

        return Inbox(window=self.settings.inbox_window, tables=self.tables)

    @property
    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        """Return the registered functions by the name of their destination."""
        return self._handlers

    def relay(self, *, patience: float = 30.0, observers: Sequence[Observer] = ()) -> Relay:
        """Return a relay for every destination.

        Run it with ``await outbox.relay().run()`` or ``async with outbox.relay():``. It holds at most five
        database connections for any number of destinations. It briefly opens a sixth to verify that LISTEN
        works, and one more for each running call of a ``once`` handler. When asked to stop, it waits
        ``patience`` seconds for sends in flight and releases the rest. See ``relaybox.relay.observer`` for
        ``observers``.
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
            routes=self._live.routes,
        )

    def wake(self, *destinations: str) -> None:
        """Wake relays after a commit on a raw connection; return at once and never raise.

        Sessions and ``outbox.transaction`` do this themselves. Without names, wake all destinations.
        """
        self._bell.call(destinations or [destination.name for destination in self.settings.destinations])

    async def adrain(self) -> None:
        """Deliver what is due, then return. Failed deliveries wait for their next attempt."""
        # Sweep, as every relay does at its start: a changed setting or an edit by hand may leave rows parked.
        await self.relay().drain(sweep=True)

    def drain(self) -> None:
        """Run ``adrain`` from synchronous code."""
        from relaybox.core.event_loop import run

        run(self.adrain())

    def migrate(self) -> list[int]:
        """Upgrade the tables to this version and return the versions applied, as ``relaybox migrate`` does.

        It is safe to repeat, and to run in several processes at once.
        """
        from relaybox.database.migrations import migrate

        return migrate(self.settings.database, schema=self.settings.schema, prefix=self.settings.prefix)

    @asynccontextmanager
    async def admin(self, actor: str = "application", *, connections: int = 2) -> AsyncIterator[Admin]:
        """Open the operators' service: ``async with outbox.admin("ann") as admin:``.

        The audit records ``actor``. The block holds at most ``connections`` database connections.
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
        """Run ``migrate`` in a thread, without blocking the event loop."""
        return await asyncio.to_thread(self.migrate)


def _settings(
    database: str | None,
    destinations: Iterable[Destination],
    routes: Iterable[Route],
    options: dict[str, Any],
) -> tuple[Settings, int]:
    """Return the settings, and how many of their routes come from a file; those are the last ones."""
    names = {field.name for field in dataclasses.fields(Settings)} - {"database", "destinations", "routes"}
    known_only(options, names, "Outbox")
    if database is not None:
        url = reveal_database(database, os.environ)
        return Settings(url, destinations, routes, **options), 0
    loaded = Settings.load(None, os.environ)
    # Check destinations first: a route may lead to a destination in the file.
    given = Settings(loaded.database, destinations)
    merged = {destination.name: destination for destination in (*loaded.destinations, *given.destinations)}
    both = dataclasses.replace(loaded, destinations=tuple(merged.values()), **options)
    own = dataclasses.replace(both, routes=routes).routes
    return dataclasses.replace(both, routes=(*own, *loaded.routes)), len(loaded.routes)
