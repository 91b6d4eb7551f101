"""Build a relay with all its parts from settings. Optional parts are imported only when needed."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING
from uuid import UUID

from relaybox.core.clock import MonotonicClock
from relaybox.core.settings import Destination, Route, Settings, needs_postgresql
from relaybox.database.schema import Tables
from relaybox.emit.wakes.local import Bell, Wake
from relaybox.emit.wakes.open import open_wake
from relaybox.errors import ConfigError, RelayboxError, did_you_mean
from relaybox.operate.observers.log import LogObserver
from relaybox.relay.lane import Lane
from relaybox.relay.observer import Observer, Observers
from relaybox.relay.process import died, forget, this_process
from relaybox.relay.relay import Relay
from relaybox.relay.shared import Shared
from relaybox.relay.upkeep.canary import Canary
from relaybox.relay.upkeep.caretaker import Caretaker
from relaybox.relay.upkeep.route import StoredRouter
from relaybox.relay.upkeep.tally import DatabaseTime, Tally
from relaybox.sinks.open import Handlers, OpenSink, handler_of, open_sink
from relaybox.sinks.sink import Sink
from relaybox.stores.open import open_store
from relaybox.stores.store import DeadLetter, Store
from relaybox.wire.tracing import has_provider

if TYPE_CHECKING:
    from relaybox.receive.once_handler import AsyncOnceHandler, OnceHandler
    from relaybox.stores.sql.store import SqlStore

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
    """Return a relay for every destination; it connects to nothing before it runs.

    ``sink_of`` replaces ``open_sink``. A given ``store`` or ``wake`` is not closed. ``only`` limits it to
    these ids, by destination. ``tally`` continues the counts of an earlier relay. ``left_out`` is called for
    a sink that cannot be opened, instead of raising. ``routes`` returns the current routes.
    """
    from relaybox.stores.sql.upkeep import SqlUpkeep
    from relaybox.stores.sql.upkeep.sample import SqlSamples

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
    me = this_process()
    tally = tally or new_tally(me.name)
    observer = Observers([LogObserver(), tally, *_tracing(observers), *observers])
    shared = Shared(store, wake, observer, MonotonicClock(), random.random, me.name)
    caretaker = Caretaker(
        SqlUpkeep(store),
        settings.destinations,
        me,
        shared.clock,
        tally,
        died,
        StoredRouter(settings, routes) if settings.routes else None,
        bell.call,
        inbox_window=settings.inbox_window,
        idempotency_window=settings.idempotency_window,
        canary=_open_canary(settings, store, shared, bell),
        samples=SqlSamples(store),
    )
    lanes = [_open_lane(destinations[name], sink, shared, destinations, only) for name, sink in sinks.items()]
    close = partial(_close, [*sinks.values(), *opened, *marking], me.name)
    return Relay(lanes, shared, caretaker, partial(bell.serving, wake, destinations), close, patience)


async def _close(parts: Sequence[Sink | Store | Wake | OnceHandler | AsyncOnceHandler], name: str) -> None:
    async with AsyncExitStack() as closing:
        closing.callback(forget, name)
        for part in reversed(parts):
            closing.push_async_callback(part.close)


def _tracing(observers: Sequence[Observer]) -> list[Observer]:
    """Return a tracing observer if the application has set up an SDK and does not trace itself."""
    if not has_provider():
        return []
    from relaybox.operate.observers.traces import TracesObserver

    return [] if any(isinstance(one, TracesObserver) for one in observers) else [TracesObserver()]


def _check_canary(settings: Settings) -> None:
    name, known = settings.canary_destination, [destination.name for destination in settings.destinations]
    if name is not None and name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"canary_destination = {name!r}: no destination has this name{hint}")


def _open_canary(settings: Settings, store: SqlStore, shared: Shared, bell: Bell) -> Canary | None:
    name = settings.canary_destination
    if settings.canary is None or name is None:
        return None
    from relaybox.operate.admin import Admin, CanaryRows
    from relaybox.stores.sql.ledger import SqlLedger

    ledger = SqlLedger(store)
    rows = CanaryRows(Admin(ledger, settings.destinations, "canary"), ledger, name)
    return Canary(rows, name, settings.canary, shared.clock, shared.observer.canary, bell.call)


def _check_log(settings: Settings, database: str) -> None:
    """Raise for a debezium destination on another database: rows routed to it later would never be read."""
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
    dead_letter = None
    if destination.dead_letter is not None:
        other = others[destination.dead_letter]
        dead_letter = DeadLetter(other.name, other.max_attempts, ordered=other.ordered)
    chosen = None if only is None else tuple(only[destination.name])
    return Lane(destination, sink, shared, dead_letter, chosen)


def _open_sinks(
    destinations: Sequence[Destination],
    handlers: Handlers,
    database: str,
    tables: Tables,
    sink_of: OpenSink,
    left_out: LeftOut | None,
) -> tuple[dict[str, Sink], list[OnceHandler | AsyncOnceHandler]]:
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
    """Return the counters for the charts, under a relay's name or a new one."""
    return Tally(name or this_process().name, DatabaseTime(MonotonicClock(), lambda: datetime.now(UTC)))
