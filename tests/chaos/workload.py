"""The application: emitters in processes of their own, whose business rows are the truth afterwards.

Each transaction locks a counter of its key, increments it, emits ``(key, n)`` and writes the business row of
it. Some abort, some roll back a savepoint in which they emitted, some emit for several keys. So what is in
the table of business rows is what must have been emitted: for each key 1..N without a gap.
"""

from __future__ import annotations

import base64
import random
import time
from contextlib import suppress
from typing import Any

import msgspec
import sqlalchemy as sa

from relaybox import Destination, Outbox, Route
from tests.chaos import drivers
from tests.chaos.drivers import ERRORS, Driver, connect, engine

ORDERED, LOOSE = "ordered", "loose"
BROKER = "broker"  # Where a schedule has one, everything goes there too
SECRET = "whsec_Y2hhb3MgaXMgYSBsYWRkZXIgb2YgcGl0cyBhbmQgb2Y="
NAMES = [f"key {number:02}" for number in range(40)]
LOUD = 3  # Every so many-th event of a key also goes to the destination without order
ABORT, SAVEPOINT, SEVERAL, BINARY = 0.15, 0.05, 0.10, 0.05
ALPHABET = "abc xyz ABC 012 {}[]\",:\\/'%?$ äß€ \u2028 日本 😀 \t\n"
NEVER_FAILED = 10_000

