"""The models: what they read, what they look for, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest
from asgiref.sync import async_to_sync
from django.apps import apps
from django.core.management import call_command
from django.db import IntegrityError, connections, transaction
from django.db.models import CharField, F, Max
from django.dispatch import Signal

from relaybox import Destination, Outbox, Route
from relaybox.contrib.django import models, signals
from relaybox.contrib.django.models import DatabaseNow, OutboxEvent, OutboxEventQuerySet, OutboxQuerySet
from relaybox.database.migrations import Outbox as Tables
from relaybox.database.migrations import ddl
from relaybox.database.schema import VERSION
from tests.django.conftest import URLS
from tests.django.orders import change
from tests.django.steps import orders

BERLIN, TOKYO = ZoneInfo("Europe/Berlin"), ZoneInfo("Asia/Tokyo")
HOUR = timedelta(hours=1)
MODELS = list(apps.get_app_config("relaybox").get_models())

OUTBOXES = {
    alias: Outbox(
        url,
        destinations=[Destination("billing", "memory:"), Destination("search", "memory:", ordered=True)],
        routes=[Route("order.paid", to="billing"), Route("order.both", to=["billing", "search"])],
    )
    for alias, url in {"default": "postgresql://", "mariadb": "mysql://", "sqlite": "sqlite://"}.items()
}

VENDORS = {"default": "postgresql", "mariadb": "mysql", "sqlite": "sqlite"}
TABLES = {"shop_order", "outbox_event", "outbox_destination", "outbox_idempotency"}

Emit = Callable[..., OutboxEvent]


@pytest.fixture
def emit(using: str) -> Emit:
    """Emits on Django's connection by the means of any other application; returns the first row."""

    def emit(payload: Any = None, event_type: str = "order.paid", **options: Any) -> OutboxEvent:
        with transaction.atomic(using=using):
            connections[using].ensure_connection()
            payload = {"total": 42} if payload is None else payload
            connection = connections[using].connection
            emitted = OUTBOXES[using].emit(connection, "Order", 7, event_type, payload, **options)
        return OutboxEvent.objects.using(using).get(id=emitted.event_id)

    return emit


def rows(using: str) -> Any:
    return OutboxEvent.objects.using(using)


def leased(until: datetime) -> dict[str, Any]:
    return {"leased_until": until, "lease_token": uuid4(), "lease_owner": "relay"}


def failed(row: OutboxEvent) -> OutboxEvent:
    return change(row, status="failed", next_attempt_at=None, attempts=5, error_message="refused")


def test_an_alias_is_the_database_it_says_and_is_migrated(using: str) -> None:
    connection = connections[using]
    assert connection.vendor == VENDORS[using]
    assert set(connection.introspection.table_names()) >= TABLES
    call_command("migrate", database=using, check_unapplied=True, verbosity=0)


def test_a_test_sees_no_other_alias(using: str) -> None:
    other = next((alias for alias in URLS if alias != using), None)
    if other is None:
        pytest.skip("there is no other alias")
    with pytest.raises(AssertionError, match="not allowed"):
        orders(other).exists()


def test_a_row_is_what_was_emitted(using: str, emit: Emit) -> None:
    row = emit({"total": 42, "items": ["a"]}, idempotency_key="paid-7", headers={"tenant": "t"})
    assert isinstance(row.id, UUID)
    assert row.id.version == 7
    assert row.event_id == row.id
    assert (row.aggregate_type, row.aggregate_id, row.event_type) == ("Order", "7", "order.paid")
    assert row.payload == {"total": 42, "items": ["a"]}
    assert (row.headers, row.payload_data, row.lease_token) == ({"tenant": "t"}, None, None)
    assert row.status is not None
    assert row.status == OutboxEvent.Status.PENDING == "pending"
    assert (row.attempts, row.max_attempts, row.crashes) == (0, 5, 0)
    assert row.position > 0
    assert str(row) == "order.paid of Order 7 to billing"
    key = models.OutboxIdempotency.objects.using(using).get(event_type="order.paid")
    assert (key.idempotency_key, key.event_id) == ("paid-7", row.event_id)


