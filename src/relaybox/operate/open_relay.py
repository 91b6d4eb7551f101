"""From names and URLs to the parts of a relay; what a part needs is imported when it is asked for."""

from __future__ import annotations

import asyncio
import functools
import importlib
import os
import random
import re
import secrets
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import UUID

import sqlalchemy as sa

from relaybox.core.clock import MonotonicClock
from relaybox.core.imports import load
from relaybox.core.settings import Destination, Route, Settings, needs_postgresql
from relaybox.database.schema import Tables
from relaybox.emit.reroute import StoredRouter
from relaybox.emit.wakes.local import Bell
from relaybox.emit.wakes.open import open_wake
from relaybox.emit.wakes.wake import Wake
from relaybox.errors import ConfigError, MissingExtra, RelayboxError, did_you_mean
from relaybox.operate.observers.log import LogObserver
from relaybox.operate.observers.several import Observers
from relaybox.relay.lane import Lane
from relaybox.relay.observer import Observer
from relaybox.relay.relay import Relay
from relaybox.relay.shared import Shared
from relaybox.relay.upkeep.caretaker import Caretaker
from relaybox.relay.upkeep.moment import DatabaseTime
from relaybox.relay.upkeep.tally import Tally
from relaybox.search.engine import Engine
from relaybox.sinks.sink import Sink
from relaybox.stores.store import DeadLetter, Store
from relaybox.stores.upkeep import Member
from relaybox.wire.tracing import has_provider

if TYPE_CHECKING:
    from relaybox.receive.once_handler import AsyncOnceHandler, OnceHandler
    from relaybox.relay.upkeep.canary import Canary
    from relaybox.stores.sql.store import SqlStore

BROKERS = {
    "kafka": ("kafka.sink", "confluent_kafka", "kafka"),
    "amqp": ("rabbitmq.sink", "aio_pika", "rabbitmq"),
    "amqps": ("rabbitmq.sink", "aio_pika", "rabbitmq"),
    "nats": ("nats.sink", "nats", "nats"),
    "redis": ("redis", "redis", "redis"),
    "rediss": ("redis", "redis", "redis"),
    "sqs": ("sqs.sink", "aiobotocore", "sqs"),
}
"""By scheme: the module of the sink, the package it needs, and the extra that brings it."""

SEARCH = {
    "meilisearch": ("meilisearch.engine", "aiohttp", "meilisearch"),
    "meilisearchs": ("meilisearch.engine", "aiohttp", "meilisearch"),
    "algolia": ("algolia.engine", "aiohttp", "algolia"),
    "opensearch": ("opensearch.engine", "aiohttp", "opensearch"),
}
"""By scheme: the module of the search engine, the package it needs, and the extra that brings it."""

T = TypeVar("T")
Handlers = Mapping[str, Callable[..., Any]]
OpenSink = Callable[[Destination, Handlers], Sink]
LeftOut = Callable[[str, RelayboxError], None]


def open_relay(
    settings: Settings,
    tables: Tables,
    handlers: Handlers,
    bell: Bell,
    *,
    patience: float,
    observers: Sequence[Observer] = (),
    sink_of: OpenSink | None = None,
    store: SqlStore | None = None,
    wake: Wake | None = None,
    only: Mapping[str, Sequence[UUID]] | None = None,
    tally: Tally | None = None,
    left_out: LeftOut | None = None,
    routes: Callable[[], Sequence[Route]] | None = None,
) -> Relay:
    """A relay for every destination; nothing is connected to before it runs.

    ``sink_of`` is asked for the sinks instead of ``open_sink``. A ``store`` and a ``wake`` that are handed in
    are used in place of those that the settings name, and are not closed. With ``only`` it delivers nothing
    but the rows of these ids, by destination. ``tally`` goes on counting where an earlier relay ended.
    With ``left_out``, a destination whose sink cannot be opened is told to it instead of raised. ``routes``
    is asked for the routes as they are now.
    """
    from relaybox.stores.sql.samples import SqlSamples
    from relaybox.stores.sql.upkeep import SqlUpkeep

    # Here, where nothing is opened that would have to be closed.
    _check_canary(settings)
    destinations = {destination.name: destination for destination in settings.destinations}
    wanted = destinations if only is None else only
    served = [one for one in settings.destinations if one.name in wanted and not one.handed_over]
    sinks, marking = _open_sinks(served, handlers, settings.database, tables, sink_of or open_sink, left_out)
    opened: list[Store | Wake] = []
    if wake is None:
        opened.append(wake := open_wake(settings))
    if store is None:
        opened.append(store := open_store(settings.database, tables))
    _check_log(settings, store.steps.statements.dialect.name)
    clock, me = MonotonicClock(), this_process()
    upkeep = SqlUpkeep(store)
    router = StoredRouter(settings, routes) if settings.routes else None
    tally = tally or new_tally(me.name)
    observer = Observers([LogObserver(), tally, *_tracing(observers), *observers])
    caretaker = Caretaker(
        upkeep,
        settings.destinations,
        me,
        clock,
        tally,
        died,
        router,
        bell.call,
        inbox_window=settings.inbox_window,
        idempotency_window=settings.idempotency_window,
        canary=_open_canary(settings, store, clock, observer.canary, bell),
        samples=SqlSamples(store),
    )
    shared = Shared(
        store=store,
        wake=wake,
        observer=observer,
        clock=clock,
        random=random.random,
        owner=me.name,
    )
    lanes = [_open_lane(destinations[name], sink, shared, destinations, only) for name, sink in sinks.items()]

    async def close() -> None:
        for sink in sinks.values():
            await sink.close()
        for part in [*opened, *marking]:
            await part.close()
        _ours.discard(me.name)

    return Relay(lanes, shared, caretaker, partial(bell.serving, wake, destinations), close, patience)


