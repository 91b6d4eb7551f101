"""``manage.py outbox``, from the shell and from Python."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test import override_settings

from relaybox.contrib.django.outbox import get_outbox
from relaybox.contrib.django.signals import event_delivered, event_failed
from tests.django import workers
from tests.django.conftest import Live, is_alone
from tests.django.shop.models import Receipt
from tests.django.steps import command, events, place
from tests.waiting import wait_for

OUTBOX = ("django", "outbox")
NOWHERE = "01890000-0000-7000-8000-000000000000"
ONLY_HANDLERS = {"DISPATCH": "none"}


def manage(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return workers.run(workers.environment({"default": url}), "-m", *OUTBOX, *arguments)


def test_operators_work_on_djangos_own_connection(using: str) -> None:
    emitted = place(using)
    deliveries = json.loads(command("events", "list", "--json", "--using", using))["events"]

    assert [one["event_id"] for one in deliveries] == [str(emitted.event_id)]
    assert "(order.placed for memory)" in command("why", str(emitted.event_id), using=using)
    assert "claimed by a Celery worker, at the latest" in command("why", str(emitted.event_id), using=using)
    assert "no relay runs; what is due is claimed by a Celery worker" in command("status", using=using)
    with override_settings(OUTBOX={"DISPATCH": "relay"}):
        assert "`manage.py outbox relay`" in command("why", str(emitted.event_id), using=using)
        assert "start one with `manage.py outbox relay`" in command("status", using=using)
    assert command("pause", "memory", "--using", using) == "paused memory\n"
    assert "`manage.py outbox resume memory`" in command("why", str(emitted.event_id), using=using)
    assert command("discard", str(emitted.event_id), using=using) == "discarded 1\n"
    assert events(using).get().status == "discarded"


def test_what_a_consumer_recorded_is_verified(using: str, tmp_path: Path) -> None:
    emitted = place(using)
    recorded = tmp_path / "recorded"
    recorded.write_text(json.dumps({"id": str(emitted.event_id), "data": {"number": 1}}))
    document = json.loads(command("verify", "memory", str(recorded), "--json", "--using", using))
    assert (document["ok"], document["events"], document["payloads"]) == (True, 1, 1)
    recorded.write_text(json.dumps({"id": str(emitted.event_id), "data": {"number": 2}}))
    with pytest.raises(CommandError, match="ended with status 1"):
        command("verify", "memory", str(recorded), using=using)


def test_a_status_that_is_not_0_is_a_command_error(using: str) -> None:
    stderr = StringIO()
    with pytest.raises(CommandError, match="ended with status 1") as raised:
        command("why", NOWHERE, using=using, stderr=stderr)

    assert raised.value.returncode == 1
    assert f"no event and no delivery has the id {NOWHERE}" in stderr.getvalue()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["status", "--using", "defualt"], "no database has this name; did you mean 'default'"),
        (["drain", "--using", "defualt"], "did you mean 'default'"),
        (["migrate"], "run `manage.py migrate relaybox`"),
        (["why", "x"], "as `manage.py outbox events list` prints it"),
        (["drain", "--patience", "long"], "--patience = 'long'"),
    ],
)
def test_what_is_wrong_is_one_line_and_the_status_2(arguments: list[str], said: str) -> None:
    with override_settings(OUTBOX=ONLY_HANDLERS), pytest.raises(CommandError) as raised:
        command(*arguments)

    assert said in str(raised.value)
    assert (raised.value.returncode, "\n" in str(raised.value)) == (2, False)


def test_wrong_settings_are_one_line() -> None:
    with (
        override_settings(OUTBOX={"DISPATCHER": "x"}),
        pytest.raises(CommandError, match="did you mean 'DISPATCH'"),
    ):
        command("status")


def test_wrong_usage_and_commands_that_make_no_sense_here_are_refused() -> None:
    for arguments in (["init"], ["demo"], ["status", "--database", "x"], ["sql", "--prefix", "x"]):
        with pytest.raises(CommandError) as raised:
            command(*arguments, stderr=StringIO())
        assert raised.value.returncode == 2


def test_the_help_speaks_of_manage_py() -> None:
    help_ = command("--help")
    assert help_.startswith("Usage: manage.py outbox [OPTIONS] COMMAND")
    assert "--using ALIAS" in help_
    assert not any(word in help_ for word in ("--database", "--config", "--app", "relaybox.toml", "demo"))
    assert command("events", "--help").startswith("Usage: manage.py outbox events")


def test_missing_tables_are_reported_with_djangos_command(
    using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.contrib.django.tables.recorded_version", lambda connection: None)
    with pytest.raises(CommandError, match=r"the tables are missing: run `manage\.py migrate relaybox"):
        command("status", using=using)


def test_without_destinations_the_settings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaybox.contrib.django.conf.registered", {})
    monkeypatch.setattr("relaybox.contrib.django.conf.implicit", lambda *_: [])
    with override_settings(OUTBOX={}), pytest.raises(CommandError, match=r"OUTBOX\['DESTINATIONS'\]"):
        command("drain", "--using", "default")


def test_the_configuration_is_the_projects() -> None:
    with override_settings(OUTBOX={"DESTINATIONS": {"there": {"sink": "memory:", "ordered": True}}}):
        shown = json.loads(command("config", "show", "--json"))
    assert shown["destinations.there"]["ordered"] == {"text": "true", "source": "the project"}
    assert shown["relaybox"]["database"]["source"] == "the project"


@pytest.mark.django_db(transaction=True)
def test_a_drain_delivers_and_leaves_the_logging_alone(using: str, received: list[Any]) -> None:
    before = logging.getLogger("relaybox").handlers, logging.getLogger("relaybox").propagate
    with override_settings(OUTBOX={**ONLY_HANDLERS, "DATABASES": [using]}):
        emitted = place(using)
        done = json.loads(command("drain", "--json"))
        again = json.loads(command("drain", "--json", using=using))

    assert [event.id for event in received] == [emitted.event_id]
    assert (done["delivered"], done["databases"][using]["destinations"]["memory"]["delivered"]) == (1, 1)
    assert again["delivered"] == 0
    assert (logging.getLogger("relaybox").handlers, logging.getLogger("relaybox").propagate) == before


@pytest.mark.django_db(transaction=True)
@override_settings(OUTBOX=ONLY_HANDLERS)
def test_what_was_kept_long_enough_is_removed(using: str, received: list[Any]) -> None:
    old, young = place(using), place(using)
    command("drain", "--using", using)
    events(using).filter(pk=old.event_id).update(delivered_at=datetime(2020, 1, 1, tzinfo=UTC))

    assert json.loads(command("prune", "--using", using, "--json")) == {"removed": 1}
    assert [event.pk for event in events(using)] == [young.event_id]


@pytest.mark.django_db(transaction=True)
def test_a_drain_gives_stored_events_to_a_route_that_came_later(using: str, received: list[Any]) -> None:
    with override_settings(OUTBOX={**ONLY_HANDLERS, "UNROUTED": "store", "DATABASES": [using]}):
        place(using, event_type="late.one")
    route = {"ROUTES": {"late.*": "memory"}, "DATABASES": [using]}
    with override_settings(OUTBOX={**ONLY_HANDLERS, **route}):
        command("drain")
        command("drain")

    assert [event.type for event in received] == ["late.one"]
    # A connection that stays open would keep the test's database from being dropped.
    wait_for(lambda: is_alone(connections[using]), "no other connection")


@pytest.mark.django_db(transaction=True, databases="__all__")
def test_a_drain_sweeps_every_database_also_where_one_is_wrong(received: list[Any]) -> None:
    aliases = [alias for alias in ("sqlite", "default") if alias in connections]
    with override_settings(OUTBOX={**ONLY_HANDLERS, "DATABASES": [*aliases, "nowhere"]}):
        for alias in aliases:
            place(alias)
        with pytest.raises(CommandError, match="using = 'nowhere'"):
            command("drain")

    assert len(received) == len(aliases)


def test_a_drain_in_a_transaction_would_see_nothing_and_says_so(using: str) -> None:
    with override_settings(OUTBOX=ONLY_HANDLERS), pytest.raises(CommandError, match="is in a transaction"):
        command("drain", using=using)


@pytest.mark.django_db(transaction=True)
def test_a_relay_on_connections_of_its_own_sends_the_signals(using: str, received: list[Any]) -> None:
    calls: list[tuple[str, Any, str]] = []

    def hear(event: Any, destination: str, using: str, **_: Any) -> None:
        calls.append((destination, events(using).get().status, using))

    with override_settings(OUTBOX=ONLY_HANDLERS):
        for heard in (event_delivered, event_failed):
            heard.connect(hear)
        try:
            place(using)
            get_outbox(using).drain()
        finally:
            for heard in (event_delivered, event_failed):
                heard.disconnect(hear)

    assert calls == [("memory", "delivered", using)]


@pytest.mark.parametrize("live", ["sqlite"], indirect=True)
def test_the_shell_has_the_documented_statuses(live: Live) -> None:
    emitted = emit_in(live)
    shown = manage(live.url, "why", str(emitted.event_id), "--settings", "tests.django.project.settings")
    unknown = manage(live.url, "why", NOWHERE)
    wrong = manage(live.url, "--using", "defualt", "status")

    assert (shown.returncode, shown.stderr) == (0, "")
    assert f"{emitted.event_id} (order.paid for receipts)" in shown.stdout
    assert (unknown.returncode, unknown.stdout) == (1, "")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    assert wrong.stderr.startswith("CommandError: using = 'defualt': no database has this name")


def test_a_relay_delivers_what_is_committed_until_it_is_asked_to_stop(live: Live) -> None:
    with workers.module({"default": live.url}, *OUTBOX, "relay") as running:
        running.until_logged(" relays from ")
        emitted = emit_in(live)
        received = Receipt.objects.using(live.using).filter(event_id=emitted.event_id)
        wait_for(received.exists, lambda: running.log)
        running.stop()
    assert events(live.using).get().status == "delivered"


@pytest.mark.parametrize("live", ["sqlite"], indirect=True)
def test_following_events_ends_with_ctrl_c(live: Live) -> None:
    with workers.module({"default": live.url}, *OUTBOX, "events", "tail") as running:
        running.until_logged("following new events")
        emitted = emit_in(live)
        running.until_logged(str(emitted.event_id))
        running.stop(signal.SIGINT)
        assert "Traceback" not in running.log


def emit_in(live: Live) -> Any:
    """Emit for the handler that writes a row, which a test of another process can see."""
    with override_settings(OUTBOX=ONLY_HANDLERS):
        return place(live.using, event_type="order.paid")


def test_the_doctor_says_nothing_of_tables_that_django_made_and_top_prints_a_frame(live: Live) -> None:
    document: dict[str, Any] = json.loads(
        command("--using", live.using, "doctor", "--json", "--skip", "sinks", "--skip", "durability")
    )
    assert [one for one in document["findings"] if one["level"] != "info"] == []
    assert document["unseen"] == []
    text = command("--using", live.using, "top", "--once")
    assert "relaybox top" in text
    assert "DESTINATION" in text


def test_the_doctor_finds_a_missing_index_and_the_command_fails(live: Live) -> None:
    table = " ON outbox_event" if connections[live.using].vendor == "mysql" else ""
    live.spoil()
    with connections[live.using].cursor() as cursor:
        cursor.execute(f"DROP INDEX idx_outbox_event_aggregate{table}")
    out = StringIO()
    with pytest.raises(CommandError, match="status 1"):
        call_command("outbox", "--using", live.using, "doctor", "--only", "schema", stdout=out)
    assert "the index idx_outbox_event_aggregate is missing" in out.getvalue()
