"""Django models of the outbox's tables, for reading; the outbox's own statements write them.

The side tables have models so that ``flush``, and with it ``TransactionTestCase``, empties them. For a key of
several columns, the primary key is the most selective one, and a ``UniqueConstraint`` has them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import connections, models
from django.db.models import Q
from django.db.models.base import ModelBase
from django.db.models.expressions import RawSQL

from relaybox.contrib.django.databases import dialect_of
from relaybox.contrib.django.private import read_for_writing
from relaybox.contrib.django.tables import (
    EVENT_PERMISSIONS,
    OutboxJSONField,
    OutboxUUIDField,
    UTCDateTimeField,
    indexes_of,
    state_of,
)
from relaybox.operate.admin import NAMED, Admin, Named


class DatabaseNow(models.Expression):  # type: ignore[misc]
    """The database's current time, which the relays use."""

    def __init__(self) -> None:
        super().__init__(output_field=UTCDateTimeField())

    def as_sql(self, compiler: Any, connection: Any) -> tuple[str, tuple[()]]:
        """Return a subquery: a volatile function cannot bound an index scan."""
        now = dialect_of(connection).words["now"]
        return f"(SELECT {now})".replace("%", "%%"), ()


# Literals, because SQLite chooses a partial index before it knows bound values.
PENDING = RawSQL("'pending'", (), models.CharField())
DELIVERED = RawSQL("'delivered'", (), models.CharField())
FAILED = RawSQL("'failed'", (), models.CharField())
DISCARDED = RawSQL("'discarded'", (), models.CharField())


EMIT = "only the outbox writes them; emit an event with relaybox.contrib.django.emit_event()"
GIVE_UP = "discard an event that is no longer wanted; delivered rows are removed after their retention"


def refused(method: str, fix: str) -> Callable[..., Any]:
    """Return a method that only raises, because rows are written through the outbox."""

    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        model = getattr(self, "model", type(self))
        raise TypeError(f"{model.__name__}.{method} cannot write rows of {model._meta.db_table}: {fix}")

    return refuse


class OutboxQuerySet(models.QuerySet):  # type: ignore[misc]
    """Rows for reading; ``update()`` and ``delete()`` still work, for repairs."""

    create = refused("objects.create()", EMIT)
    bulk_create = refused("objects.bulk_create()", EMIT)
    bulk_update = refused("objects.bulk_update()", EMIT)


class OutboxEventQuerySet(OutboxQuerySet):
    """Deliveries by state. A pending one is either due, scheduled, parked or being sent."""

    def pending(self) -> OutboxEventQuerySet:
        """Return the deliveries that are not final: due, scheduled, parked or being sent."""
        return self._only(status=PENDING)

    def due(self) -> OutboxEventQuerySet:
        """Return the deliveries that are due now and not leased."""
        return self._waiting()._only(next_attempt_at__lte=DatabaseNow())

    def scheduled(self) -> OutboxEventQuerySet:
        """Return the deliveries for later: backing off after a failure, or emitted for a later time."""
        return self._waiting()._only(next_attempt_at__gt=DatabaseNow())

    def parked(self) -> OutboxEventQuerySet:
        """Return the deliveries behind an earlier event with the same key."""
        return self._waiting()._only(next_attempt_at=None)

    def sending(self) -> OutboxEventQuerySet:
        """Return the deliveries that a relay holds with an unexpired lease."""
        return self.pending()._only(leased_until__gt=DatabaseNow())

    def delivered(self) -> OutboxEventQuerySet:
        """Return the deliveries that their destination acknowledged."""
        return self._only(status=DELIVERED)

    def failed(self) -> OutboxEventQuerySet:
        """Return the deliveries that the relay gave up; an operator can retry or discard them."""
        return self._only(status=FAILED)

    def discarded(self) -> OutboxEventQuerySet:
        """Return the deliveries that an operator gave up."""
        return self._only(status=DISCARDED)

    def retry(self, *, actor: str = "django") -> int:
        """Retry the failed deliveries with all attempts, as ``actor`` in the audit; return their number."""
        from relaybox.contrib.django.emit import after_commit
        from relaybox.contrib.django.outbox import ask

        read_for_writing(self)
        rows = self if self.query.is_sliced else self.failed()
        values = rows.values_list("destination", "id", "status")
        failed = [(destination, id_) for destination, id_, status in values if status == "failed"]
        retried = 0
        # The audit names each row of a portion.
        for start in range(0, len(failed), NAMED):
            portion = failed[start : start + NAMED]
            named = Named([id_ for _, id_ in portion], exact=True)
            retried += ask(self.db, actor, partial(Admin.retry, what=named)).affected
            after_commit(connections[self.db], [(destination, str(id_)) for destination, id_ in portion])
        return retried

    retry.alters_data = True  # type: ignore[attr-defined]

    def _only(self, *conditions: Q, **named: Any) -> OutboxEventQuerySet:
        found: OutboxEventQuerySet = self.filter(*conditions, **named)
        return found

    def _waiting(self) -> OutboxEventQuerySet:
        return self.pending()._only(Q(leased_until=None) | Q(leased_until__lte=DatabaseNow()))