def _tracing(observers: Sequence[Observer]) -> list[Observer]:
    """What makes spans, where the application has set up an SDK for them and does not do it itself."""
    if not has_provider():
        return []
    from relaybox.operate.observers.traces import TracesObserver

    return [] if any(isinstance(one, TracesObserver) for one in observers) else [TracesObserver()]


def _check_canary(settings: Settings) -> None:
    name, known = settings.canary_destination, [destination.name for destination in settings.destinations]
    if name is not None and name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"canary_destination = {name!r}: no destination is called that{hint}")


def _open_canary(
    settings: Settings,
    store: SqlStore,
    clock: MonotonicClock,
    acknowledged: Callable[[str, float], None],
    bell: Bell,
) -> Canary | None:
    name = settings.canary_destination
    if settings.canary is None or name is None:
        return None
    from relaybox.operate.admin import Admin
    from relaybox.relay.upkeep.canary import Canary, Rows
    from relaybox.stores.sql.ledger import SqlLedger

    ledger = SqlLedger(store)
    rows = Rows(Admin(ledger, settings.destinations, "canary"), ledger, name)
    return Canary(rows, name, settings.canary, clock, acknowledged, bell.call)


def _check_log(settings: Settings, database: str) -> None:
    """What is routed later must not wait for a reader that cannot come."""
    for destination in settings.destinations:
        if destination.handed_over and database != "postgresql":
            raise needs_postgresql(destination, database)


def _open_lane(
    destination: Destination,
    sink: Sink,
    shared: Shared,
    others: Mapping[str, Destination],
    only: Mapping[str, Sequence[UUID]] | None,
) -> Lane:
    chosen = None if only is None else tuple(only[destination.name])
    return Lane(destination, sink, shared, _dead_letter(destination, others), chosen)


def _open_sinks(
    destinations: Sequence[Destination],
    handlers: Handlers,
    database: str,
    tables: Tables,
    sink_of: OpenSink,
    left_out: LeftOut | None,
) -> tuple[dict[str, Sink], list[OnceHandler | AsyncOnceHandler]]:
    """The sinks by name, and the functions among them that say ``once``; none holds anything yet."""
    sinks: dict[str, Sink] = {}
    marking: list[OnceHandler | AsyncOnceHandler] = []
    for destination in destinations:
        try:
            if not destination.once:
                sinks[destination.name] = sink_of(destination, handlers)
                continue
            from relaybox.receive.once_handler import once_handler

            function = once_handler(destination, handler_of(destination, handlers), database, tables)
            sinks[destination.name] = sink_of(destination, {**handlers, destination.name: function})
            marking.append(function)
        except RelayboxError as error:
            if left_out is None:
                raise
            left_out(destination.name, error)
    return sinks, marking


def new_tally(name: str | None = None) -> Tally:
    """What counts for the charts, under a relay's name or one of its own."""
    return Tally(name or this_process().name, DatabaseTime(MonotonicClock(), lambda: datetime.now(UTC)))


def this_process() -> Member:
    """A relay of this process. No two have the same name, not even one after the other."""
    host, pid = socket.gethostname(), os.getpid()
    name = f"{host[:150]}:{pid}:{_namespace()}-{secrets.token_hex(4)}"
    _ours.add(name)
    return Member(name, host[:255], pid, _version())


@functools.cache
def _version() -> str:
    return version("relaybox")


