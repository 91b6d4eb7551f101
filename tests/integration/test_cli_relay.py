"""``relaybox relay``, ``drain`` and ``prune``: real processes, their logs, and how they end."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox import Destination, Route
from tests.databases import KINDS
from tests.integration.project import Project
from tests.integration.shop import Shop

APP = """
import time
from relaybox import Event, Outbox, Reject, Retry

outbox = Outbox()

SOON = {"poll_interval": "50ms", "backoff": {"base": "50ms"}}

@outbox.handler("order.*", name="on_order", ordered=True, retention="1d", **SOON)
def on_order(event: Event) -> None:
    number = event.payload["n"]
    if number < 0:
        with open("hanging", "w") as file:
            file.write("yes")
        time.sleep(-number)
    if number == 13:
        raise Reject("unlucky")
    if number == 7 and event.attempt == 1:
        raise Retry("once more")
    with open("arrived", "a") as file:
        file.write(f"{number}\\n")
"""
on_each_kind = pytest.mark.parametrize("shop", KINDS, indirect=True)
START = "relaybox 0.1.0 relays from "
LEVELS = ("info   ", "warning", "error  ")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    project = Project(tmp_path)
    project.write("shop.py", APP)
    return project


@pytest.fixture(params=["postgresql-18", "sqlite"])
def shop(
    request: pytest.FixtureRequest, project: Project, migrated_database: Callable[[str], str]
) -> Iterator[Shop]:
    """Yield a shop that emits into the database of the project's relay."""
    url = migrated_database(request.param)
    project.write("relaybox.toml", f'[relaybox]\ndatabase = "{url}"\napp = "shop:outbox"\n')
    shop = Shop(url)
    shop.outbox.handler("order.*", name="on_order", ordered=True)(print)
    yield shop
    shop.engine.dispose()


def test_a_relay_delivers_and_stops_when_asked(shop: Shop, project: Project) -> None:
    with project.running("relay") as relay:
        project.until(lambda: START in project.read("log"))
        shop.emit(20, keys=20)
        project.until(lambda: len(project.lines("arrived")) == 19)
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(60) == 0
    log = project.lines("log")
    assert f", as {socket.gethostname()}:{relay.pid}:" in log[0]
    assert "on_order (handler:shop:on_order)" in log[0]
    assert all(line[4] == "-" and line[19] == "." and line[24:31] in LEVELS for line in log)
    text = "\n".join(log)
    assert "again in " in text
    assert "(attempt 1 of 5): once more" in text
    assert "failed order.paid of Order 13 (attempt 1 of 5): unlucky; see `relaybox why " in text
    assert "stopping (SIGTERM): no more is claimed, what is being sent has 30 s" in text
    assert "on_order  delivered 1" in text
    assert log[-1].endswith(": delivered 19, retried 1, failed 1")
    assert shop.leases() == 0
    assert shop.states() == {"delivered": 19, "failed": 1}


@pytest.mark.parametrize(
    ("command", "number", "takes", "within", "status", "state"),
    [
        ("relay", signal.SIGINT, 1, 60, 0, "delivered"),
        ("relay --patience 100ms", signal.SIGTERM, 3600, 60, 0, "pending"),
        # By default it would wait 30 s.
        ("drain --patience 100ms", signal.SIGTERM, 3600, 25, 1, "pending"),
    ],
)
def test_what_is_being_sent_has_the_patience_and_is_then_given_back(
    command: str, number: int, takes: int, within: int, status: int, state: str, shop: Shop, project: Project
) -> None:
    shop.emit(1, first=-takes)
    with project.running(*command.split()) as process:
        project.until(lambda: bool(project.read("hanging")))
        process.send_signal(number)
        assert process.wait(within) == status
    assert project.lines("arrived") == (["-1"] if state == "delivered" else [])
    assert (shop.leases(), shop.states()) == (0, {state: 1})


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_second_signal_ends_it(number: signal.Signals, status: int, shop: Shop, project: Project) -> None:
    shop.emit(1, first=-3600)
    with project.running("relay") as relay:
        project.until(lambda: bool(project.read("hanging")))
        relay.send_signal(signal.SIGTERM)
        project.until(lambda: "stopping (SIGTERM)" in project.read("log"))
        relay.send_signal(number)
        # The event hangs for longer than that.
        assert relay.wait(60) == status
    assert f"left at once ({number.name})" in project.read("log")
    assert shop.leases() == 1


