"""What Debezium is handed, without a database: settings, rows, the connector and what is refused."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from relaybox.core.settings import Destination, Route, Settings
from relaybox.database.debezium import connector, find, statements
from relaybox.database.dialects import MARIADB, MYSQL, POSTGRESQL, SQLITE, Dialect
from relaybox.database.statements.delivery import INSERTED
from relaybox.emit.row import Call, RowBuilder
from relaybox.errors import ConfigError, InvalidField, PayloadError
from relaybox.operate.why import explain
from relaybox.relay.upkeep.route import StoredRouter
from relaybox.stores.upkeep import StoredEvent, Target
from tests.unit.deliveries import entry

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)
POSTGRES = "postgresql://shop:secret@db.example:5433/shop"
MAIL = Destination("mail", "console:")


def by_customer(call: Call) -> str | None:
    return call.payload["customer"] and str(call.payload["customer"])


def settings(*destinations: Destination, database: str = POSTGRES, **others: Any) -> Settings:
    every = destinations or (Destination("cdc", "debezium:"), MAIL)
    names = [destination.name for destination in every]
    return Settings(database, every, [Route("order.*", to=names)], **others)


def built(call: Call, given: Settings, dialect: Dialect = POSTGRESQL) -> list[dict[str, Any]]:
    """Return the rows for Debezium."""
    rows = RowBuilder(given).build(call, dialect).handed_over
    return [dict(zip(INSERTED, row, strict=True)) for row in rows]


def key(call: Call, **options: Any) -> str | None:
    [row] = built(call, settings(Destination("cdc", "debezium://", **options)))
    found: str | None = row["ordering_key"]
    return found


def test_its_rows_stand_apart_from_those_of_relays() -> None:
    emission = RowBuilder(settings()).build(Call("Order", 7, "order.paid", {"n": 1}), POSTGRESQL)
    assert emission.destinations == ("cdc", "mail")
    assert [row[2] for row in emission.handed_over] == ["cdc"]
    assert [row[2] for row in emission.rows] == ["mail"]
    assert emission.handed_over[0][0] == str(emission.event_id)


def test_the_key_is_that_of_a_message() -> None:
    order = Call("Order", 7, "order.paid", {"customer": 3}, tenant="acme")
    assert key(order) == "7"
    assert key(order, ordered=True) == "7"
    assert key(order, ordering="tenant") == "acme"
    assert key(order, ordering="event_type") == "order.paid"
    assert key(order, ordering="none") is None
    assert key(order, ordering=by_customer) == "3"
    assert key(Call("Order", 7, "order.paid", {}, key="mine")) == "mine"
    assert key(Call("Order", 7, "order.paid", {}, key=None)) is None
    assert len(key(Call("Order", 7, "order.paid", {}, key="k" * 1000)) or "") == 255
    with pytest.raises(InvalidField, match="tenant=None: destination 'cdc'"):
        key(Call("Order", 7, "order.paid", {}), ordering="tenant")


@pytest.mark.parametrize("dialect", [SQLITE, MYSQL, MARIADB])
def test_another_database_has_no_log_for_it(dialect: Dialect) -> None:
    with pytest.raises(ConfigError, match=f"'cdc': sink = 'debezium:' needs PostgreSQL.*is {dialect.name}"):
        built(Call("Order", 7, "order.paid", {}), settings(), dialect)
    only_mail = Call("Order", 7, "order.paid", {}, destinations=["mail"])
    assert built(only_mail, settings(), dialect) == []


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (Call("Order", 7, "order.paid", b"\0"), PayloadError, "'cdc' is read by Debezium, which sends JSON"),
        (Call("An order", 7, "order.paid", {}), InvalidField, "aggregate_type='An order'.*makes a topic"),
        (Call("Order", 7, "order.paid", {}, deliver_at=NOON), InvalidField, "deliver_at=.*as soon as"),
        (Call("Order", 7, "order.paid", {}, key=""), InvalidField, "key=''"),
    ],
)
def test_what_a_connector_would_choke_on_is_refused(call: Call, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        built(call, settings())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sink": "debezium://connect:8083"}, "sink = 'debezium://connect:8083': write 'debezium:' alone"),
        ({"options": {"slot": "x"}}, "options: a debezium destination has none"),
        ({"format": "cloudevents"}, "format: Debezium sends the bare payload"),
        ({"dead_letter": "mail"}, "dead_letter: nothing fails here"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"destination 'cdc': {message}"):
        Destination("cdc", **{"sink": "debezium:", **options})


def test_it_takes_no_dead_letters() -> None:
    with pytest.raises(ConfigError, match="'mail': dead_letter = 'cdc': Debezium takes only what is emitted"):
        settings(Destination("cdc", "debezium:"), Destination("mail", "console:", dead_letter="cdc"))


def waiting(payload: str | None = "{}", **changes: Any) -> StoredEvent:
    data = (None, None) if payload is not None else (b"\0", "binary")
    event = StoredEvent(UUID(int=1), "Order", "7", "order.paid", payload, *data, "{}", None, "1", 5, False)
    return replace(event, **changes)


def test_an_event_that_was_stored_without_a_route_is_handed_over_too() -> None:
    router = StoredRouter(settings())
    assert list(router.targets(waiting())) == [Target("cdc", "7", 5, final=True), Target("mail", None, 5)]
    assert list(router.targets(waiting(scheduled=True))) == []
    with pytest.raises(PayloadError, match="'cdc' is read by Debezium"):
        router.targets(waiting(None))


def test_the_connector_reads_the_destination_of_this_outbox() -> None:
    made = connector(settings(schema="Shop", prefix="x_"), find(settings()))
    config = made["config"]
    assert all(isinstance(value, str) for value in config.values())
    assert "secret" not in str(made)
    database = {"hostname": "db.example", "port": "5433", "dbname": "shop", "user": "relaybox_debezium"}
    assert {name: config[f"database.{name}"] for name in database} == database
    assert config["table.include.list"] == r"Shop\.x_outbox_event"
    assert made["name"] == config["slot.name"] == config["publication.name"] == config["topic.prefix"]
    assert config["publication.autocreate.mode"] == "disabled"
    router = {
        "type": "io.debezium.transforms.outbox.EventRouter",
        "table.field.event.id": "event_id",
        "table.field.event.key": "ordering_key",
        "route.by.field": "aggregate_type",
        "route.topic.replacement": "${routedByValue}-events",
    }
    assert {name: config[f"transforms.outbox.{name}"] for name in router} == router


def test_without_a_schema_the_publication_knows_the_table_and_a_tls_mode_goes_along() -> None:
    given = settings(database=f"{POSTGRES}?sslmode=verify-full")
    config = connector(given, find(given))["config"]
    assert config["table.include.list"] == r"[^.]+\.outbox_event"
    assert config["slot.name"] == "relaybox_cdc"
    assert config["database.sslmode"] == "verify-full"


def test_the_sql_quotes_what_it_names_and_two_destinations_never_share_a_slot() -> None:
    given = settings(Destination("o'Neil", "debezium:"), schema="Shop", prefix="x_")
    *_, publication, slot = statements(given, find(given))
    table = """FOR TABLE "Shop"."x_outbox_event" WHERE (destination = 'o''Neil')"""
    assert table in publication
    assert publication.endswith("WITH (publish = 'insert')")
    assert slot.startswith("SELECT pg_create_logical_replication_slot('relaybox_shop_x__o_neil_")
    assert """GRANT USAGE ON SCHEMA "Shop" TO "relaybox_debezium\"""" in statements(given, find(given))
    names = ["a-b", "a_b", "A_b", "a.b", "n" * 90, "n" * 91]
    given = settings(*(Destination(name, "debezium:") for name in names))
    slots = {connector(given, find(given, name))["config"]["slot.name"] for name in names}
    assert len(slots) == len(names)
    assert all(len(slot) <= 63 for slot in slots)


