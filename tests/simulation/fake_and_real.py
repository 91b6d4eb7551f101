"""The fake database and a real one, each with the product's own store, and a look at their tables.

Both clocks run with the host's; time that passes is added to the fake's, and taken from the real one's rows.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

import sqlalchemy as sa

from relaybox.core.event import Delivery
from relaybox.core.settings import Destination, Settings
from relaybox.database.dialects import DIALECTS
from relaybox.database.migrations import migrate
from relaybox.database.schema import make_tables
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.emit.row import Call, RowBuilder
from relaybox.operate import open_relay as parts
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.sql.upkeep import SqlUpkeep
from tests.databases import engine
from tests.simulation.database import Blocked, Database, Emitted, Row, Transaction, to_datetime
from tests.simulation.statements import HELD_BY, LEADER, Flavour, UpkeepServer, make_steps

T = TypeVar("T")
Values: TypeAlias = tuple[Any, ...]  # Of one row, in the order of ``INSERTED``
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
    rows: list[SeenRow]
    places: list[SeenPlace]
    leader: tuple[str, int, float] | None


class Direct:
    """Drives steps on the fake at once; where they have to wait, ``waits_for`` says for whom."""

    def __init__(self, server: UpkeepServer, flavour: Flavour) -> None:
        self.waits_for: Transaction | None = None
        self._server = server
        self._database = server.database
        self._flavour = flavour

    async def run(self, begin: Callable[[], Steps[T]], *, lane: str = "") -> T:
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
        """Do nothing: nothing is held."""

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
    """The fake database, its store, and an application's transactions on it; ``Real`` has the same."""

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
        """Lock a row unless another has it; whether it did."""
        return self.database.lockable(transaction, id_.hex)

    def lock_place(self, transaction: Transaction, name: str) -> bool:
        key = HELD_BY, name
        return key in self.database.others and self.database.lockable(transaction, key)

    def discard(self, transaction: Transaction, id_: UUID) -> None:
        row = self.database.change(transaction, id_.hex)
        row.status = "discarded"
        row.next_attempt_at = row.leased_until = row.token = row.owner = row.delivered_at = None

    def hold(self, name: str, seconds: float | None) -> None:
        """Pause a destination whose row is there for so long; None: resume it."""
        now, place = self.database.now(), self.database.others.get((HELD_BY, name))
        if place is None:
            return
        pause = (None, None) if seconds is None else (now, now + seconds)
        values = {"paused_at": pause[0], "paused_until": pause[1], "pause_reason": None}
        self.database.others[HELD_BY, name] = replace(place, **values)

    def pass_time(self, seconds: float, written: Sequence[tuple[Transaction, Sequence[UUID]]]) -> None:
        """Let time pass, also for the rows that open transactions have written."""
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
    """Return the seconds until a moment; other values stay as they are."""
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
        self.engine = engine(url, poolclass=sa.QueuePool, **level)
        if not self.concurrent:
            sa.event.listen(self.engine, "connect", lambda connection, _: connection.execute(UNHURRIED))
        self.dialect = DIALECTS[self.engine.dialect.name]
        self._statements = Statements(self.tables, self.dialect, "format" if self.concurrent else "qmark")
        self._now = sa.literal_column(self.dialect.words["now"], sa.DateTime(timezone=True))
        self.store = parts.open_store(url, self.tables)
        self.upkeep = SqlUpkeep(self.store)

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
    """Write row by row and by key, so that it waits for no row that another transaction has just written."""
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


Side: TypeAlias = Fake | Real


TOLERANCE = 40.0  # Seconds by which times may differ: less than histories have between two moments
PATIENCE = 60.0  # Seconds after which the real one is taken to wait for something
A_WHILE = 0.05  # Seconds in which the real one would have been done, did it not wait as the fake does

NAMES = ("shop", "other", "dead")
BUILDER = RowBuilder(Settings(destinations=[Destination(name, "console:", ordered=True) for name in NAMES]))


class Disagreement(AssertionError):
    """The fake and the real database did not answer alike."""


class New(NamedTuple):
    destinations: list[str]
    key: str | None
    delay: float
    max_attempts: int


class Pair(NamedTuple):
    fake: Delivery
    real: Delivery


@dataclass(eq=False)
class Open:
    """A transaction of an application that is not over yet, on both."""

    fake: Transaction
    real: Any
    written: list[UUID] = field(default_factory=list)
    locked: bool = False


Label: TypeAlias = tuple[int, str, int]
"""A row's name on both: the number of its event, the destination, and which of these it is."""