def test_rows_are_found_by_their_ids(using: str, emit: Emit) -> None:
    row, other = emit(), emit()
    assert rows(using).get(id=str(row.id)) == row
    assert list(rows(using).filter(event_id__in=[row.id])) == [row]
    assert set(rows(using).filter(id__in=[row.id, other.id])) == {row, other}
    assert list(rows(using).filter(id=F("event_id")).order_by("id")) == [row, other]
    assert list(rows(using).values_list("id", flat=True).order_by("-position")) == [other.id, row.id]
    assert rows(using).latest() == other
    assert not rows(using).filter(id=uuid4()).exists()


def test_a_uuid_is_written_as_the_outbox_writes_it(using: str, emit: Emit) -> None:
    row, token = emit(), uuid4()
    change(row, leased_until=datetime.now(UTC), lease_token=token, lease_owner="relay")
    assert row.lease_token == token
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT lease_token FROM outbox_event")
        ((stored,),) = cursor.fetchall()
    assert stored == (token if using == "default" else token.hex)


@pytest.fixture(params=["UTC", "the connection's zone", "no zones"])
def zones(request: pytest.FixtureRequest, using: str, settings: Any) -> Iterator[str]:
    """Django's settings of time zones."""
    connection = connections[using]
    if request.param == "the connection's zone":
        connection.settings_dict["TIME_ZONE"] = "Asia/Tokyo"
        settings.USE_TZ = True
        assert connection.timezone_name == "Asia/Tokyo"
    elif request.param == "no zones":
        settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Berlin"
        assert connection.timezone is None
    yield request.param
    connection.settings_dict["TIME_ZONE"] = None


def test_times_are_aware_and_in_utc_whatever_the_settings(using: str, zones: str, emit: Emit) -> None:
    row = emit()
    assert row.created_at.tzinfo is UTC
    assert abs(row.created_at - datetime.now(UTC)) < timedelta(minutes=5)
    assert rows(using).aggregate(last=Max("created_at"))["last"] == row.created_at
    now = rows(using).annotate(now=DatabaseNow()).get().now
    assert now.tzinfo is UTC
    assert abs(now - row.created_at) < timedelta(minutes=5)


def test_lookups_take_a_moment_of_any_zone(using: str, zones: str, emit: Emit) -> None:
    created = emit().created_at
    for moment in (created, created.astimezone(TOKYO), created.astimezone(BERLIN)):
        assert rows(using).filter(created_at=moment).count() == 1
        assert rows(using).filter(created_at__gte=moment, created_at__lte=moment).count() == 1
        assert rows(using).filter(created_at__range=(moment - HOUR, moment + HOUR)).count() == 1
        assert not rows(using).filter(created_at__gt=moment).exists()
        assert not rows(using).filter(created_at__lt=moment).exists()


MOMENTS = (
    datetime(2030, 7, 1, 12, tzinfo=UTC),
    datetime(2030, 1, 1, 0, 30, 0, 123456, tzinfo=TOKYO),
    # The hour that Berlin has twice.
    datetime(2030, 10, 27, 0, 30, tzinfo=UTC),
    datetime(2030, 10, 27, 1, 30, tzinfo=UTC),
)


def test_a_moment_comes_back_as_it_was_written(using: str, zones: str, emit: Emit) -> None:
    row = emit()
    for moment in MOMENTS:
        assert change(row, next_attempt_at=moment).next_attempt_at == moment
        assert rows(using).get(next_attempt_at__lte=moment) == row
        assert rows(using).get(next_attempt_at__gte=moment) == row


def test_a_naive_moment_is_one_of_the_default_zone(using: str, settings: Any, emit: Emit) -> None:
    settings.USE_TZ = False
    settings.TIME_ZONE = "Europe/Berlin"
    row = change(emit(), next_attempt_at=datetime(2030, 7, 1, 12))
    assert row.next_attempt_at == datetime(2030, 7, 1, 10, tzinfo=UTC)
    assert rows(using).get(next_attempt_at=datetime(2030, 7, 1, 12)) == row


def test_payloads_can_be_searched(using: str, emit: Emit) -> None:
    row = emit({"total": 42, "lines": [{"name": "pen"}], "note": "grüße", "paid": True})
    emit({"total": 7, "lines": [], "paid": False})
    for found in (
        {"payload__total": 42},
        {"payload__total__gt": 7},
        {"payload__lines__0__name": "pen"},
        {"payload__note": "grüße"},
        {"payload__note__startswith": "grü"},
        {"payload__has_key": "note"},
        {"payload__paid": True},
    ):
        assert rows(using).get(**found) == row
    assert rows(using).get(payload={"total": 7, "lines": [], "paid": False}).payload["total"] == 7
    assert list(rows(using).order_by("id").values_list("payload__total", flat=True)) == [42, 7]


