"""The constraints leave no state in which a row is none of, or more than one of, the five."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox.migrations import migrate
from relaybox.schema import Tables, make_tables, now
from tests.schema_snapshot import engine

DATABASES = ["postgresql-18", "postgresql-15", "mariadb", "sqlite"]
CHECK_VIOLATIONS = ("CheckViolation", "CONSTRAINT `", "CHECK constraint failed")

PAST, FUTURE = datetime(2001, 1, 1, tzinfo=UTC), datetime.now(UTC) + timedelta(days=365)
VALUES: dict[str, tuple[Any, ...]] = {
    "status": ("pending", "delivered", "failed", "discarded"),
    "next_attempt_at": (PAST, FUTURE, None),
    "leased_until": (PAST, FUTURE, None),
    "lease_token": (uuid4(), None),
    "lease_owner": ("a relay", None),
    "delivered_at": (PAST, None),
    "ordering_key": ("a key", None),
    "payload": ({}, None),
    "payload_data": (b"x", None),
    "payload_encoding": ("gzip", None),
}

# Of an accepted row: five kinds of pending (due and scheduled with and without a key, parked with one), each
# never leased, leased and with a lease that ran out; three final ones with and without a key. Two payloads.
ACCEPTED = {"due": 8, "scheduled": 8, "parked": 4, "leased": 10, "final": 12}

each_database = pytest.mark.parametrize("kind", DATABASES)


def states(tables: Tables) -> dict[str, sa.ColumnElement[bool]]:
    """The five, as a query would ask for each."""
    row = tables.event.c
    pending = row.status == "pending"
    unleased = sa.or_(row.leased_until.is_(None), row.leased_until <= now())
    return {
        "leased": sa.and_(pending, row.leased_until > now()),
        "due": sa.and_(pending, unleased, row.next_attempt_at <= now()),
        "scheduled": sa.and_(pending, unleased, row.next_attempt_at > now()),
        "parked": sa.and_(pending, unleased, row.next_attempt_at.is_(None)),
        "final": row.status.in_(["delivered", "failed", "discarded"]),
    }


def combinations() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*VALUES.values()):
        row = dict(zip(VALUES, values, strict=True))
        if row["payload"] is None:
            # Left out it is null; None would be JSON's null.
            del row["payload"]
        yield row


def minimal_row(**values: Any) -> dict[str, Any]:
    return {
        "id": uuid4(),
        "event_id": uuid4(),
        "destination": "d",
        "aggregate_type": "Order",
        "aggregate_id": "1",
        "event_type": "order.paid",
        "headers": {},
        "idempotency_key": "k",
        **values,
    }


@pytest.fixture
def tables() -> Tables:
    return make_tables(sa.MetaData())


@each_database
def test_every_row_is_refused_or_is_in_exactly_one_state(
    kind: str, tables: Tables, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    migrate(url)
    with engine(url).connect() as connection:
        accepted, refused = insert_all(connection, tables)
        found = Counter[str]()
        for is_in in connection.execute(sa.select(*states(tables).values())):
            true_ones = [state for state, yes in zip(states(tables), is_in, strict=True) if yes]
            assert len(true_ones) == 1
            found[true_ones[0]] += 1
    print(f"{kind}: {refused} refused, {accepted} accepted: {dict(found)}")  # noqa: T201
    assert accepted + refused == 4608
    assert found == ACCEPTED


def insert_all(connection: sa.Connection, tables: Tables) -> tuple[int, int]:
    """Try to insert every combination; the counts of accepted and refused ones."""
    accepted = refused = 0
    insert = sa.insert(tables.event)
    if connection.dialect.name != "sqlite":
        # A refused statement ends the transaction of PostgreSQL; here each is one of its own.
        connection.execution_options(isolation_level="AUTOCOMMIT")
    for values in combinations():
        try:
            connection.execute(insert, minimal_row(**values))
        except (sa.exc.IntegrityError, sa.exc.OperationalError) as error:
            if not by_a_check(error):
                raise
            refused += 1
        else:
            accepted += 1
    return accepted, refused


def by_a_check(error: sa.exc.DBAPIError) -> bool:
    return any(sign in str(error) for sign in CHECK_VIOLATIONS)


@each_database
@pytest.mark.parametrize(
    "values", [{"status": "sending"}, {"attempts": -1}, {"max_attempts": 0}, {"crashes": -1}], ids=repr
)
def test_a_value_outside_its_range_is_refused(
    kind: str, values: dict[str, Any], tables: Tables, module_database: Callable[[str], str]
) -> None:
    url = module_database(kind)
    migrate(url)
    with (
        engine(url).begin() as connection,
        pytest.raises((sa.exc.IntegrityError, sa.exc.OperationalError)) as error,
    ):
        connection.execute(sa.insert(tables.event).values(minimal_row(payload={}, **values)))
    assert by_a_check(error.value)


@each_database
def test_the_database_gives_positions_in_the_order_of_insertion(
    kind: str, tables: Tables, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    migrate(url)
    # Three statements of one row, then one of three: neither the ids nor the clock say the order.
    rows = [minimal_row(payload={}, destination=str(number)) for number in range(6)]
    insert = sa.insert(tables.event)
    with engine(url).begin() as connection:
        for row in rows[:3]:
            connection.execute(insert.values(row))
        connection.execute(insert.values(rows[3:]))
        event = tables.event.c
        found = connection.execute(
            sa.select(event.destination, event.position).order_by(event.position)
        ).all()
    destinations, positions = zip(*found, strict=True)
    assert destinations == tuple("012345")
    assert len(set(positions)) == 6
    assert min(positions) > 0


@pytest.mark.parametrize("kind", ["postgresql-18", "postgresql-15"])
def test_on_postgresql_a_given_position_is_refused(
    kind: str, tables: Tables, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database(kind)
    migrate(url)
    with (
        engine(url).begin() as connection,
        pytest.raises(sa.exc.ProgrammingError, match="GENERATED ALWAYS"),
    ):
        connection.execute(sa.insert(tables.event).values(minimal_row(payload={}, position=7)))


def test_on_sqlite_a_given_position_is_replaced(tables: Tables, fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("sqlite")
    migrate(url)
    with engine(url).begin() as connection:
        connection.execute(sa.insert(tables.event).values(minimal_row(payload={}, position=7)))
        assert connection.scalars(sa.select(tables.event.c.position)).all() == [1]


def test_on_mariadb_a_position_is_given_once_only(
    tables: Tables, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database("mariadb")
    migrate(url)
    with engine(url).begin() as connection:
        connection.execute(sa.insert(tables.event).values(minimal_row(payload={})))
        (position,) = connection.scalars(sa.select(tables.event.c.position)).all()
        with pytest.raises(sa.exc.IntegrityError, match="Duplicate entry"):
            connection.execute(sa.insert(tables.event).values(minimal_row(payload={}, position=position)))
