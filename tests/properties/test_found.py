"""What generated inputs found, each with the smallest one that shows it."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from relaybox import Destination, Event, Outbox, Route
from relaybox.cli import app
from relaybox.core.outcome import Released
from relaybox.core.settings import Settings
from relaybox.database.dialects import EARLIEST, LATEST, SQLITE
from relaybox.database.pools.pipeline import AnyTime
from relaybox.database.statements.delivery import INSERTED
from relaybox.emit.row import Call, RowBuilder
from relaybox.errors import ConfigError, InvalidField, PayloadError
from relaybox.stores.open import open_store
from relaybox.stores.store import Claim, Settlement, Want
from relaybox.wire.codec import Limits, encode_payload
from tests.databases import engine
from tests.properties.conftest import Database
from tests.properties.edits import BLOB, NOT_UTF8
from tests.properties.test_rows import Edited, check
from tests.properties.values import Both, HostileMapping, HostileObject, HostileText, HostileTimezone, Size

BUILDER = RowBuilder(Settings(destinations=[Destination("shop", "console:")], routes=[Route("*", to="shop")]))


def row(**options: Any) -> dict[str, Any]:
    """Return the row of an event with these arguments."""
    given = {"aggregate_type": "Order", "aggregate_id": 1, "event_type": "order.paid", "payload": 1}
    [values] = BUILDER.build(Call(**{**given, **options}), SQLITE).rows
    return dict(zip(INSERTED, values, strict=True))


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"aggregate_id": HostileObject()}, "aggregate_id"),
        ({"tenant": HostileObject()}, "tenant"),
        ({"max_attempts": 1 << 20_000}, "max_attempts"),
        ({"deliver_at": datetime(2024, 1, 1, tzinfo=HostileTimezone())}, "deliver_at"),
        ({"destinations": 5}, "destinations"),
        ({"destinations": [5]}, "destinations"),
        ({"destinations": [["shop"]]}, "destinations"),
    ],
)
def test_an_argument_of_any_type_is_refused_by_its_name(options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        row(**options)
    assert refused.value.field == field


@pytest.mark.parametrize("make", [HostileObject, HostileMapping])
@pytest.mark.parametrize("tenant", [None, "t"])
def test_headers_that_cannot_be_read_are_refused(make: Callable[[], Any], tenant: str | None) -> None:
    with pytest.raises(PayloadError) as refused:
        row(headers=make(), tenant=tenant)
    assert refused.value.path == "headers"


def test_a_payload_whose_class_fails_is_refused() -> None:
    moment = datetime(2024, 1, 1, tzinfo=HostileTimezone())
    for payload in (HostileObject(), [HostileMapping()], {"a": moment}):
        with pytest.raises(PayloadError):
            encode_payload(payload, Limits())


def test_subclasses_of_text_and_numbers_are_stored_as_what_they_are() -> None:
    made = row(aggregate_type=HostileText("Order"), aggregate_id=Both.ONE, max_attempts=Size.SMALL)
    stored = [made[name] for name in ("aggregate_type", "aggregate_id", "max_attempts")]
    assert stored == ["Order", "1", 1]
    assert [type(one) for one in stored] == [str, str, int]


def test_a_year_of_three_digits_sorts_before_the_others_in_sqlite() -> None:
    assert row(deliver_at=datetime(999, 1, 1, tzinfo=UTC))["next_attempt_at"] == "0999-01-01 00:00:00.000000"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allow": 5}, "allow = 5: write a list of networks"),
        ({"max_attempts": 2**31}, "max_attempts = 2147483648: write no more than 2147483647"),
        ({"lease": "999999d"}, "lease = '999999d': write no more than 36500d"),
        ({"timeout": HostileObject()}, "timeout = <HostileObject>: write a duration"),
        ({"ordering": HostileObject()}, "ordering is of type HostileObject, which fails with Trap"),
        ({"backoff": HostileMapping()}, "backoff cannot be read: Trap"),
        ({"batch_size": 1 << 20_000}, "batch_size = <int>: write no more than"),
    ],
)
def test_a_setting_of_any_type_is_refused_by_its_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="destination 'shop'") as refused:
        Destination("shop", "console:", **options)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("relaybox.toml", "a = " + "[" * 3000),
        ("relaybox.toml", "a = " + "9" * 5000),
        ("pyproject.toml", "tool = 5"),
    ],
)
def test_a_file_that_no_parser_takes_is_refused(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=name):
        Settings.load(path, {})


@pytest.mark.parametrize("moment", ["0001-01-01", "9999-12-31", "0001-01-01T00:00:00+14:00"])
def test_the_ends_of_the_calendar_may_be_asked_for(moment: str, migrated_database: Database) -> None:
    url = migrated_database("sqlite")
    for option in ("--since", "--until"):
        done = CliRunner().invoke(app, ["--database", url, "events", "list", option, moment])
        assert done.exit_code == (2 if "+14" in moment else 0), done.exception


@pytest.mark.parametrize("kind", ["postgresql-18", "mariadb", "sqlite"])
def test_an_attempt_is_given_back_though_somebody_has_reset_the_count(
    kind: str, migrated_database: Database
) -> None:
    url = migrated_database(kind)
    outbox = Outbox(url, destinations=[Destination("shop", "console:")], routes=[Route("*", to="shop")])
    made = engine(url)
    with made.begin() as connection:
        outbox.emit_many(connection, [Call("Order", n, "order.paid", {}) for n in range(2)])

    async def claim_and_release() -> None:
        store = open_store(url, outbox.tables)
        try:
            claim = await store.claim(Want("shop", "me", 2))
            with made.begin() as connection:
                connection.exec_driver_sql("UPDATE outbox_event SET attempts = 0")
            await store.settle([Settlement(delivery, Released()) for delivery in claim.deliveries])
        finally:
            await store.close()

    asyncio.run(claim_and_release())
    with made.begin() as connection:
        rows = connection.exec_driver_sql("SELECT attempts, lease_token FROM outbox_event").fetchall()
    assert [tuple(one) for one in rows] == [(0, None)] * 2


@pytest.mark.parametrize("payload", [5, 1.0, 1e22, 3.141592653589793, -7])
def test_a_payload_that_is_a_bare_number_arrives_from_sqlite(
    payload: float, migrated_database: Database
) -> None:
    url = migrated_database("sqlite")
    taken: list[Event] = []
    outbox = Outbox(url)
    outbox.handler("*", name="shop")(lambda event: taken.append(event))
    with closing(sqlite3.connect(sa.make_url(url).database or "")) as connection, connection:
        outbox.emit(connection, "Order", 1, "order.paid", payload)
        [stored] = connection.execute("SELECT payload FROM outbox_event").fetchone()
    outbox.drain()
    assert [event.payload for event in taken] == [payload]
    assert type(taken[0].payload) is type(payload)
    assert isinstance(stored, str)


SPOILT: list[tuple[str, str, Any]] = [
    *(("sqlite", "event_id", "garbage"), ("sqlite", "id", "01a1df23-79f7-7316-9d80-f79a51f276dd")),
    *(("sqlite", "attempts", "many"), ("sqlite", "position", "first"), ("sqlite", "payload", b"\xff")),
    *(("sqlite", "created_at", "yesterday"), ("sqlite", "attempts", -5), ("sqlite", "headers", "{")),
    *(("sqlite", "status", "archived"), ("sqlite", "destination", b"\xff"), ("sqlite", "id", NOT_UTF8)),
    *(("sqlite", "id", BLOB), ("sqlite", "ordering_key", NOT_UTF8), ("sqlite", "ordering_key", BLOB)),
    *(("sqlite", "id", "a\0b"), ("sqlite", "ordering_key", "a\0b")),
    *(("mariadb", "event_id", "garbage"), ("mariadb", "attempts", -5), ("mariadb", "headers", "{")),
    *(("mariadb", "created_at", "0000-00-00 00:00:00"), ("postgresql-18", "created_at", "infinity")),
    *(("postgresql-18", "attempts", 2**31 - 1), ("postgresql-18", "headers", "5")),
]


@pytest.mark.parametrize(("kind", "column", "value"), SPOILT)
def test_a_lane_goes_on_behind_a_row_that_somebody_spoilt(
    kind: str, column: str, value: Any, module_database: Database, outboxes: dict[str, Edited]
) -> None:
    edited = outboxes.get(kind) or outboxes.setdefault(kind, Edited(module_database(kind)))
    edited.clear()
    victims = edited.emit("Victim", 1)
    # An id is one row's own; else the row of each destination, of which one has a dead letter.
    ids = edited.rows()[: 1 if column == "id" else None]
    with edited.unchecked() as connection:
        for id_ in ids:
            edited.change(connection, {column: value}, id_)
    asyncio.run(check(edited, victims))


@pytest.fixture(scope="module")
def outboxes() -> dict[str, Edited]:
    """Yield an outbox for each kind of database."""
    return {}


def test_a_text_that_is_not_utf8_in_sqlite_fails_its_own_delivery_only(fresh_database: Database) -> None:
    edited = Edited(fresh_database("sqlite"))
    victims: list[UUID] = edited.emit("Victim", 1)
    with edited.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox_event SET aggregate_id = CAST(x'ff' AS TEXT)")
    asyncio.run(check(edited, victims))
    with edited.engine.begin() as connection:
        failed = connection.exec_driver_sql("SELECT error_message FROM outbox_event WHERE status = 'failed'")
        errors = set(failed.scalars())
    assert errors == {"this row cannot be read: its aggregate_id is of another type than that of the column"}


async def claims(edited: Edited, limit: int, count: int, **options: Any) -> list[Claim]:
    """Return so many claims of the ordered lane, one after the other."""
    store = open_store(edited.outbox.settings.database, edited.outbox.tables)
    want = Want("ordered", "me", limit, ordered=True, **options)
    try:
        return [await store.claim(want) for _ in range(count)]
    finally:
        await store.close()


def numbers(claim: Claim) -> list[Any]:
    return [json.loads(delivery.payload or "")["n"] for delivery in claim.deliveries]


def spoil(edited: Edited, column: str, value: Any, *numbers_: int) -> None:
    """Spoil the rows of these events in the ordered lane."""
    with edited.unchecked() as connection:
        query = "SELECT id FROM outbox_event WHERE destination = 'ordered' ORDER BY position"
        ids = list(connection.exec_driver_sql(query).scalars())
        for number in numbers_:
            edited.change(connection, {column: value}, ids[number])


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_what_stands_behind_a_spoilt_row_of_its_key_is_not_handed_out_with_it(
    kind: str, fresh_database: Database
) -> None:
    edited = Edited(fresh_database(kind))
    edited.emit("Victim", 8, of_one=4)
    spoil(edited, "event_id", "garbage", 1)
    first, second = asyncio.run(claims(edited, 20, 2))
    assert (numbers(first), first.parked) == ([0, 4, 5, 6, 7], 1)
    assert (numbers(second), second.parked) == ([], 2)
    with edited.engine.begin() as connection:
        where = "WHERE destination = 'ordered' ORDER BY position"
        found = connection.exec_driver_sql(f"SELECT attempts, lease_token FROM outbox_event {where}")  # noqa: S608
        behind = [tuple(row) for row in found][2:4]
    assert behind == [(0, None)] * 2


def test_what_stands_behind_a_spoilt_row_that_is_skipped_is_handed_out_next(fresh_database: Database) -> None:
    edited = Edited(fresh_database("sqlite"))
    edited.emit("Victim", 4, of_one=4)
    spoil(edited, "event_id", "garbage", 0)
    first, second = asyncio.run(claims(edited, 20, 2, on_failed="skip"))
    assert (numbers(first), first.parked) == ([], 1)
    assert numbers(second) == [1, 2, 3]


@pytest.mark.parametrize("kind", ["sqlite", "mariadb"])
def test_one_claim_fails_no_more_spoilt_rows_than_it_asked_for(kind: str, fresh_database: Database) -> None:
    edited = Edited(fresh_database(kind))
    edited.emit("Victim", 4)
    spoil(edited, "event_id", "garbage", 0, 1, 2)
    *spoilt, last = asyncio.run(claims(edited, 1, 4))
    assert spoilt == [Claim(parked=1)] * 3
    assert numbers(last) == [3]


@pytest.mark.parametrize(("column", "value"), [("id", NOT_UTF8), ("id", BLOB), ("ordering_key", NOT_UTF8)])
@pytest.mark.parametrize("on_failed", ["block", "skip"])
def test_a_row_that_no_statement_can_name_does_not_hold_up_the_others(
    column: str, value: Any, on_failed: str, fresh_database: Database
) -> None:
    edited = Edited(fresh_database("sqlite"))
    edited.emit("Victim", 6, of_one=3)
    spoil(edited, column, value, 0)
    got = asyncio.run(claims(edited, 1, 6, on_failed=on_failed))
    assert got[0] == Claim(parked=1)
    blocked = column == "id" and on_failed == "block"
    assert [number for claim in got for number in numbers(claim)] == ([3] if blocked else [1, 3])


def test_a_head_that_no_statement_can_name_and_that_is_not_due_does_not_hold_up_the_others(
    fresh_database: Database,
) -> None:
    edited = Edited(fresh_database("sqlite"))
    edited.emit("Victim", 6, of_one=3)
    with edited.engine.begin() as connection:
        connection.exec_driver_sql(
            "UPDATE outbox_event SET id = CAST(x'ff80' AS TEXT), next_attempt_at = '2999-01-01' "
            "WHERE position = (SELECT MIN(position) FROM outbox_event WHERE destination = 'ordered')"
        )
    got = asyncio.run(claims(edited, 1, 4))
    assert [numbers(claim) for claim in got if claim.deliveries] == [[3]]


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        *((b"infinity", LATEST), (b"-infinity", EARLIEST), (b"0044-03-15 00:00:00+00 BC", EARLIEST)),
        (b"294276-12-31 00:00:00+00", LATEST),
        (b"2024-01-01 00:00:00+00", datetime(2024, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_time_beyond_the_calendar_is_read_as_its_nearer_end(text: bytes, moment: datetime) -> None:
    assert AnyTime(1184).load(text) == moment
