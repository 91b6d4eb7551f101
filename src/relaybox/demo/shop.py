"""The application, to be run in a process of its own: it places orders, each change with its event.

Several clerks work at once on the same orders, each change in one transaction. Some change their mind and
roll back, some roll back only a savepoint: then neither the change nor its event ever happened.
"""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from uuid import uuid4

import sqlalchemy as sa
from sqlalchemy.orm import Session

from relaybox.app import Outbox
from relaybox.demo.journal import Change, Journal, Placed
from relaybox.demo.outbox import make_outbox
from relaybox.demo.workspace import Place

CLERKS = 3
OPEN_ORDERS = 40
PAUSE_SECONDS = 0.025
ROLLED_BACK, SAVEPOINT = 0.08, 0.1
"""The parts of the transactions that roll back, all of it or a savepoint in it."""
STEPS = ("order.placed", "order.paid", "order.packed", "order.shipped")

metadata = sa.MetaData()
orders = sa.Table(
    "orders",
    metadata,
    sa.Column("id", sa.BigInteger, sa.Identity(), primary_key=True),
    sa.Column("changes", sa.Integer, nullable=False),
    sa.Column("total", sa.Integer, nullable=False),
)
changes = sa.Table(
    "order_changes",
    metadata,
    sa.Column("ref", sa.String(32), primary_key=True),
    sa.Column("order_id", sa.ForeignKey("orders.id"), nullable=False),
    sa.Column("number", sa.Integer, nullable=False),
    sa.Column("type", sa.String(50), nullable=False),
    sa.UniqueConstraint("order_id", "number"),
)


class ChangedMind(Exception):
    """The transaction, or the savepoint, is not to be."""


def read_changes(connection: sa.Connection) -> list[Change]:
    """What the database really holds."""
    columns = changes.c
    query = sa.select(columns.ref, columns.order_id, columns.number, columns.type)
    return [Change(*row) for row in connection.execute(query)]


class Clerk:
    """Places and changes orders; safe in several threads at once."""

    def __init__(self, outbox: Outbox, engine: sa.Engine, journal: Journal) -> None:
        self._outbox = outbox
        self._engine = engine
        self._journal = journal
        self._open: list[int] = []

    def work(self, until: float) -> None:
        """One transaction after the other, with little pauses."""
        while time.monotonic() < until:
            time.sleep(random.expovariate(1 / PAUSE_SECONDS))
            with Session(self._engine) as session:
                self._transact(session, uuid4().hex)

    def _transact(self, session: Session, ref: str) -> None:
        try:
            with session.begin():
                order, number = self._advance(session)
                if random.random() < SAVEPOINT:
                    self._try_discount(session, order, number + 1)
                self._change(session, Change(ref, order, number, STEPS[number - 1]))
                if random.random() < ROLLED_BACK:
                    raise ChangedMind
        except ChangedMind:
            self._journal.write(Placed(ref, time.monotonic(), "rollback"))
            return
        self._journal.write(Placed(ref, time.monotonic()))
        if number == 1:
            self._open.append(order)

    def _advance(self, session: Session) -> tuple[int, int]:
        """The next step of an order: its number, and a lock on the order until the transaction ends."""
        order = random.choice(tuple(self._open)) if len(self._open) >= OPEN_ORDERS else None
        if order is None:
            insert = orders.insert().values(changes=1, total=random.randint(10, 900))
            return session.execute(insert.returning(orders.c.id)).scalar_one(), 1
        update = orders.update().where(orders.c.id == order, orders.c.changes < len(STEPS))
        number = session.execute(
            update.values(changes=orders.c.changes + 1).returning(orders.c.changes)
        ).scalar_one_or_none()
        if number is not None:
            return order, number
        with suppress(ValueError):
            self._open.remove(order)
        return self._advance(session)

    def _try_discount(self, session: Session, order: int, number: int) -> None:
        ref = uuid4().hex
        with suppress(ChangedMind), session.begin_nested():
            self._change(session, Change(ref, order, number, "order.discounted"))
            raise ChangedMind
        self._journal.write(Placed(ref, time.monotonic(), "savepoint"))

    def _change(self, session: Session, change: Change) -> None:
        """The change and its event: both or neither."""
        session.execute(
            changes.insert().values(
                ref=change.ref, order_id=change.order, number=change.number, type=change.type
            )
        )
        payload = {"ref": change.ref, "number": change.number, "currency": "EUR", "channel": "web"}
        self._outbox.emit(session, "Order", change.order, change.type, payload)


def trade(place: Place) -> None:
    """Keep all clerks busy for as long as the place says."""
    outbox = make_outbox(place)
    engine = sa.create_engine(sa.make_url(place.database).set(drivername="postgresql+psycopg"))
    engine.connect().close()
    place.ready()
    until = time.monotonic() + place.seconds
    clerk = Clerk(outbox, engine, Journal(place.path("shop.placed")))
    with ThreadPoolExecutor(CLERKS) as clerks:
        list(clerks.map(clerk.work, [until] * CLERKS))
    engine.dispose()
