"""An application that goes on emitting while relays work.

It locks the key's row before it emits, as an application that updates its aggregate does; so the positions of
one key follow its commits. Across keys, transactions that take their time commit late.
"""

from __future__ import annotations

import os
import random
import time

import sqlalchemy as sa

from relaybox import Outbox
from relaybox.emit.row import Call
from tests.chaos.plan import Plan, engine, make_outbox

KEYS = sa.Table(
    "chaos_key",
    sa.MetaData(),
    sa.Column("id", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("emitted", sa.Integer),
    mysql_engine="InnoDB",
)


def prepare(connection: sa.Connection, outbox: Outbox, plan: Plan) -> None:
    """Make the keys, and emit the rows that are there at the start, the keys in turn."""
    KEYS.create(connection)
    keys = [{"id": key, "emitted": len(range(key, plan.bulk, plan.keys))} for key in range(plan.keys)]
    connection.execute(KEYS.insert(), keys)
    outbox.emit_many(connection, [_call(i % plan.keys, i // plan.keys) for i in range(plan.bulk)])


def emit(plan: Plan, name: str, count: int) -> None:
    """Emit ``count`` events, a few in each transaction, each transaction about one or two keys."""
    luck = random.Random(f"{plan.seed} {name}")
    outbox = make_outbox(plan.url)
    parent = os.getppid()
    with engine(plan.url).connect() as connection:
        while count and os.getppid() == parent:
            keys = sorted(luck.sample(range(plan.keys), luck.choice((1, 2))))
            with connection.begin():
                for key in keys:
                    size = min(count, luck.randint(1, 5))
                    outbox.emit_many(connection, _next(connection, key, size))
                    count -= size
                time.sleep(luck.choice((0, 0, 0, 0.01)))


def _next(connection: sa.Connection, key: int, count: int) -> list[Call]:
    mine = KEYS.c.id == key
    connection.execute(KEYS.update().where(mine).values(emitted=KEYS.c.emitted + count))
    end = connection.scalars(sa.select(KEYS.c.emitted).where(mine)).one()
    return [_call(key, number) for number in range(end - count, end)]


def _call(key: int, number: int) -> Call:
    return Call("Thing", key, "thing.changed", {"n": number})