def test_a_payload_may_be_any_document(using: str, emit: Emit) -> None:
    for payload in (0, 42, 1.5, "text", "42", "grüße", True, [1, 2], {}, {"a": {"ö": [1.5]}}):
        row = emit(payload)
        assert row.payload == payload
        assert type(row.payload) is type(payload)
        assert rows(using).get(payload=payload) == row, payload


def test_every_delivery_is_found_by_the_verb_of_its_state_and_no_other(using: str, emit: Emit) -> None:
    now = datetime.now(UTC)
    expected = {
        "due": {emit(), change(emit(), **leased(now - HOUR))},
        "sending": {
            change(emit(), **leased(now + HOUR)),
            change(emit(), **leased(now + HOUR), next_attempt_at=now + 2 * HOUR),
        },
        "scheduled": {
            change(emit(), next_attempt_at=now + HOUR),
            change(emit(), next_attempt_at=now + HOUR, **leased(now - HOUR)),
        },
        "parked": {change(emit(), next_attempt_at=None, ordering_key="Order:7")},
        "delivered": {change(emit(), status="delivered", next_attempt_at=None, delivered_at=now)},
        "failed": {failed(emit())},
        "discarded": {change(emit(), status="discarded", next_attempt_at=None)},
    }
    found = {state: set(getattr(rows(using), state)()) for state in expected}
    assert found == expected
    assert set(rows(using).pending()) == set().union(
        *(expected[state] for state in ("due", "sending", "scheduled", "parked"))
    )


def test_verbs_narrow_a_query_down(using: str, emit: Emit) -> None:
    row = failed(emit())
    failed(emit(event_type="order.both"))
    assert list(rows(using).filter(event_type="order.paid").failed()) == [row]
    assert list(OutboxEvent.objects.db_manager(using).failed().filter(event_type="order.paid")) == [row]


@pytest.mark.django_db(databases=["sqlite"])
def test_sqlite_a_verb_uses_its_partial_index() -> None:
    for verb in ("due", "scheduled", "parked", "sending", "pending", "delivered", "failed"):
        plan = getattr(rows("sqlite").filter(destination="billing"), verb)().explain()
        index = {"delivered": "delivered", "failed": "failed"}.get(verb, "pending_next_attempt")
        assert f"USING INDEX idx_outbox_event_{index} (destination=?" in plan, verb
        assert verb != "due" or "next_attempt_at" in plan


@pytest.mark.django_db(transaction=True)
def test_retry_starts_failed_deliveries_again(using: str, emit: Emit) -> None:
    rows_failed, waiting = [failed(emit()) for _ in range(3)], emit()
    assert rows(using).retry(actor="ada") == 3
    for row in rows_failed:
        row.refresh_from_db()
        assert (row.status, row.attempts) == ("pending", 0)
    assert set(rows(using).due()) == {*rows_failed, waiting}
    audit = models.OutboxAudit.objects.using(using).get()
    assert (audit.actor, audit.action, audit.affected) == ("ada", "retry", 3)
    assert set(audit.details["ids"]) == {str(row.id) for row in rows_failed}
    assert rows(using).retry() == 0


def test_retry_is_about_this_query_only(using: str, emit: Emit) -> None:
    first = emit(event_type="order.both")
    later = change(emit(), next_attempt_at=datetime.now(UTC) + HOUR, last_attempt_at=datetime.now(UTC))
    rows(using).filter(event_id=first.event_id).update(status="failed", next_attempt_at=None)
    assert rows(using).failed().count() == 2
    # The first row of an event has the id that names all of them.
    assert rows(using).filter(id__in=[first.id, later.id]).retry() == 1
    assert rows(using).failed().get().destination != first.destination
    assert rows(using).scheduled().get() == later
    assert rows(using).order_by("id")[:10].retry() == 1
    assert not rows(using).failed().exists()
    assert rows(using).scheduled().get() == later