class Pairing:
    def __init__(self, real: Real, server: type[UpkeepServer] = UpkeepServer) -> None:
        self.real = real
        self.runner = asyncio.Runner()
        self.compared: Counter[str] = Counter()
        self.met: Counter[str] = Counter()  # What came up how often; what never does was not compared
        self._server = server
        self.clear()

    def clear(self) -> None:
        self.real.clear()
        self.fake = Fake(FLAVOURS[self.real.kind], self._server)
        self.open: list[Open] = []
        self.rows: list[tuple[Label, UUID, UUID]] = []
        self._events: dict[UUID, int] = {}
        self._labels: dict[tuple[str, UUID], Label] = {}

    def close(self) -> None:
        self.runner.run(self.real.close())
        self.runner.close()

    def new_event(self, event: New) -> list[tuple[Any, ...]]:
        later = datetime.now(UTC) + timedelta(seconds=event.delay) if event.delay else None
        call = Call(
            "Order", 1, "order.paid", {}, key=event.key, max_attempts=event.max_attempts, deliver_at=later,
            destinations=event.destinations,
        )  # fmt: skip
        emission = BUILDER.build(call, self.real.dialect)
        self._events[emission.event_id] = len(self._events)
        return emission.rows

    def do(self, what: str, act: Callable[[Side], Awaitable[T]], end: bool = True) -> tuple[T, T]:
        """Do it to both, where a transaction has to end first, end that; what they answered."""
        tick()
        self.compared[what] += 1
        return self.runner.run(self._both(act, end))

    async def _both(self, act: Callable[[Side], Awaitable[T]], end: bool) -> tuple[T, T]:
        fake = asyncio.ensure_future(act(self.fake))
        await self._moves(fake)
        real = asyncio.ensure_future(act(self.real))
        waits = not fake.done()
        if waits:
            self.met["waited"] += 1
            done, _ = await asyncio.wait([real], timeout=A_WHILE)
            while not fake.done():
                self.end(next(o for o in self.open if o.fake is self.fake.driver.waits_for), commit=end)
                await self._moves(fake)
            if done:
                raise Disagreement(f"the fake waited, and the real one did not and answered {real.result()}")
        done, _ = await asyncio.wait([real], timeout=PATIENCE)
        if not done:
            for transaction in list(self.open):
                self.end(transaction, commit=False)
            raise Disagreement(f"the real one waits, and the fake answered {fake.result()}; {await real}")
        return await fake, await real

    async def _moves(self, fake: asyncio.Future[Any]) -> None:
        """Until the fake is done or has to wait."""
        while not fake.done() and (self.fake.driver.waits_for is None or self.fake.driver.waits_for.over):
            await asyncio.wait([fake], timeout=0.0)

    def end(self, transaction: Open, *, commit: bool) -> None:
        self.open.remove(transaction)
        self.fake.end(transaction.fake, commit=commit)
        self.real.end(transaction.real, commit=commit)

    def label(self, side: str, id_: UUID) -> Label:
        return self._labels[side, id_]

    def compare(self, what: str, fake: Any, real: Any) -> None:
        if not alike(fake, real):
            raise Disagreement(f"{what}:\n  fake: {fake}\n  real: {real}")

    def look(self) -> None:
        fake, real = self._named("fake", self.fake.see()), self._named("real", self.real.see())
        for part, of_fake, of_real in zip(("rows", "places", "leader"), fake, real, strict=True):
            self.compare(part, of_fake, of_real)
        self.rows = [(label, a, b) for (label, a, *_), (_, b, *_) in zip(fake[0], real[0], strict=True)]

    def _named(self, side: str, seen: Seen) -> tuple[list[Any], list[Any], Any]:
        """Rows by their names; the ids, which differ for copies, count as alike."""
        times: Counter[tuple[int, str]] = Counter()
        rows = []
        for row in seen.rows:
            name = self._events[row.event_id], row.destination
            label = self._labels[side, row.id] = (*name, times[name])
            times[name] += 1
            rows.append((label, row.id, *row[3:]))
        return rows, seen.places, seen.leader


def alike(fake: Any, real: Any) -> bool:
    if isinstance(fake, UUID) and isinstance(real, UUID):
        return True
    if isinstance(fake, float) and isinstance(real, float):
        return abs(fake - real) < TOLERANCE
    if isinstance(fake, tuple | list) and isinstance(real, tuple | list):
        return len(fake) == len(real) and all(map(alike, fake, real))
    return bool(fake == real)


def tick() -> None:
    began = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == began:
        pass
