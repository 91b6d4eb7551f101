"""A shop's outbox as an operator finds it after a bad morning: something in every state."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

from django.db import connections

from relaybox.contrib.django import emit_event
from relaybox.contrib.django.databases import dialect_of, get_statements
from relaybox.contrib.django.models import OutboxEvent
from relaybox.database.statements.delivery import Texts

OUTBOX: dict[str, Any] = {
    "DISPATCH": "none",
    "REQUIRE_ATOMIC": False,
    "DESTINATIONS": {
        "billing": {"sink": "https://billing.example.com/events"},
        "search": {"sink": "https://search.example.com/hooks/orders"},
        "warehouse": {"sink": "https://warehouse.example.com/in", "ordered": True},
    },
    "ROUTES": {
        "order.placed": ["billing", "search", "warehouse"],
        "order.paid": ["billing", "warehouse"],
        "order.shipped": ["search"],
        "customer.renamed": ["search"],
    },
}
REFUSED = 'HTTP 422: {"error": "currency EUX is not known", "field": "total.currency"}'
TIMEOUT = "HTTP 503 from https://search.example.com/hooks/orders: upstream connect error, retry later"
BUSY = 'HTTP 500: {"error": "deadlock detected", "retry": true}'
MINUTE = timedelta(minutes=1)
RECORD = """
INSERT INTO {attempt} (delivery_id, attempt, failed_at, relay, error_message)
VALUES (:id, :attempt, :at, 'relay-7f9c', :error)"""


def open_shop(settings: Any, monkeypatch: Any) -> None:
    """Have these destinations alone, without the handlers of other tests."""
    monkeypatch.setattr("relaybox.contrib.django.conf.registered", {})
    settings.OUTBOX = OUTBOX


def everything_in(alias: str) -> SimpleNamespace:
    """Return a router that keeps every model in one database."""

    def there(model: Any, **hints: Any) -> str:
        return alias

    return SimpleNamespace(db_for_read=there, db_for_write=there)


def emit(
    using: str, type_: str, id_: str, event: str, payload: Any = None, **options: Any
) -> list[OutboxEvent]:
    """Emit; the event's rows, by destination."""
    emitted = emit_event(type_, id_, event, {} if payload is None else payload, using=using, **options)
    rows = OutboxEvent.objects.using(using).filter(event_id=emitted.event_id)
    return list(rows.order_by("destination"))


def change(row: OutboxEvent, **values: Any) -> OutboxEvent:
    """Write what a relay would have written."""
    assert OutboxEvent.objects.using(row._state.db).filter(pk=row.pk).update(**values) == 1
    row.refresh_from_db()
    return row


def failed(row: OutboxEvent, error: str = REFUSED, attempts: int = 5) -> OutboxEvent:
    """Let the relay give the event up."""
    tried(row, error, attempts)
    return change(row, status="failed", next_attempt_at=None)


def delivered(row: OutboxEvent) -> OutboxEvent:
    """Mark the event as delivered."""
    now = datetime.now(UTC)
    times = {"next_attempt_at": None, "last_attempt_at": now, "delivered_at": now}
    return change(row, status="delivered", attempts=1, **times)


def sending(row: OutboxEvent) -> OutboxEvent:
    """Lease the event to a relay."""
    lease = {"leased_until": datetime.now(UTC) + 60 * MINUTE, "lease_token": uuid4()}
    return change(row, attempts=1, last_attempt_at=None, lease_owner="relay-7f9c", **lease)


def backing_off(row: OutboxEvent, error: str = TIMEOUT, attempts: int = 2) -> OutboxEvent:
    """Let the event fail and wait for its next attempt."""
    tried(row, error, attempts)
    return change(row, next_attempt_at=datetime.now(UTC) + 4 * MINUTE)


def parked(row: OutboxEvent) -> OutboxEvent:
    """Let the event wait behind another of its key."""
    return change(row, next_attempt_at=None)


def tried(row: OutboxEvent, error: str, attempts: int) -> None:
    """Attempts that failed, and the record of each."""
    connection = connections[row._state.db]
    dialect = dialect_of(connection)
    now = datetime.now(UTC)
    statements = get_statements(connection).others(Texts({"record": RECORD}))
    for attempt in range(row.attempts + 1, attempts + 1):
        at = dialect.to_time(now - (attempts - attempt) * 4 * MINUTE)
        query = statements("record", id=dialect.to_uuid(row.pk), attempt=attempt, at=at, error=error)
        with connection.cursor() as cursor:
            cursor.execute(query.sql, query.params)
    change(row, attempts=attempts, last_attempt_at=now, error_message=error)


def morning(using: str, orders: int = 14) -> None:
    """Orders whose deliveries are in every state."""
    ages = iter(range(orders + 11, 0, -1))

    def happened(event: str, id_: object, payload: Any = None) -> list[OutboxEvent]:
        type_ = event.partition(".")[0]
        return _aged(next(ages), emit(using, type_, str(id_), event, payload or _order(id_)))

    def paid(number: int, total: str) -> list[OutboxEvent]:
        return happened("order.paid", number, {"order": number, "total": total})

    arrived = [row for number in range(1040, 1040 + orders) for row in happened("order.placed", number)]
    billing, *others = happened("order.placed", 1071)
    tried(billing, BUSY, 1)
    failed(billing, attempts=2)
    arrived += [*others, *paid(1071, "129.90")]
    first, stuck = paid(1069, "18.50")
    failed(stuck, "TimeoutError: no answer within 30 s", 5)
    second, behind = paid(1069, "4.20")
    parked(behind)
    for number in (1066, 1067, 1068):
        backing_off(happened("order.shipped", number, {"carrier": "DHL"})[0])
    [renamed] = happened("customer.renamed", "c-2291", {"name": "Ada & Söhne"})
    sending(renamed)
    for row in (*arrived, first, second, *happened("order.placed", 1072)[1:]):
        delivered(row)


def _aged(minutes: int, rows: list[OutboxEvent]) -> list[OutboxEvent]:
    born = datetime.now(UTC) - minutes * MINUTE
    return [change(row, created_at=born) for row in rows]


def _order(number: object) -> dict[str, Any]:
    return {
        "order": number,
        "customer": {"id": "c-2291", "name": "Ada Lovelace"},
        "total": {"amount": "129.90", "currency": "EUX"},
        "lines": [{"sku": "KB-87", "quantity": 1}, {"sku": "CBL-USB-C", "quantity": 2}],
        "gift": False,
    }
