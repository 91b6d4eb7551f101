"""The constraints allow only rows that are in exactly one of the five states."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox.database.schema import make_tables, now
from tests.databases import engine

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

TABLES = make_tables(sa.MetaData())
ROW = TABLES.event.c


PENDING = ROW.status == "pending"
UNLEASED = sa.or_(ROW.leased_until.is_(None), ROW.leased_until <= now())
STATES = {
    "leased": sa.and_(PENDING, ROW.leased_until > now()),
    "due": sa.and_(PENDING, UNLEASED, ROW.next_attempt_at <= now()),
    "scheduled": sa.and_(PENDING, UNLEASED, ROW.next_attempt_at > now()),
    "parked": sa.and_(PENDING, UNLEASED, ROW.next_attempt_at.is_(None)),
    "final": ROW.status.in_(["delivered", "failed", "discarded"]),
}
"""The five, as a query would ask for each."""


def combinations() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*VALUES.values()):
        row = dict(zip(VALUES, values, strict=True))
        if row["payload"] is None:
            # Left out it is null; None would be JSON's null.
            del row["payload"]
        yield row


def minimal_row(**values: Any) -> dict[str, Any]:
    of = {"aggregate_type": "Order", "aggregate_id": "1", "event_type": "order.paid", "destination": "d"}
    return {"id": uuid4(), "event_id": uuid4(), "headers": {}, "idempotency_key": "k", **of, **values}


def test_every_row_is_refused_or_is_in_exactly_one_state(migrated: str) -> None:
    with engine(migrated).connect() as connection:
        accepted, refused = insert_all(connection)
        found = Counter[str]()
        for is_in in connection.execute(sa.select(*STATES.values())):
            [state] = [state for state, yes in zip(STATES, is_in, strict=True) if yes]
            found[state] += 1
    assert accepted + refused == 4608
    assert found == ACCEPTED


def insert_all(connection: sa.Connection) -> tuple[int, int]:
    """Try to insert every combination; the counts of accepted and refused ones."""
    accepted = refused = 0
    insert = sa.insert(TABLES.event)
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


@pytest.mark.parametrize(
    "values", [{"status": "sending"}, {"attempts": -1}, {"max_attempts": 0}, {"crashes": -1}], ids=repr
)
def test_a_value_outside_its_range_is_refused(migrated: str, values: dict[str, Any]) -> None:
    refused = pytest.raises((sa.exc.IntegrityError, sa.exc.OperationalError))
    with engine(migrated).begin() as connection, refused as error:
        connection.execute(sa.insert(TABLES.event).values(minimal_row(payload={}, **values)))
    assert by_a_check(error.value)


def test_the_database_gives_positions_in_the_order_of_insertion(migrated: str) -> None:
    # Three statements of one row, then one of three: neither the ids nor the clock say the order.
    rows = [minimal_row(payload={}, destination=str(number)) for number in range(6)]
    insert = sa.insert(TABLES.event)
    with engine(migrated).begin() as connection:
        for row in rows[:3]:
            connection.execute(insert.values(row))
        connection.execute(insert.values(rows[3:]))
        found = connection.execute(sa.select(ROW.destination, ROW.position).order_by(ROW.position)).all()
    destinations, positions = zip(*found, strict=True)
    assert destinations == tuple("012345")
    assert len(set(positions)) == 6
    assert min(positions) > 0


def test_a_given_position_is_refused_or_replaced_or_given_once_only(migrated: str) -> None:
    def insert(**position: int) -> None:
        connection.execute(sa.insert(TABLES.event).values(minimal_row(payload={}, **position)))

    with engine(migrated).begin() as connection:
        if migrated.startswith("postgresql"):
            with pytest.raises(sa.exc.ProgrammingError, match="GENERATED ALWAYS"):
                insert(position=7)
        elif migrated.startswith("sqlite"):
            insert(position=7)
            assert connection.scalars(sa.select(ROW.position)).all() == [1]
        else:
            insert()
            (position,) = connection.scalars(sa.select(ROW.position)).all()
            with pytest.raises(sa.exc.IntegrityError, match="Duplicate entry"):
                insert(position=position)