def test_a_log_for_programs_is_one_object_a_line(shop: Shop, project: Project) -> None:
    shop.emit(20, keys=20)
    with project.running("relay", "--log-format", "json") as relay:
        project.until(lambda: len(project.lines("arrived")) == 19)
        relay.terminate()
        assert relay.wait(60) == 0
    log = [json.loads(line) for line in project.lines("log")]
    events = {entry["event"]: entry for entry in log}
    assert list(log[0]) == [
        *("time", "level", "logger", "message"),
        *("event", "version", "database", "name", "destinations"),
    ]
    assert events["started"]["destinations"] == {"on_order": "handler:shop:on_order"}
    assert events["failed"]["error"] == "unlucky"
    assert events["failed"]["level"] == "error"
    assert events["stopping"]["signal"] == "SIGTERM"
    stopped = events["stopped"]
    assert (stopped["delivered"], stopped["retried"], stopped["failed"]) == (19, 1, 1)


def test_one_round_is_one_batch(shop: Shop, project: Project) -> None:
    shop.emit(150, keys=150, first=100)
    project.run("relay", "--once")
    assert len(project.lines("arrived")) == 100
    assert shop.states() == {"delivered": 100, "pending": 50}
    assert shop.leases() == 0


def test_drain_delivers_what_is_due_and_says_what_it_did(shop: Shop, project: Project) -> None:
    shop.emit(150, keys=150)
    headings, row = (line.split() for line in project.run("drain").splitlines())
    assert headings == ["DESTINATION", "DELIVERED", "RETRIED", "FAILED"]
    # What is to be tried again may be due before the end.
    assert row in (["on_order", "148", "1", "1"], ["on_order", "149", "1", "1"])
    project.until(lambda: "7" in (project.run("drain"), project.lines("arrived"))[1])
    assert shop.states() == {"delivered": 149, "failed": 1}
    nothing = {"delivered": 0, "retried": 0, "failed": 0}
    assert json.loads(project.run("drain", "--json")) == {
        **nothing,
        "destinations": {"on_order": {**nothing, "held": None}},
    }


def test_what_waits_without_a_reason_is_delivered_by_a_drain(shop: Shop, project: Project) -> None:
    shop.emit(2, keys=2)
    with shop.engine.begin() as connection:
        connection.execute(sa.update(shop.outbox.tables.event).values(next_attempt_at=None))
    assert json.loads(project.run("drain", "--json"))["delivered"] == 2
    assert shop.states() == {"delivered": 2}


def test_an_operators_pause_is_reported_by_a_drain_and_seen_in_the_log(shop: Shop, project: Project) -> None:
    shop.emit(1)
    project.run("pause", "on_order", "--reason", "maintenance")
    assert "on_order: paused: maintenance\n" in project.run("drain")
    assert json.loads(project.run("drain", "--json"))["destinations"]["on_order"]["held"] == "paused"
    assert shop.states() == {"pending": 1}
    with project.running("relay") as relay:
        project.until(lambda: "on_order  paused: maintenance; go on with" in project.read("log"))
        project.run("resume", "on_order")
        project.until(lambda: "on_order  resumed after " in project.read("log"))
        relay.terminate()
        assert relay.wait(60) == 0


def test_no_secret_appears_in_a_log(project: Project, migrated_database: Callable[[str], str]) -> None:
    url = migrated_database("sqlite")
    project.write(
        "relaybox.toml",
        f'[relaybox]\ndatabase = "{url}"\n[destinations.runner]\n'
        'sink = "http://me:hush1@127.0.0.1:1/events?token=hush2"\nallow = ["127.0.0.0/8"]\n'
        'secret = "env:SIGNING"\n[[routes]]\nevents = "*"\nto = "runner"\n',
    )
    shop = Shop(url, destinations=[Destination("runner", "memory:")], routes=[Route("order.*", to="runner")])
    shop.emit(3)
    with project.running("relay", "--log-level", "debug", SIGNING="hush3hush3hush3hush3hush3") as relay:
        project.until(lambda: "runner  circuit open: cannot connect to 127.0.0.1:1" in project.read("log"))
        relay.terminate()
        assert relay.wait(60) == 0
    log = project.read("log")
    assert "runner (http://***@127.0.0.1:1/***?***)" in log
    assert "hush" not in log
    shown = project.run("config", "show", "--all", SIGNING="hush3hush3hush3hush3hush3")
    assert 'secret = "env:SIGNING"' in shown
    assert "hush" not in shown