metadata = sa.MetaData()
counter = sa.Table(
    "shop_counter",
    metadata,
    sa.Column("name", sa.String(40), primary_key=True),
    sa.Column("n", sa.Integer, nullable=False),
)
business = sa.Table(
    "shop_order",
    metadata,
    sa.Column("name", sa.String(40), primary_key=True),
    sa.Column("n", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("event_id", sa.String(36), nullable=False, unique=True),
    sa.Column("payload", sa.Text, nullable=False),
    mysql_charset="utf8mb4",
)

taken_over = sa.Table(
    "chaos_taken_over",
    metadata,
    sa.Column("id", sa.Uuid, nullable=False),
    sa.Column("owner", sa.String(200), nullable=False),
)
"""Rows that were claimed again before they were settled, and who held them until then."""

TAKE_OVER = (
    "INSERT INTO chaos_taken_over SELECT old.id, old.lease_owner{dual} WHERE old.lease_token IS NOT NULL"
    " AND new.lease_token IS NOT NULL AND old.lease_token <> new.lease_token"
)
ON_UPDATE = "CREATE TRIGGER chaos_taken_over AFTER UPDATE ON outbox_event FOR EACH ROW "
WITNESSES = {
    "postgresql": (
        "CREATE FUNCTION chaos_taken_over() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {TAKE_OVER.format(dual='')}; RETURN NULL; END $$",
        ON_UPDATE + "EXECUTE FUNCTION chaos_taken_over()",
    ),
    "mysql": (ON_UPDATE + TAKE_OVER.format(dual=" FROM dual"),),
    "sqlite": (ON_UPDATE + f"BEGIN {TAKE_OVER.format(dual='')}; END",),
}

INCREMENT = "UPDATE shop_counter SET n = n + 1 WHERE name = ?"
INCREMENT_AND_READ = f"{INCREMENT} RETURNING n"
READ = "SELECT n FROM shop_counter WHERE name = ?"
WRITE = "INSERT INTO shop_order (name, n, event_id, payload) VALUES (?, ?, ?, ?)"


class Place(msgspec.Struct, frozen=True):
    """The outbox that all processes use: where its database is and how its destinations are set."""

    url: str
    ports: dict[str, int]
    lease: float
    timeout: float
    batch: int = 20
    poll: float = 0.1
    concurrency: int = 50
    keep: bool = True  # Whether rows that were delivered are kept
    broker: str = ""  # The URL of a broker, if there is one; then every event also goes there

    def outbox(self) -> Outbox:
        options: dict[str, Any] = {
            "lease": self.lease,
            "timeout": self.timeout,
            "batch_size": self.batch,
            "poll_interval": self.poll,
            "concurrency": self.concurrency,
            "retention": "7d" if self.keep else 0,
            "backoff": {"base": "20ms", "cap": "200ms"},
            "max_attempts": NEVER_FAILED,
        }
        signed = {"allow": ["127.0.0.0/8"], "secret": SECRET}
        destinations = [
            Destination(
                *(name, f"http://127.0.0.1:{self.ports[name]}/events"),
                **{"ordered": name == ORDERED, **signed, **options},
            )
            for name in (ORDERED, LOOSE)
        ]
        routes = [Route("order.*", to=ORDERED), Route("order.loud", to=LOOSE)]
        if self.broker:
            destinations.append(Destination(BROKER, self.broker, ordered=True, **options))
            routes.append(Route("order.*", to=BROKER))
        return Outbox(self.url, destinations=destinations, routes=routes)


class Plan(msgspec.Struct, frozen=True):
    """One emitter: how many events it commits at least, and over how many seconds it spreads them.

    It gives up if it could commit nothing for ``patience`` seconds. A slow machine only makes it slow.
    """

    place: Place
    driver: str
    seed: int
    events: int
    seconds: float
    patience: float = 60.0


def create(url: str) -> None:
    with engine(url).begin() as connection:
        metadata.create_all(connection)
        connection.execute(counter.insert(), [{"name": name, "n": 0} for name in NAMES])
        for statement in WITNESSES[sa.make_url(url).get_backend_name()]:
            connection.exec_driver_sql(statement)


def event_type(n: int) -> str:
    """Return the type of the n-th event of a key, by which it is routed."""
    return "order.quiet" if n % LOUD else "order.loud"


def written(payload: Any) -> str:
    """Return a payload as the business row stores it: JSON in one notation, or bytes as base64."""
    if isinstance(payload, bytes):
        return "base64:" + base64.b64encode(payload).decode()
    return msgspec.json.encode(payload, order="deterministic").decode()


class Emitter:
    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._outbox = plan.place.outbox()
        self._random = random.Random(plan.seed)
        self._db: Driver | None = None
        # SQLite's lock goes to the first that looks: one that never pauses keeps it from all others.
        self._rest = 0.002 if plan.driver == "sqlite3" else 0.0

    def run(self) -> None:
        begun = progressed = time.monotonic()
        committed = 0
        while committed < self._plan.events:
            now = time.monotonic()
            if now - progressed > self._plan.patience:
                raise TimeoutError(f"no event committed for {now - progressed:.0f} s, after {committed}")
            if done := self._try():
                committed += done
                progressed = now
            ahead = committed / self._plan.events * self._plan.seconds - (now - begun)
            if ahead > 0.01 or self._rest:
                time.sleep(max(ahead, self._rest))

    def _try(self) -> int:
        """Try one transaction; return how many events it surely committed. Trouble costs the connection."""
        try:
            if self._db is None:
                self._db = connect(self._plan.driver, self._plan.place.url)
            return self._transact(self._db)
        except drivers.ERRORS:
            if self._db is not None:
                with suppress(*drivers.ERRORS):
                    self._db.close()
            self._db = None
            time.sleep(0.02)
            return 0

    def _transact(self, db: Driver) -> int:
        chance = self._random.random
        count = self._random.randint(2, 4) if chance() < SEVERAL else 1
        chosen = sorted(self._random.sample(NAMES, count))
        db.begin()
        for name in chosen:
            if chance() < SAVEPOINT:
                savepoint = db.savepoint()
                self._place_order(db, name)
                db.back_to(savepoint)
            self._place_order(db, name)
        if chance() < ABORT:
            db.rollback()
            return 0
        db.commit()
        if chance() < 0.5:
            # The others are found by polling, as with an application that does not call.
            self._outbox.wake()
        return count

    def _place_order(self, db: Driver, name: str) -> None:
        n = self._next(db, name)
        payload = self._payload(name, n)
        event_id = db.emit(self._outbox, "Order", name, event_type(n), payload)
        db.fetch(WRITE, name, n, str(event_id), written(payload))

    def _next(self, db: Driver, name: str) -> int:
        """Lock the counter of the key and count it up."""
        if not self._plan.place.url.startswith("mysql"):
            return int(db.fetch(INCREMENT_AND_READ, name)[0][0])
        db.fetch(INCREMENT, name)
        return int(db.fetch(READ, name)[0][0])

    def _payload(self, name: str, n: int) -> Any:
        text = "".join(self._random.choices(ALPHABET, k=self._random.choice((0, 5, 40, 400))))
        payload = {"key": name, "n": n, "text": text, "float": self._random.random(), "by": self._plan.seed}
        return msgspec.json.encode(payload) if self._random.random() < BINARY else payload


def main(plan: bytes) -> None:
    Emitter(msgspec.json.decode(plan, type=Plan)).run()


class Rows:
    def __init__(self, place: Place) -> None:
        self._engine = engine(place.url)
        self._event = place.outbox().tables.event

    def held(self, owner: str = "%") -> set[Any]:
        """Return the rows that are leased by an owner whose name matches.

        None while the database is away: what was leased when it went was counted then, and nothing is
        claimed meanwhile.
        """
        event = self._event.c
        query = sa.select(event.id).where(event.lease_owner.like(owner), event.status == "pending")
        try:
            return set(self._all(query, 0))
        except ERRORS:
            return set()

    def held_until_taken_over(self, owner: str) -> set[Any]:
        """Those, and the rows that others have taken over from the owner, however late this is asked."""
        with suppress(*ERRORS):
            query = sa.select(taken_over.c.id).where(taken_over.c.owner.like(owner))
            return self.held(owner) | set(self._all(query, 0))
        return set()

    def pending(self) -> int:
        query = sa.select(sa.func.count()).where(self._event.c.status == "pending")
        return int(self._all(query, 0)[0])

    def committed(self) -> int:
        return int(self._all(sa.select(sa.func.count()).select_from(business), 0)[0])

    def events(self) -> list[Any]:
        event = self._event.c
        columns = (event.destination, event.event_id, event.aggregate_id, event.ordering_key)
        query = sa.select(*columns, event.position, event.status, event.lease_token).order_by(event.position)
        return self._all(query)

    def orders(self) -> list[Any]:
        return self._all(sa.select(business).order_by(business.c.name, business.c.n))

    def execute(self, statement: str, **values: Any) -> list[Any]:
        with self._engine.connect() as connection:
            connection = connection.execution_options(isolation_level="AUTOCOMMIT")
            result = connection.execute(sa.text(statement), values)
            return list(result.all()) if result.returns_rows else []

    def _all(self, query: Any, column: int | None = None) -> list[Any]:
        with self._engine.connect() as connection:
            result = connection.execute(query)
            return list(result.all() if column is None else result.scalars(column).all())
