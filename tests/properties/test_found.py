"""What generated inputs found, each with the smallest one that shows it."""

from __future__ import annotations

import asyncio
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
from relaybox.codec import Limits, encode_payload
from relaybox.config import Settings
from relaybox.emit.row import Call, RowBuilder
from relaybox.errors import ConfigError, InvalidField, PayloadError
from relaybox.stores.dialects import SQLITE
from relaybox.stores.statements import INSERTED
from tests.properties.test_rows import Edited, check
from tests.properties.values import Both, HostileMapping, HostileObject, HostileText, HostileTimezone, Size

BUILDER = RowBuilder(Settings(destinations=[Destination("shop", "console:")], routes=[Route("*", to="shop")]))


def row(**options: Any) -> dict[str, Any]:
    """The row of an event with these arguments."""
    given = {
        "aggregate_type": "Order",
        "aggregate_id": 1,
        "event_type": "order.paid",
        "payload": 1,
        **options,
    }
    [values] = BUILDER.build(Call(**given), SQLITE).rows
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
def test_the_ends_of_the_calendar_may_be_asked_for(moment: str, fresh_database: Callable[[str], str]) -> None:
    url = fresh_database("sqlite")
    Outbox(url).migrate()
    for option in ("--since", "--until"):
        done = CliRunner().invoke(app, ["--database", url, "events", "list", option, moment])
        assert done.exit_code == (2 if "+14" in moment else 0), done.exception


@pytest.mark.parametrize("payload", [5, 1.0, 1e22, 3.141592653589793, -7])
def test_a_payload_that_is_a_bare_number_arrives_from_sqlite(
    payload: float, fresh_database: Callable[[str], str]
) -> None:
    url = fresh_database("sqlite")
    taken: list[Event] = []
    outbox = Outbox(url)
    outbox.handler("*", name="shop")(lambda event: taken.append(event))
    outbox.migrate()
    with closing(sqlite3.connect(sa.make_url(url).database or "")) as connection, connection:
        outbox.emit(connection, "Order", 1, "order.paid", payload)
        [stored] = connection.execute("SELECT payload FROM outbox_event").fetchone()
    outbox.drain()
    assert [event.payload for event in taken] == [payload]
    assert type(taken[0].payload) is type(payload)
    assert isinstance(stored, str)


SPOILT: list[tuple[str, str, Any]] = [
    ("sqlite", "event_id", "garbage"),
    ("sqlite", "id", "01a1df23-79f7-7316-9d80-f79a51f276dd"),
    ("sqlite", "attempts", "many"),
    ("sqlite", "position", "first"),
    ("sqlite", "payload", b"\xff"),
    ("sqlite", "created_at", "yesterday"),
    ("sqlite", "attempts", -5),
    ("sqlite", "headers", "{"),
    ("sqlite", "status", "archived"),
    ("sqlite", "destination", b"\xff"),
    ("mariadb", "event_id", "garbage"),
    ("mariadb", "attempts", -5),
    ("mariadb", "headers", "{"),
    ("mariadb", "created_at", "0000-00-00 00:00:00"),
    ("postgresql-18", "created_at", "infinity"),
    ("postgresql-18", "attempts", 2**31 - 1),
    ("postgresql-18", "headers", "5"),
]


@pytest.mark.parametrize(("kind", "column", "value"), SPOILT)
def test_a_lane_goes_on_behind_a_row_that_somebody_spoilt(
    kind: str, column: str, value: Any, module_database: Callable[[str], str], outboxes: dict[str, Edited]
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
    """One for each kind of database."""
    return {}


def test_a_text_that_is_not_utf8_in_sqlite_fails_its_own_delivery_only(
    fresh_database: Callable[[str], str],
) -> None:
    edited = Edited(fresh_database("sqlite"))
    victims: list[UUID] = edited.emit("Victim", 1)
    with edited.engine.begin() as connection:
        connection.exec_driver_sql("UPDATE outbox_event SET aggregate_id = CAST(x'ff' AS TEXT)")
    asyncio.run(check(edited, victims))
    with edited.engine.begin() as connection:
        failed = connection.exec_driver_sql("SELECT error_message FROM outbox_event WHERE status = 'failed'")
        errors = set(failed.scalars())
    assert errors == {"this row cannot be read: its aggregate_id is of another type than that of the column"}