def test_trouble_with_the_database_is_reported_when_it_begins_and_ends(shop: Shop, project: Project) -> None:
    def rename(before: str, after: str) -> None:
        with shop.engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER TABLE {before} RENAME TO {after}")

    with project.running("relay") as relay:
        project.until(lambda: START in project.read("log"))
        rename("outbox_event", "elsewhere")
        project.until(lambda: "database  cannot claim, trying again: " in project.read("log"))
        rename("elsewhere", "outbox_event")
        project.until(lambda: "database  answers again, after " in project.read("log"))
        shop.emit(1)
        project.until(lambda: project.lines("arrived") == ["0"])
        relay.terminate()
        assert relay.wait(60) == 0
    assert project.read("log").count("database  cannot claim") == 1


@on_each_kind
def test_what_was_kept_long_enough_is_removed(shop: Shop, project: Project) -> None:
    event = shop.outbox.tables.event
    shop.emit(3)
    project.run("drain")
    assert project.run("prune") == "removed 0\n"
    with shop.engine.begin() as connection:
        oldest = sa.select(sa.func.min(event.c.position)).scalar_subquery()
        first = connection.scalar(sa.select(event.c.id).where(event.c.position == oldest))
        long_ago = sa.text("'2020-01-01 00:00:00'")
        connection.execute(event.update().where(event.c.id == first).values(delivered_at=long_ago))
    assert json.loads(project.run("prune", "--json")) == {"removed": 1}
    assert shop.states() == {"delivered": 2}


@on_each_kind
def test_the_inbox_forgets_what_is_older_than_its_window(shop: Shop, project: Project) -> None:
    inbox, toml = shop.outbox.tables.inbox, project.read("relaybox.toml")
    project.write("relaybox.toml", toml.replace("[relaybox]", '[relaybox]\ninbox_window = "2h"'))
    with shop.engine.begin() as connection:
        for hours in (1, 3):
            values = {"consumer": "billing", "message_id": str(hours)}
            then = datetime.now(UTC) - timedelta(hours=hours)
            connection.execute(inbox.insert().values(**values, processed_at=then))
    assert project.run("prune") == "removed 1\n"
    with shop.engine.connect() as connection:
        assert list(connection.scalars(sa.select(inbox.c.message_id))) == ["1"]


@on_each_kind
def test_a_key_is_kept_for_the_idempotency_window(shop: Shop, project: Project) -> None:
    keys, toml = shop.outbox.tables.idempotency, project.read("relaybox.toml")
    project.write("relaybox.toml", toml.replace("[relaybox]", '[relaybox]\nidempotency_window = "2h"'))
    with shop.engine.begin() as connection:
        for hours in (1, 4):
            values = {"event_type": "order.paid", "idempotency_key": str(hours), "event_id": uuid4()}
            then = datetime.now(UTC) - timedelta(hours=hours)
            connection.execute(keys.insert().values(**values, created_at=then))
    assert project.run("prune") == "removed 1\n"
    with shop.engine.connect() as connection:
        assert list(connection.scalars(sa.select(keys.c.idempotency_key))) == ["1"]


@on_each_kind
def test_while_a_relay_leads_it_is_the_relays_to_prune(shop: Shop, project: Project) -> None:
    leader = shop.outbox.tables.leader

    def leads() -> bool:
        with shop.engine.connect() as connection:
            return bool(connection.scalar(sa.select(sa.func.count()).select_from(leader)))

    with project.running("relay"):
        project.until(leads)
        assert project.run("prune") == "a relay leads, and sees to it\n"