class OutboxTable(models.Model):  # type: ignore[misc]
    """A table that only the outbox writes."""

    objects = OutboxQuerySet.as_manager()
    save = refused("save()", EMIT)
    delete = refused("delete()", GIVE_UP)

    class Meta:
        abstract = True
        default_permissions = ("view",)


class OutboxEvent(OutboxTable):
    """One event for one destination."""

    class Status(models.TextChoices):  # type: ignore[misc]
        """The stored status; a pending row's state follows from its times (see ``OutboxEventQuerySet``)."""

        PENDING = "pending", "pending"
        DELIVERED = "delivered", "delivered"
        FAILED = "failed", "failed"
        DISCARDED = "discarded", "discarded"

    id = OutboxUUIDField("ID", primary_key=True, editable=False)
    event_id = OutboxUUIDField("event ID")
    destination = models.CharField(max_length=100)
    aggregate_type = models.CharField(max_length=100)
    aggregate_id = models.CharField("aggregate ID", max_length=255)
    event_type = models.CharField(max_length=100)
    payload = OutboxJSONField(encoder=DjangoJSONEncoder, null=True)
    payload_data = models.BinaryField(null=True)
    payload_encoding = models.CharField(max_length=50, null=True)
    headers = OutboxJSONField(encoder=DjangoJSONEncoder, default=dict)
    ordering_key = models.CharField(max_length=255, null=True)
    position = models.BigIntegerField(editable=False)
    status = models.CharField(max_length=20, choices=Status.choices, default=Status.PENDING)
    idempotency_key = models.CharField(max_length=255)
    attempts = models.IntegerField(default=0)
    max_attempts = models.IntegerField(default=5)
    crashes = models.IntegerField(default=0)
    next_attempt_at = UTCDateTimeField(null=True)
    leased_until = UTCDateTimeField(null=True)
    lease_token = OutboxUUIDField(null=True)
    lease_owner = models.CharField(max_length=200, null=True)
    created_at = UTCDateTimeField()
    updated_at = UTCDateTimeField()
    last_attempt_at = UTCDateTimeField(null=True)
    delivered_at = UTCDateTimeField(null=True)
    error_message = models.TextField(null=True)

    objects = OutboxEventQuerySet.as_manager()

    class Meta(OutboxTable.Meta):
        # No default order: with one, PostgreSQL would walk the primary key to find the few pending rows.
        db_table = "outbox_event"
        verbose_name = "outbox event"
        verbose_name_plural = "outbox events"
        # Ids are ordered by time.
        get_latest_by = "id"
        permissions = EVENT_PERMISSIONS
        indexes = indexes_of("event")

    def __str__(self) -> str:
        """Return text such as ``order.paid of Order 42 to billing``."""
        return f"{self.event_type} of {self.aggregate_type} {self.aggregate_id} to {self.destination}"

    @classmethod
    def check(cls, **kwargs: Any) -> list[Any]:
        """Drop the warning that MariaDB lacks partial indexes: its tables have substitutes."""
        return [message for message in super().check(**kwargs) if message.id != "models.W037"]


def side_table(name: str, about: str) -> Any:
    """Return the model of a table of the schema."""
    state = state_of(name)
    meta = type("Meta", (OutboxTable.Meta,), state.options)
    attributes = {"__module__": __name__, "__doc__": about, "Meta": meta, **dict(state.fields)}
    return ModelBase(state.name, (OutboxTable,), attributes)


OutboxIdempotency = side_table("idempotency", "A used idempotency key, and the event first emitted with it.")
OutboxAttempt = side_table("attempt", "A failed attempt.")
OutboxDestination = side_table("destination", "A destination's pause and circuit.")
OutboxRelay = side_table("relay", "A relay that is running, or was a moment ago.")
OutboxLeader = side_table("leader", "The relay that does the upkeep, and its term.")
OutboxAudit = side_table("audit", "An operator's action.")
OutboxStats = side_table("stats", "The counts of a relay for a destination in a minute.")
OutboxSample = side_table(
    "sample", "The backlog at a minute, of a destination or (with an empty name) of all."
)
OutboxOperation = side_table("operation", "A bulk action that runs in the background of a process.")
OutboxSetting = side_table("setting", "A relay's settings of a destination.")
InboxMessage = side_table("inbox", "A message that a consumer has processed.")
