"""A transaction that emits waits for the disk on PostgreSQL, also where the application's others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psycopg
import pytest

from relaybox import Call, Destination, Outbox, Route
from tests.databases import POSTGRESQL

OUTBOX = Outbox(
    "postgresql://",
    destinations=[Destination("one", "console:"), Destination("two", "console:")],
    routes=[Route("order.*", to=["one", "two"])],
    notify=False,
)


@pytest.fixture(params=POSTGRESQL)
def connection(
    request: pytest.FixtureRequest, migrated_database: Callable[[str], str]
) -> Iterator[psycopg.Connection]:
    with psycopg.connect(migrated_database(request.param)) as connection:
        yield connection


def emit_one(connection: psycopg.Connection) -> None:
    OUTBOX.emit(connection, "Order", 1, "order.paid", {})


def emit_many(connection: psycopg.Connection) -> None:
    OUTBOX.emit_many(connection, [Call("Order", number, "order.paid", {}) for number in range(3)])


def setting(connection: psycopg.Connection) -> str:
    row = connection.execute("SHOW synchronous_commit").fetchone()
    assert row is not None
    return str(row[0])


@pytest.mark.parametrize("emit", [emit_one, emit_many])
def test_a_transaction_that_emits_waits_for_the_disk(
    connection: psycopg.Connection, emit: Callable[[psycopg.Connection], None]
) -> None:
    connection.execute("SET synchronous_commit = off")
    emit(connection)
    assert setting(connection) == "local"
    connection.commit()
    assert setting(connection) == "off", "the application's other transactions are its own business"


@pytest.mark.parametrize("waits", ["on", "local", "remote_write", "remote_apply"])
def test_a_transaction_that_waits_for_more_still_does(connection: psycopg.Connection, waits: str) -> None:
    connection.execute("SELECT set_config('synchronous_commit', %s, true)", [waits])
    emit_one(connection)
    assert setting(connection) == waits


def test_an_event_that_is_rolled_back_leaves_the_transaction_as_it_was(
    connection: psycopg.Connection,
) -> None:
    connection.execute("SET LOCAL synchronous_commit = off")
    with connection.transaction(force_rollback=True):
        emit_one(connection)
    assert setting(connection) == "off"
