"""The fake database and a real one, each with the product's own store, and a look at their tables.

Both clocks run with the host's; time that passes is added to the fake's, and taken from the real one's rows.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar
from uuid import UUID

import sqlalchemy as sa

from relaybox.migrations import migrate
from relaybox.schema import make_tables
from relaybox.stores import mysql, postgres, sqlite
from relaybox.stores.dialects import DIALECTS
from relaybox.stores.sql import SqlStore
from relaybox.stores.statements import Statements
from relaybox.stores.steps import Steps
from relaybox.stores.upkeep import SqlUpkeep
from tests.simulation.database import Blocked, Database, Emitted, Row, Transaction, to_datetime
from tests.simulation.queries import Flavour, make_steps
from tests.simulation.statements import HELD_BY, LEADER
from tests.simulation.upkeep_statements import UpkeepServer

T = TypeVar("T")
Values: TypeAlias = tuple[Any, ...]
"""Of one row, in the order of ``INSERTED``."""
DRIVERS = {"postgresql": "postgresql+psycopg", "mysql": "mariadb+pymysql", "sqlite": "sqlite"}
UNHURRIED = "PRAGMA synchronous = OFF"
FLAVOURS: dict[str, Flavour] = {"postgresql": "pipeline", "mysql": "steps", "sqlite": "single"}


class SeenRow(NamedTuple):
    """A committed row of ``outbox_event``; times are seconds from now."""

    id: UUID
    event_id: UUID
    destination: str
    ordering_key: str | None
    status: str
    attempts: int
    max_attempts: int
    crashes: int
    leased: bool
    owner: str | None
    error: str | None
    due: float | None
    leased_until: float | None
    delivered_at: float | None


class SeenPlace(NamedTuple):
    """A committed row of ``outbox_destination``; times are seconds from now."""

    name: str
    paused_at: float | None
    paused_until: float | None
    pause_reason: str | None
    circuit: str
    circuit_until: float | None
    circuit_reason: str | None
    rate_at: float | None


class Seen(NamedTuple):
    """Everything that is compared of the tables. Rows are in the order of their positions."""

    rows: list[SeenRow]
    places: list[SeenPlace]
    leader: tuple[str, int, float] | None


class Twin(Protocol):
    """A database, its store, and an application's transactions on it."""

    store: SqlStore
    upkeep: SqlUpkeep

    def begin(self) -> Any:
        """Open a transaction of an application."""
        ...

    def end(self, transaction: Any, *, commit: bool) -> None:
        """Commit it or roll it back."""
        ...

    def insert(self, transaction: Any, rows: Sequence[Values], delay: float) -> None:
        """Write rows that are due in so many seconds."""
        ...

    def lock_row(self, transaction: Any, id_: UUID) -> bool:
        """Lock a row unless another has it; whether it did."""
        ...

    def lock_place(self, transaction: Any, name: str) -> bool:
        """Lock a destination's row unless another has it or it is not there; whether it did."""
        ...

    def discard(self, transaction: Any, id_: UUID) -> None:
        """Discard a row that the transaction has locked."""
        ...

    def hold(self, name: str, seconds: float | None) -> None:
        """Pause a destination whose row is there for so long; None: resume it."""
        ...

    def pass_time(self, seconds: float, written: Sequence[tuple[Any, Sequence[UUID]]]) -> None:
        """Let time pass, also for the rows that open transactions have written."""
        ...

    def see(self) -> Seen:
        """What is committed."""
        ...


class Direct:
    """Drives steps on the fake at once; where they have to wait, ``waits_for`` says for whom."""

    def __init__(self, server: UpkeepServer, flavour: Flavour) -> None:
        self.waits_for: Transaction | None = None
        self._server = server
        self._database = server.database
        self._flavour = flavour

    async def run(self, begin: Callable[[], Steps[T]]) -> T:
        """PostgreSQL: each yield is a transaction; elsewhere one is for all of them."""
        steps, transaction = begin(), self._database.begin(self)
        try:
            queries: Any = next(steps)
            while True:
                results = [await self._execute(transaction, query) for query in queries]
                if self._flavour == "pipeline":
                    self._database.commit(transaction)
                    transaction = self._database.begin(self)
                queries = steps.send(results)
        except StopIteration as end:
            self._database.commit(transaction)
            return end.value  # type: ignore[no-any-return]
        finally:
            self._database.rollback(transaction)

    async def close(self) -> None:
        """Nothing is held."""

    async def _execute(self, transaction: Transaction, query: Any) -> Any:
        while True:
            try:
                return self._server.execute(transaction, query)
            except Blocked as blocked:
                self.waits_for = blocked.holder
            over = asyncio.Event()
            self._database.wait(transaction, self.waits_for, over.set)
            await over.wait()
            transaction.awaiting = self.waits_for = None


