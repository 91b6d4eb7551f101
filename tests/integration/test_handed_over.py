"""What is emitted for Debezium is final from the start, and no relay waits for it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import asyncpg
import psycopg
import pytest
import sqlalchemy as sa

from relaybox import Call, Destination, Outbox, Route
from relaybox.errors import ConfigError
from relaybox.operate.admin import Admin
from relaybox.stores.ledger import Filter
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger
from tests.integration.project import Project
from tests.integration.shop import Databases
from tests.waiting import PATIENCE, await_for

EVERY = """
SELECT status, delivered_at IS NOT NULL, next_attempt_at, attempts FROM outbox_event WHERE destination = %s"""
FINAL = [("delivered", True, None, 0)]


@pytest.fixture
def url(migrated_database: Databases) -> str:
    return migrated_database("postgresql-18")


@pytest.fixture
def outbox(url: str) -> Outbox:
    return Outbox(
        url,
        destinations=[Destination("cdc", "debezium:", retention=0), Destination("mail", "memory:")],
        routes=[Route("order.*", to="cdc"), Route("both.*", to=["mail", "cdc"])],
        unrouted="store",
    )


def rows(url: str, destination: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(url) as connection:
        return connection.execute(EVERY, [destination]).fetchall()


async def test_its_rows_are_final_on_every_driver_of_postgresql(url: str, outbox: Outbox) -> None:
    with psycopg.connect(url) as connection:
        outbox.emit(connection, "Order", 1, "order.paid", {})
        outbox.emit(connection, "Order", 2, "both.paid", {}, idempotency_key="once")
    connection = await asyncpg.connect(url)
    async with connection.transaction():
        await outbox.aemit(connection, "Order", 3, "order.paid", {})
        calls = [Call("Order", n, "both.paid", {}) for n in range(4, 9)]
        emitted = await outbox.aemit_many(connection, calls)
    await connection.close()
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg2"), poolclass=sa.NullPool)
    with engine.begin() as through:
        outbox.emit(through, "Order", 9, "order.paid", {})
    assert {one.destinations for one in emitted} == {("mail", "cdc")}
    assert rows(url, "cdc") == FINAL * 9
    assert [row[0] for row in rows(url, "mail")] == ["pending"] * 6


async def test_no_relay_takes_them_and_retention_removes_them(url: str, outbox: Outbox) -> None:
    with psycopg.connect(url) as connection:
        outbox.emit(connection, "Order", 1, "both.paid", {})
    await outbox.adrain()
    assert [row[0] for row in rows(url, "mail")] == ["delivered"]
    assert rows(url, "cdc") == FINAL
    await outbox.relay().upkeep()
    assert rows(url, "cdc") == []


async def test_an_event_that_was_stored_without_a_route_is_inserted_for_it(url: str, outbox: Outbox) -> None:
    before = Outbox(url, unrouted="store")
    with psycopg.connect(url) as connection:
        before.emit(connection, "Order", 1, "both.paid", {})
        before.emit(connection, "Order", 2, "order.paid", b"\0")
    await outbox.adrain()
    assert rows(url, "cdc") == FINAL
    assert [row[0] for row in rows(url, "mail")] == ["delivered"]
    assert [row[0] for row in rows(url, "")] == ["pending"]


async def test_a_relay_that_has_nothing_to_send_sees_to_the_tables(url: str) -> None:
    outbox = Outbox(url, destinations=[Destination("cdc", "debezium:")])

    def leads() -> bool:
        with psycopg.connect(url) as connection:
            return bool(connection.execute("SELECT 1 FROM outbox_leader").fetchall())

    relay = outbox.relay()
    running = asyncio.create_task(relay.run(signals=False))
    await await_for(leads, "the relay leads")
    assert not running.done()
    relay.stop()
    await asyncio.wait_for(running, PATIENCE)


async def test_what_would_never_be_read_is_refused(url: str, outbox: Outbox) -> None:
    with psycopg.connect(url) as connection:
        outbox.emit(connection, "Order", 1, "both.paid", {})
    store = open_store(url, outbox.tables)
    admin = Admin(SqlLedger(store), outbox.settings.destinations, "ann")
    for change in (admin.move("mail", "cdc"), admin.replay(Filter(destination="mail"), to="cdc")):
        with pytest.raises(ConfigError, match="to = 'cdc': Debezium takes only what is emitted to it"):
            await change
    with pytest.raises(ConfigError, match="no relay sends there; pause the connector instead"):
        await admin.pause("cdc", "tea")
    assert (await admin.replay(Filter(destination="cdc"))).affected == 1
    assert rows(url, "cdc") == FINAL * 2
    await store.close()


def test_the_command_says_what_is_known(url: str, outbox: Outbox, tmp_path: Path) -> None:
    project = Project(tmp_path)
    destinations = '[destinations.cdc]\nsink = "debezium:"\n[destinations.mail]\nsink = "memory:"\n'
    project.write("relaybox.toml", f'[relaybox]\ndatabase = "{url}"\n{destinations}')
    with psycopg.connect(url) as connection:
        emitted = outbox.emit(connection, "Order", 1, "order.paid", {})
    assert "handed to Debezium's reader of the log at" in project.run("why", str(emitted.event_id))
    lines = project.run("status").splitlines()
    assert [line.split()[-1] for line in lines if line.startswith("cdc ")] == ["debezium"]
    assert any("cdc: handed to Debezium's reader of the log: written to the WAL" in line for line in lines)
    checked = project.run("config", "check")
    assert "the server has no publication and no slot for it; run `relaybox debezium cdc --sql`" in checked


def test_another_database_is_refused_before_anything_starts(tmp_path: Path) -> None:
    project = Project(tmp_path)
    project.write("relaybox.toml", '[destinations.cdc]\nsink = "debezium:"\n')
    assert "'cdc': sink = 'debezium:' needs PostgreSQL" in project.run("relay", "--once", status=2)
    outbox = Outbox(f"sqlite:///{tmp_path}/relaybox.db", destinations=[Destination("cdc", "debezium:")])
    with pytest.raises(ConfigError, match="needs PostgreSQL"):
        outbox.relay()