def test_rows_are_not_saved_or_deleted_one_by_one(using: str, emit: Emit) -> None:
    row = emit()
    row.status = "delivered"
    with pytest.raises(TypeError, match=r"OutboxEvent\.save\(\).*outbox_event.*emit_event"):
        row.save(using=using)
    with pytest.raises(TypeError, match=r"OutboxEvent\.delete\(\)"):
        row.delete()
    assert rows(using).get().status == "pending"


WRITES: tuple[Callable[[Any, Any, Any], Any], ...] = (
    lambda model, objects, absent: objects.create(),
    lambda model, objects, absent: objects.get_or_create(pk=absent),
    lambda model, objects, absent: objects.update_or_create(pk=absent),
    lambda model, objects, absent: objects.bulk_create([model()]),
    lambda model, objects, absent: objects.bulk_update([model(pk=absent)], [model._meta.fields[1].name]),
    lambda model, objects, absent: model().save(),
    lambda model, objects, absent: model(pk=absent).delete(),
    lambda model, objects, absent: async_to_sync(objects.acreate)(),
    lambda model, objects, absent: async_to_sync(model().asave)(),
)


def test_rows_are_not_written_by_a_manager(using: str) -> None:
    for model in MODELS:
        objects = model.objects.using(using)
        for write in WRITES:
            with pytest.raises(TypeError) as refusal:
                write(model, objects, absent(model))
            assert str(refusal.value).startswith(f"{model.__name__}.")
        assert not objects.exists()


def absent(model: Any) -> Any:
    kinds = {"UUIDField": uuid4(), "DateTimeField": datetime.now(UTC), "BigAutoField": 1}
    return kinds.get(model._meta.pk.get_internal_type(), "absent")


def test_a_repair_by_update_meets_the_constraints(using: str, emit: Emit) -> None:
    row = emit()
    with pytest.raises(IntegrityError), transaction.atomic(using=using):
        rows(using).filter(id=row.id).update(status="delivered")
    assert rows(using).filter(id=row.id).delete() == (1, {"relaybox.OutboxEvent": 1})


@pytest.mark.django_db(transaction=True)
def test_flush_empties_every_table_and_the_outbox_goes_on(using: str, emit: Emit) -> None:
    emit(idempotency_key="once")
    for options in ({}, {"reset_sequences": False}):
        call_command("flush", database=using, interactive=False, verbosity=0, **options)
        for model in MODELS:
            assert not model.objects.using(using).exists()
        positions = [emit(idempotency_key=key).position for key in ("once", "twice")]
        assert 0 < positions[0] < positions[1]
    with connections[using].cursor() as cursor:
        cursor.execute("SELECT max(version) FROM outbox_migration")
        assert cursor.fetchone() == (VERSION,)


def test_the_models_have_every_column_that_all_databases_share() -> None:
    tables = Tables("postgresql").metadata().tables
    for model in MODELS:
        columns = {
            column.name: (column.nullable, getattr(column.type, "length", None))
            for column in tables[model._meta.db_table].columns
            if "ddl" not in column.info or column.info["ddl"].get("postgresql", "") is not None
        }
        assert columns == {
            field.column: (field.null, field.max_length if isinstance(field, CharField) else None)
            for field in model._meta.fields
        }
    without = set(tables) - {model._meta.db_table for model in MODELS}
    assert without == {"outbox_migration"}


def test_the_indexes_have_the_names_of_the_database() -> None:
    statements = " ".join(ddl("postgresql"))
    names = [index.name for model in MODELS for index in model._meta.indexes]
    assert "idx_outbox_event_pending_next_attempt" in names
    assert all(f"CREATE INDEX {name} ON" in statements for name in names)
    assert statements.count("CREATE INDEX") == len(names)


def test_the_reference_has_every_model_verb_signal_and_permission() -> None:
    page = (Path(__file__).parents[2] / "docs/reference/django.md").read_text()
    verbs = {name for name in vars(OutboxEventQuerySet) if not name.startswith("_")} - {*vars(OutboxQuerySet)}
    named = [
        *(f"{model.__name__}`" for model in MODELS),
        *(f"`{verb}(" for verb in verbs),
        *(f"| `{name}` |" for name, value in vars(signals).items() if isinstance(value, Signal)),
        *(f"`relaybox.{name}`" for name, _ in OutboxEvent._meta.permissions),
    ]
    assert [name for name in named if name not in page] == []