@pytest.mark.parametrize(
    ("destinations", "name", "message"),
    [
        ((), "cdx", "no destination is called 'cdx'; did you mean 'cdc'?"),
        ((), "mail", r"destination = 'mail': a relay sends to it \(console:\)"),
        ((MAIL,), None, "no destination is Debezium's: write sink = 'debezium:'"),
        (
            (Destination("a", "debezium:"), Destination("b", "debezium:")),
            None,
            "several destinations are Debezium's: name one of a, b",
        ),
    ],
)
def test_which_one_is_said_or_asked_for(
    destinations: tuple[Destination, ...], name: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        find(settings(*destinations), name)


@pytest.mark.parametrize("database", ["mysql://db/shop", "sqlite:///shop.db"])
def test_there_is_no_connector_for_another_database(database: str) -> None:
    with pytest.raises(ConfigError, match="'cdc': sink = 'debezium:' needs PostgreSQL"):
        find(settings(database=database))


ENTRY = entry(
    NOON, destination="cdc", status="delivered", delivered_at=NOON, seen_at=NOON + timedelta(hours=1)
)


@pytest.mark.parametrize(
    ("changes", "kind", "text"),
    [
        ({}, "handed_over", "written to the WAL with its transaction, and Relaybox does not know when"),
        ({"status": "pending", "delivered_at": None}, "not_relayed", "`relaybox move cdc NAME`"),
        ({"attempts": 1}, "delivered", "was delivered at 2026-01-01 12:00:00 UTC, 1 attempt in all"),
    ],
)
def test_why_says_what_is_known(changes: dict[str, Any], kind: str, text: str) -> None:
    reason = explain(replace(ENTRY, **changes), {}, {"cdc"}, [], handed_over={"cdc"})
    assert reason.kind == kind
    assert text in reason.text