class Fake:
    """The fake database."""

    def __init__(self, flavour: Flavour, server: type[UpkeepServer] = UpkeepServer) -> None:
        self._passed = 0.0
        self._last = 0.0
        self._begun = time.time()
        self.database = Database(self)
        self._server = server(self.database)
        self.driver = Direct(self._server, flavour)
        self.store = SqlStore(make_steps(flavour), self.driver)
        self.upkeep = SqlUpkeep(self.store)

    @property
    def now(self) -> float:
        """Never the same twice, so that what came later is later."""
        self._last = max(self._last + 1e-6, time.time() - self._begun + self._passed)
        return self._last

    def begin(self) -> Transaction:
        return self.database.begin(self)

    def end(self, transaction: Transaction, *, commit: bool) -> None:
        (self.database.commit if commit else self.database.rollback)(transaction)

    def insert(self, transaction: Transaction, rows: Sequence[Values], delay: float) -> None:
        for id_, event_id, *values, key, idempotency_key, attempts, _ in rows:
            fixed = (0, idempotency_key, attempts, 0.0, to_datetime(0.0))
            emitted = Emitted(UUID(id_), UUID(event_id), *values, key, *fixed)
            due = self.database.now() + delay if delay else None
            self._server.insert(transaction, emitted, due)

    def lock_row(self, transaction: Transaction, id_: UUID) -> bool:
        return self.database.lockable(transaction, id_.hex)

    def lock_place(self, transaction: Transaction, name: str) -> bool:
        key = HELD_BY, name
        return key in self.database.others and self.database.lockable(transaction, key)

    def discard(self, transaction: Transaction, id_: UUID) -> None:
        row = self.database.change(transaction, id_.hex)
        row.status = "discarded"
        row.next_attempt_at = row.leased_until = row.token = row.owner = row.delivered_at = None

    def hold(self, name: str, seconds: float | None) -> None:
        now, place = self.database.now(), self.database.others.get((HELD_BY, name))
        if place is None:
            return
        pause = (None, None) if seconds is None else (now, now + seconds)
        values = {"paused_at": pause[0], "paused_until": pause[1], "pause_reason": None}
        self.database.others[HELD_BY, name] = replace(place, **values)

    def pass_time(self, seconds: float, written: Sequence[tuple[Transaction, Sequence[UUID]]]) -> None:
        self._passed += seconds

    def see(self) -> Seen:
        now = self.database.now()
        rows = sorted(self.database.rows.values(), key=lambda row: row.emitted.position)
        places = [
            SeenPlace(key[1], *(_left(getattr(place, name), now) for name in SeenPlace._fields[1:]))
            for key, place in self.database.others.items()
            if isinstance(key, tuple) and key[0] == HELD_BY
        ]
        term = self.database.others.get(LEADER)
        leader = None if term is None else (term.relay, term.term, term.leads_until - now)
        return Seen([_seen(row, now) for row in rows], sorted(places), leader)


def _left(value: Any, now: Any) -> Any:
    """How many seconds it is to a moment; other values stay as they are."""
    if value is None or isinstance(value, str):
        return value
    left = value - now
    return left.total_seconds() if isinstance(left, timedelta) else left


def _seen(row: Row, now: float) -> SeenRow:
    e, times = row.emitted, (row.next_attempt_at, row.leased_until, row.delivered_at)
    counts = (row.attempts, e.max_attempts, row.crashes, row.token is not None, row.owner, row.error)
    left = (_left(moment, now) for moment in times)
    return SeenRow(e.id, e.event_id, e.destination, e.ordering_key, row.status, *counts, *left)


