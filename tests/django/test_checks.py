"""What ``manage.py check`` says of the outbox."""

from __future__ import annotations

from typing import Any

import pytest
from celery import current_app
from django.core.checks import CheckMessage
from django.core.checks.registry import registry
from django.core.management import call_command
from django.db import connections
from django.test import override_settings

from relaybox.contrib.django import checks, emit_event
from relaybox.contrib.django.beat import beat_schedule
from relaybox.contrib.django.checks import check_databases, check_exposure, check_settings

SINK = {"sink": "memory:"}


def found(outbox: Any) -> list[tuple[str, str]]:
    with override_settings(OUTBOX=outbox):
        return [shown(one) for one in check_settings()]


def shown(message: CheckMessage) -> tuple[str, str]:
    return message.id.removeprefix("relaybox."), message.msg


def test_a_project_that_is_right_hears_nothing() -> None:
    assert found({"DESTINATIONS": {"there": SINK}, "ROUTES": {"*": "there"}}) == []


@pytest.mark.parametrize(
    ("outbox", "code", "said"),
    [
        (["x"], "E001", "OUTBOX is a list; write a dict"),
        ({"DESTINATION": {}}, "E001", "no setting 'DESTINATION'; did you mean 'DESTINATIONS'"),
        ({"routes": {}}, "E001", "write it in capitals: 'ROUTES'"),
        ({"SWEEP_INTERVAL": "soon"}, "E002", "OUTBOX: SWEEP_INTERVAL = 'soon'"),
        ({"DISPATCH": "pigeon"}, "E002", "DISPATCH = 'pigeon'"),
        ({"DESTINATIONS": {"a": "https://x"}}, "E003", "DESTINATIONS['a']"),
        ({"DESTINATIONS": {"a": {"sink": "htps://x"}}}, "E003", "did you mean 'https'"),
        ({"DESTINATIONS": {"a": {**SINK, "max_atempts": 3}}}, "E003", "did you mean 'max_attempts'"),
        ({"DESTINATIONS": {"memory": SINK}}, "E003", "two are called 'memory'"),
        ({"DESTINATIONS": {"there": SINK}, "ROUTES": {"*": "their"}}, "E004", "did you mean 'there'"),
        ({"ROUTES": {"": "memory"}}, "E004", "route"),
        ({"HANDLERS": {"x.*": "tests.django.shop.refunds.refnd"}}, "E005", "did you mean 'refund'"),
        ({"HANDLERS": {"x.*": "nowhere.at_all"}}, "E005", "no module 'nowhere'"),
        ({"HANDLERS": {"x.*": "tests.django.shop.refunds.refunded"}}, "E005", "it is not a function"),
        ({"HANDLERS": {"x.*": 3}}, "E005", "HANDLERS['x.*'] = 3"),
        ({"DATABASES": ["sqlte"]}, "E006", "OUTBOX: DATABASES = 'sqlte': no database has this name"),
        ({"DESTINATIONS": {"a": {"sink": "handler:no.such:thing"}}, "ROUTES": {"*": "a"}}, "E008", "'no'"),
        ({"DESTINATIONS": {"a": {**SINK, "secret": "env:NO_SUCH"}}, "ROUTES": {"*": "a"}}, "W001", "NO_SUCH"),
        ({"DESTINATIONS": {"a": {"sink": "http://127.0.0.1/"}}, "ROUTES": {"*": "a"}}, "W002", "loopback"),
        ({"DESTINATIONS": {"a": SINK}}, "W003", "destination 'a': no route leads to it"),
        (
            {"DESTINATIONS": {"a": {**SINK, "lease": 5}}, "ROUTES": {"*": "a"}},
            "W004",
            "lease 5s is shorter than timeout 30s",
        ),
    ],
)
def test_a_mistake_is_reported_once_with_its_fix(outbox: Any, code: str, said: str) -> None:
    ((its_code, text),) = found(outbox)
    assert (its_code, said in text) == (code, True), text


def test_every_mistake_is_reported() -> None:
    messages = found(
        {
            "DISPATCH": "pigeon",
            "Queue": "x",
            "DESTINATIONS": {"a": {"sink": ""}, "b": {**SINK, "timeout": "x"}, "c": SINK},
            "ROUTES": {"x": "a", "y": ["c", "d"], "z": "e"},
            "HANDLERS": {"h": ["nowhere.at", "tests.django.shop.refunds.refund", "tests.none.one"]},
        }
    )
    codes = sorted(code for code, _ in messages)
    assert codes == ["E001", "E002", "E003", "E003", "E004", "E004", "E005", "E005"]


def test_a_dead_letter_destination_needs_no_route() -> None:
    outbox = {"DESTINATIONS": {"a": {**SINK, "dead_letter": "b"}, "b": SINK}, "ROUTES": {"*": "a"}}
    assert found(outbox) == []


def test_celery_must_be_there_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "find_spec", lambda name: None)
    ((code, text),) = found({"DISPATCH": "celery"})
    assert (code, "pip install 'relaybox[celery]'" in text) == ("E007", True)