_ours: set[str] = set()
"""The relays of this process that were made and not closed."""


def _namespace() -> str:
    """What tells two processes apart that have the same number in two containers."""
    try:
        return f"{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return ""


def died(name: str) -> bool:
    """Whether a relay of this name ran on this host, in a process that has ended."""
    match = re.fullmatch(r"(.*):([0-9]+):([0-9a-f]*)-[0-9a-f]+", name, re.DOTALL)
    if match is None or (match[1], match[3]) != (socket.gethostname()[:150], _namespace()):
        return False
    pid = match[2]
    if int(pid) == os.getpid():
        return name not in _ours
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def _dead_letter(destination: Destination, others: Mapping[str, Destination]) -> DeadLetter | None:
    if destination.dead_letter is None:
        return None
    other = others[destination.dead_letter]
    return DeadLetter(other.name, other.max_attempts, ordered=other.ordered)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run it to its end from synchronous code, on uvloop where it is installed."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        work.close()
        raise ConfigError("called inside a running event loop: await the twin that begins with an a")
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return uvloop's, or None, which means asyncio's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def open_store(database: str, tables: Tables, *, connections: int = 3) -> SqlStore:
    """The store in a database; it holds at most ``connections`` connections, on SQLite one.

    One that extends leases or beats, as a relay's does, has one more for that.
    """
    from relaybox.database.migrations import server_dialect

    dialect = server_dialect(database)
    if dialect == "sqlite":
        from relaybox.stores.sql import sqlite

        return sqlite.open_store(sa.make_url(database).database or ":memory:", tables)
    options: dict[str, Any] = {"connections": connections}
    if dialect == "postgresql":
        module = _module("relaybox.stores.sql.postgres", "psycopg", "postgres")
    else:
        module = _module("relaybox.stores.sql.mysql", "asyncmy", "mysql")
        options["mariadb"] = dialect == "mariadb"
    store: SqlStore = module.open_store(database, tables, **options)
    return store


def open_sink(destination: Destination, handlers: Handlers) -> Sink:
    """The sink that a destination's URL names."""
    scheme = destination.sink.partition(":")[0].lower()
    match scheme:
        case "http" | "https":
            http = _module("relaybox.sinks.http.sink", "aiohttp", "http")
            sink: Sink = http.HttpSink(destination)
            return sink
        case "handler":
            from relaybox.sinks.handler import HandlerSink

            return HandlerSink(destination, handler_of(destination, handlers))
        case "celery":
            celery = _module("relaybox.sinks.celery", "celery", "celery")
            of_celery: Sink = celery.CelerySink(destination)
            return of_celery
        case _ if scheme in BROKERS:
            module, package, extra = BROKERS[scheme]
            broker: Sink = _module(f"relaybox.sinks.{module}", package, extra).open_sink(destination)
            return broker
        case _ if scheme in SEARCH:
            engine = open_engine(destination)
            from relaybox.search.sink import SearchSink

            return SearchSink(destination, engine)
        case "console":
            from relaybox.sinks.console import ConsoleSink

            return ConsoleSink(destination)
        case "memory":
            from relaybox.sinks.memory import MemorySink

            return MemorySink(destination)
    raise ConfigError(f"destination {destination.name!r}: no relay of this release can send to {scheme}://")


def open_engine(destination: Destination) -> Engine:
    """The search engine that a destination's URL names; nothing is connected to before it is asked."""
    scheme = destination.sink.partition(":")[0].lower()
    if scheme not in SEARCH:
        fix = f"name one whose sink is {', '.join(f'{known}://' for known in SEARCH)}"
        raise ConfigError(f"destination {destination.name!r} is no search index ({scheme}:); {fix}")
    module, package, extra = SEARCH[scheme]
    engine: Engine = _module(f"relaybox.search.{module}", package, extra).open_engine(destination)
    return engine


def handler_of(destination: Destination, handlers: Handlers) -> Callable[..., Any]:
    """The function registered under the destination's name, else the one at ``handler:module:function``."""
    if destination.name in handlers:
        return handlers[destination.name]
    setting = f"destination {destination.name!r}: sink = {destination.sink!r}"
    fix = "write handler:package.module:function, or register it with @outbox.handler and give --app"
    found = load(destination.sink.partition(":")[2], setting, fix)
    if not callable(found):
        raise ConfigError(f"{setting}: it is no function; {fix}")
    return found  # type: ignore[no-any-return]


def _module(name: str, package: str, extra: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.partition(".")[0] == "relaybox":
            raise
        raise MissingExtra(package, extra) from None