class Real:
    """A real database. ``concurrent``: whether it lets transactions run side by side."""

    def __init__(self, url: str) -> None:
        migrate(url)
        self.url = sa.make_url(url)
        self.kind = self.url.drivername
        self.concurrent = self.kind != "sqlite"
        self.tables = make_tables(sa.MetaData())
        # Where transactions see a snapshot, MariaDB also locks the gap where a row is not.
        level: Any = {"isolation_level": "READ COMMITTED"} if self.kind == "mysql" else {}
        self.engine = sa.create_engine(self.url.set(drivername=DRIVERS[self.kind]), **level)
        if not self.concurrent:
            sa.event.listen(self.engine, "connect", lambda connection, _: connection.execute(UNHURRIED))
        self.dialect = DIALECTS[self.engine.dialect.name]
        self._statements = Statements(self.tables, self.dialect, "format" if self.concurrent else "qmark")
        self._now = sa.literal_column(self.dialect.words["now"], sa.DateTime(timezone=True))
        self.store = self._open_store()
        self.upkeep = SqlUpkeep(self.store)

    def _open_store(self) -> SqlStore:
        if not self.concurrent:
            return sqlite.open_store(str(self.url.database), self.tables)
        module: Any = {"postgresql": postgres, "mysql": mysql}[self.kind]
        url = self.url.render_as_string(hide_password=False)
        return module.open_store(url, self.tables, connections=2)  # type: ignore[no-any-return]

    def clear(self) -> None:
        tables = self.tables
        with self.engine.begin() as connection:
            for table in (tables.event, tables.attempt, tables.destination, tables.relay, tables.leader):
                connection.execute(sa.delete(table))

    async def close(self) -> None:
        await self.store.close()
        self.engine.dispose()

    def begin(self) -> sa.Connection:
        connection = self.engine.connect()
        connection.begin()
        return connection

    def end(self, transaction: sa.Connection, *, commit: bool) -> None:
        (transaction.commit if commit else transaction.rollback)()
        transaction.close()

    def insert(self, transaction: sa.Connection, rows: Sequence[Values], delay: float) -> None:
        transaction.exec_driver_sql(*self._statements.insert(rows))

    def lock_row(self, transaction: sa.Connection, id_: UUID) -> bool:
        return self._lock(transaction, self.tables.event.c.id, id_)

    def lock_place(self, transaction: sa.Connection, name: str) -> bool:
        return self._lock(transaction, self.tables.destination.c.name, name)

    def _lock(self, transaction: sa.Connection, key: sa.Column[Any], value: Any) -> bool:
        query = sa.select(key).where(key == value).with_for_update(skip_locked=True)
        return transaction.execute(query).one_or_none() is not None

    def discard(self, transaction: sa.Connection, id_: UUID) -> None:
        event = self.tables.event
        names = ("next_attempt_at", "leased_until", "lease_token", "lease_owner", "delivered_at")
        values = {"status": "discarded", **dict.fromkeys(names)}
        transaction.execute(sa.update(event).where(event.c.id == id_).values(values))

    def hold(self, name: str, seconds: float | None) -> None:
        table = self.tables.destination
        with self.engine.begin() as connection:
            now = connection.scalars(sa.select(self._now)).one()
            pause = (None, None) if seconds is None else (now, now + timedelta(seconds=seconds))
            values = {"paused_at": pause[0], "paused_until": pause[1], "pause_reason": None}
            connection.execute(sa.update(table).where(table.c.name == name).values(values))

    def pass_time(self, seconds: float, written: Sequence[tuple[sa.Connection, Sequence[UUID]]]) -> None:
        with self.engine.begin() as connection:
            for key, names in self._times():
                _make_older(connection, key, names, seconds)
        key, names = self._times()[0]
        for transaction, ids in written:
            _make_older(transaction, key, names, seconds, key.in_(ids))

    def _times(self) -> list[tuple[sa.Column[Any], tuple[str, ...]]]:
        tables = self.tables
        return [
            (tables.event.c.id, ("next_attempt_at", "leased_until", "created_at", "delivered_at")),
            (tables.destination.c.name, ("paused_at", "paused_until", "circuit_until", "rate_at")),
            (tables.relay.c.name, ("seen_at", "leads_until")),
            (tables.leader.c.name, ("leads_until",)),
        ]

    def see(self) -> Seen:
        event, place, leader = self.tables.event.c, self.tables.destination.c, self.tables.leader.c
        counts = (event.attempts, event.max_attempts, event.crashes, event.lease_token.is_not(None))
        times = (event.next_attempt_at, event.leased_until, event.delivered_at)
        what = (event.id, event.event_id, event.destination, event.ordering_key, event.status)
        columns = (*what, *counts, event.lease_owner, event.error_message, *times)
        rows = sa.select(self._now, *columns).order_by(event.position)
        places = sa.select(self._now, *(place[name] for name in SeenPlace._fields))
        term = sa.select(self._now, leader.relay, leader.term, leader.leads_until)
        with self.engine.connect() as connection:
            led = connection.execute(term).one_or_none()
            return Seen(
                [
                    SeenRow(*row[1:12], *(_left(moment, row[0]) for moment in row[12:]))
                    for row in connection.execute(rows)
                ],
                sorted(
                    SeenPlace(*(_left(value, row[0]) for value in row[1:]))
                    for row in connection.execute(places)
                ),
                None if led is None else (led[1], led[2], _left(led[3], led[0])),
            )


def _make_older(
    connection: sa.Connection,
    key: sa.Column[Any],
    names: Sequence[str],
    seconds: float,
    where: sa.ColumnElement[bool] | None = None,
) -> None:
    """Row by row and by its key, so that no row is waited for that somebody else has just written."""
    columns, by = [key.table.c[name] for name in names], timedelta(seconds=seconds)
    rows = connection.execute(sa.select(key, *columns).where(sa.true() if where is None else where)).all()
    changes = [
        {f"new_{name}": time and time - by for name, time in zip(names, times, strict=True)}
        | {"which": which}
        for which, *times in rows
    ]
    if changes:
        values = {name: sa.bindparam(f"new_{name}") for name in names}
        connection.execute(sa.update(key.table).where(key == sa.bindparam("which")).values(values), changes)