def test_celery_needs_an_application(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaybox.contrib.django.conf.has_celery", lambda: False)
    assert [code for code, _ in found({"DISPATCH": "celery"})] == ["W006"]
    assert found({"DISPATCH": "auto"}) == []


IN_A_FILE = {"beat_scheduler": "celery.beat:PersistentScheduler"}
IN_THE_DATABASE = {"beat_scheduler": "django_celery_beat.schedulers:DatabaseScheduler"}
ANOTHER = {"beat_schedule": {"other": {"task": "x", "schedule": 1}}}
OURS = {"beat_schedule": beat_schedule({})}


@pytest.mark.parametrize(
    ("conf", "codes"),
    [
        (IN_A_FILE | {"beat_schedule": {}}, []),
        (IN_A_FILE | ANOTHER, ["W007"]),
        (IN_THE_DATABASE | ANOTHER, []),
        (IN_A_FILE | OURS, []),
        (OURS | {"task_soft_time_limit": 20}, ["W010"]),
        (OURS | {"task_soft_time_limit": 35, "task_time_limit": 30}, ["W010", "W010"]),
        (OURS | {"task_soft_time_limit": 60, "task_time_limit": 90}, []),
    ],
)
def test_a_schedule_without_the_sweep_and_a_time_limit_that_would_end_a_delivery_are_reported(
    conf: dict[str, Any], codes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in conf.items():
        monkeypatch.setitem(current_app.conf, name, value)
    assert [code for code, _ in found({})] == codes


def test_a_missing_schedule_is_reported_unless_one_may_be_in_the_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(current_app.conf, "beat_schedule", {})
    monkeypatch.setattr("relaybox.contrib.django.checks.apps.is_installed", lambda name: False)
    assert [code for code, _ in found({})] == ["W007"]


def test_a_database_in_memory_is_reported_where_a_relay_delivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(connections["sqlite"].settings_dict, "NAME", ":memory:")
    for dispatch, codes in {"relay": ["W005"], "none": [], "celery": []}.items():
        assert [code for code, _ in found({"DISPATCH": dispatch, "DATABASES": "sqlite"})] == codes


def test_another_kind_of_database_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    ((code, text),) = found({})
    assert (code, "database 'default' is on oracle; an outbox needs PostgreSQL" in text) == ("E006", True)


def test_a_database_that_is_right_hears_nothing_and_is_asked_only_if_named(
    using: str, django_assert_num_queries: Any
) -> None:
    assert check_databases(databases=[using]) == []
    with django_assert_num_queries(0, using=using):
        assert check_databases(databases=None) == check_databases(databases=["other"]) == []


def test_an_old_server_is_reported(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections[using], "get_database_version", lambda: (1, 2))
    (message,) = check_databases(databases=[using])
    assert (shown(message)[0], "1.2 is too old" in message.msg) == ("E009", True)


def test_missing_and_old_tables_are_reported(using: str, monkeypatch: pytest.MonkeyPatch) -> None:
    end = "" if using == "default" else f" --database {using}"
    said = f"database {using!r}: the tables are missing: run `manage.py migrate relaybox{end}`"
    for version in (None, 0):
        with monkeypatch.context() as patch:
            patch.setattr(
                "relaybox.contrib.django.tables.recorded_version", lambda _, version=version: version
            )
            assert [shown(one) for one in check_databases(databases=[using])] == [("W008", said)]
    monkeypatch.setattr("relaybox.contrib.django.tables.NEWEST", 99)
    (message,) = check_databases(databases=[using])
    assert "the tables are at version 3 and this release needs 99: run" in message.msg


def test_a_database_in_which_nothing_was_migrated_yet_hears_nothing(
    using: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections[using].introspection, "table_names", lambda *_: [])
    assert check_databases(databases=[using]) == []


def test_events_that_no_route_takes_are_reported(using: str) -> None:
    with override_settings(OUTBOX={"UNROUTED": "store", "DATABASES": [using]}):
        for kind in ("b.done", "a.done", "b.done"):
            emit_event("thing", 1, kind, {}, using=using)
        (message,) = check_databases(databases=[using])

    assert shown(message) == (
        "W009",
        f"database {using!r}: events wait because no route matches them: 'a.done', 'b.done'",
    )


def test_what_a_destination_exposes_is_a_matter_of_deployment() -> None:
    public = {"sink": "http://shop.example.org/events", "secret": "hush-" * 8}
    outbox = {"DESTINATIONS": {"shop": public}, "ROUTES": {"*": "shop"}}
    assert found(outbox) == []
    with override_settings(OUTBOX=outbox):
        tls, secret = map(shown, check_exposure())
    assert tls[0] == secret[0] == "W011"
    assert tls[1].startswith("destination 'shop' is public and has no TLS")
    assert secret[1].startswith("secret of destination 'shop' is a secret in the settings")
    assert "hush" not in str((tls, secret))
    assert check_exposure in registry.get_checks(include_deployment_checks=True)
    assert check_exposure not in registry.get_checks()


@pytest.mark.django_db(databases="__all__")
def test_they_are_registered() -> None:
    with override_settings(OUTBOX={"DISPATCHER": "x"}), pytest.raises(Exception, match="did you mean"):
        call_command("check")
