"""Debezium's own engine reads what was emitted to it, as ``relaybox debezium`` configures it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relaybox import Call, Destination, Outbox, Route
from tests import databases
from tests.conftest import available
from tests.integration.project import Project
from tests.servers import postgres, postgres15, postgres18
from tests.servers.debezium import Engine, Record, engine
from tests.waiting import wait_for

pytestmark = pytest.mark.full

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
SERVERS = {"postgresql-18": postgres18.server, "postgresql-15": postgres15.server}
TABLES: dict[str, dict[str, str]] = {"postgresql-18": {"schema": "Shop", "prefix": "X_"}, "postgresql-15": {}}
TOML = """
[relaybox]
database = "{url}"
{tables}

[destinations."o'rders"]
sink = "debezium:"

[destinations.mail]
sink = "memory:"
ordered = true

[[routes]]
events = "*"
to = ["o'rders", "mail"]
"""


class Story:
    """An outbox that Debezium is set up for, and what was read of it, part by part."""

    def __init__(self, url: str, directory: Path, **tables: str) -> None:
        self.url = url
        self.project = Project(directory)
        named = "\n".join(f'{name} = "{value}"' for name, value in tables.items())
        self.project.write("relaybox.toml", TOML.format(url=url, tables=named))
        both = [Destination("o'rders", "debezium:"), Destination("mail", "memory:", ordered=True)]
        self.outbox = Outbox(url, destinations=both, routes=[Route("*", to=["o'rders", "mail"])], **tables)
        self.outbox.migrate()
        self.directory = directory
        self.ids: dict[str, list[str]] = {}
        self.parts: dict[str, list[Record]] = {}
        self.forgotten = False

    def set_up(self) -> None:
        """Do what an operator does: what is printed, the slot in a transaction of its own."""
        before, select, slot = self.project.run("debezium", "--sql").rpartition("SELECT")
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(before)
            connection.execute(select + slot)

    @contextmanager
    def engine(self) -> Iterator[Engine]:
        """Run the connector that is printed, with heartbeats that come sooner."""
        printed = json.loads(self.project.run("debezium", "o'rders"))
        sooner = {"heartbeat.interval.ms": "300", "database.password": "x"}
        with engine(printed["config"] | sooner, self.directory) as running:
            yield running

    def emit(self, *calls: Call) -> list[str]:
        with psycopg.connect(self.url) as connection:
            return [str(emitted.event_id) for emitted in self.outbox.emit_many(connection, calls)]

    def read(self, part: str, running: Engine, count: int) -> None:
        """Read so many records; fail if there are fewer."""
        self.parts[part] = running.records(count)
        assert len(self.parts[part]) == count, running.errors()

    def execute(self, sql: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.url) as connection:
            cursor = connection.execute(sql)
            return cursor.fetchall() if cursor.description else []

    def forget(self) -> None:
        """Remove all that Debezium is to read, as retention does."""
        event = self.outbox.tables.event
        with databases.engine(self.url).begin() as connection:
            connection.execute(sa.delete(event).where(event.c.destination == "o'rders"))

    def position(self, which: str) -> int:
        """Return how far the log or the slot is, in bytes."""
        [[position]] = self.execute(f"SELECT {which} - '0/0'::pg_lsn")
        return int(position)


def order(n: int, payload: Any = None, **options: Any) -> Call:
    return Call("Order", n, "order.paid.v2", {"n": n} if payload is None else payload, **options)


def invoice(n: int, **options: Any) -> Call:
    return Call("Invoice", f"i-{n}", "invoice.sent", {"n": n}, **options)


def interleaved(story: Story) -> list[str]:
    """Two transactions: what is emitted first is committed last."""
    with psycopg.connect(story.url) as late, psycopg.connect(story.url) as early:
        first = story.outbox.emit_many(late, [order(30), invoice(31)])
        second = story.outbox.emit_many(early, [order(32)])
        early.commit()
        late.commit()
    return [str(emitted.event_id) for emitted in (*second, *first)]


def rolled_back(story: Story) -> None:
    with psycopg.connect(story.url) as connection:
        story.outbox.emit_many(connection, [order(40), invoice(41)])
        connection.rollback()


def first_life(story: Story) -> None:
    """Start the engine when two events are committed already, and stop it in order."""
    story.ids["early"] = story.emit(order(1), invoice(2))
    with story.engine() as running:
        story.read("early", running, 2)
        carried = {"headers": {"traceparent": TRACE, "who": "Zoë"}, "tenant": "acme"}
        story.ids["carried"] = story.emit(order(3, {"a": [1, "ü", None], "b": {}}, **carried))
        story.emit(order(4, destinations=["mail"]))
        rolled_back(story)
        story.ids["keys"] = story.emit(order(5, key="own"), order(6, key=None), order(7, [1]), order(8, "x"))
        story.ids["interleaved"] = interleaved(story)
        story.ids["many"] = story.emit(*(order(n) for n in range(100, 300)))
        story.outbox.drain()
        story.project.run("replay", story.ids["early"][0], "--destination", "o'rders", "--yes")
        story.forget()
        story.ids["last"] = story.emit(invoice(9))
        counts = {"carried": 1, "keys": 4, "interleaved": 3, "many": 200, "replayed": 1, "last": 1}
        for part, count in counts.items():
            story.read(part, running, count)
        story.execute("CREATE TABLE other AS SELECT generate_series(1, 10000) AS n")
        written = story.position("pg_current_wal_lsn()")
        confirmed = "(SELECT confirmed_flush_lsn FROM pg_replication_slots)"
        story.forgotten = wait_for(lambda: story.position(confirmed) >= written, "the log is confirmed")
        running.stop()


def later_lives(story: Story) -> None:
    """Start it again: after a stop it goes on exactly, after a crash with what it had not noted."""
    story.ids["away"] = story.emit(order(10), invoice(11), order(12))
    with story.engine() as running:
        story.read("away", running, 3)
        running.kill()
    story.ids["crashed"] = story.emit(order(13))
    with story.engine() as running:
        story.parts["crashed"] = []
        while story.ids["crashed"][0] not in event_ids(story.parts["crashed"]):
            more = running.records(1)
            assert more, running.errors()
            story.parts["crashed"] += more


@contextmanager
def recorded(kind: str, directory: Path) -> Iterator[Story]:
    """Record the whole story, on a server of its own."""
    with SERVERS[kind](own=postgres.LOGICAL) as url:
        story = Story(url, directory, **TABLES[kind])
        story.set_up()
        first_life(story)
        if kind == "postgresql-18":
            later_lives(story)
        yield story


SLOW = [pytest.param(kind, marks=pytest.mark.full) for kind in SERVERS]
on_the_newest = pytest.mark.parametrize("story", SLOW[:1], indirect=True)


@pytest.fixture(scope="module", params=SLOW)
def story(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    with available("Debezium", recorded(request.param, tmp_path_factory.mktemp("debezium"))) as story:
        yield story


def event_ids(records: list[Record]) -> list[str]:
    return [record["headers"]["event-id"] for record in records]


def test_what_was_committed_before_it_started_is_read(story: Story) -> None:
    assert event_ids(story.parts["early"]) == story.ids["early"]


def test_a_topic_for_each_type_of_aggregate_and_its_id_for_the_key(story: Story) -> None:
    first, second = story.parts["early"]
    assert (first["topic"], first["key"], json.loads(first["value"])) == ("Order-events", "1", {"n": 1})
    assert (second["topic"], second["key"]) == ("Invoice-events", "i-2")
    assert json.loads(second["value"]) == {"n": 2}


def test_the_headers_say_which_event_it_is_and_carry_its_own(story: Story) -> None:
    [record] = story.parts["carried"]
    [event_id] = story.ids["carried"]
    own = json.loads(record["headers"].pop("headers"))
    assert own == {"traceparent": TRACE, "who": "Zoë", "tenant": "acme"}
    assert record["headers"] == {
        "id": event_id,
        "event-id": event_id,
        "event-type": "order.paid.v2",
        "aggregate-type": "Order",
        "aggregate-id": "3",
    }
    assert json.loads(record["value"]) == {"a": [1, "ü", None], "b": {}}


def test_a_key_may_be_given_and_a_payload_be_any_json(story: Story) -> None:
    assert [record["key"] for record in story.parts["keys"]] == ["own", None, "7", "8"]
    assert [json.loads(record["value"]) for record in story.parts["keys"]] == [{"n": 5}, {"n": 6}, [1], "x"]


def test_events_come_in_the_order_of_their_commits(story: Story) -> None:
    assert event_ids(story.parts["interleaved"]) == story.ids["interleaved"]
    assert event_ids(story.parts["many"]) == story.ids["many"]


def test_nothing_comes_that_was_rolled_back_or_is_for_another_destination(story: Story) -> None:
    everything = [record["headers"]["aggregate-id"] for part in story.parts.values() for record in part]
    assert not {"4", "40", "i-41"} & set(everything)


def test_a_replay_is_the_same_event_with_a_mark(story: Story) -> None:
    [record] = story.parts["replayed"]
    assert record["headers"]["event-id"] == story.ids["early"][0]
    assert json.loads(record["headers"]["headers"]) == {"relaybox-replay": story.ids["early"][0]}
    assert (record["key"], record["topic"]) == ("1", "Order-events")


def test_rows_may_be_removed_at_once_and_the_log_is_confirmed_while_nothing_is_emitted(story: Story) -> None:
    assert event_ids(story.parts["last"]) == story.ids["last"]
    assert story.forgotten


def test_a_check_finds_what_was_set_up(story: Story) -> None:
    assert "no slot" not in story.project.run("config", "check")


@on_the_newest
def test_it_goes_on_where_it_was_stopped(story: Story) -> None:
    assert event_ids(story.parts["away"]) == story.ids["away"]


@on_the_newest
def test_after_a_crash_nothing_is_missing(story: Story) -> None:
    *again, last = event_ids(story.parts["crashed"])
    assert [last] == story.ids["crashed"]
    assert again == story.ids["away"][len(story.ids["away"]) - len(again) :]
