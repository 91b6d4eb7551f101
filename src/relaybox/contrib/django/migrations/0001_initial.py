"""Create the tables with the statements of ``relaybox migrate``, and add the models to Django's state."""

from django.core.serializers.json import DjangoJSONEncoder
from django.db import migrations, models

from relaybox.contrib.django.tables import (
    CreateOutboxTables,
    NamedIndex,
    OutboxJSONField,
    OutboxUUIDField,
    UTCDateTimeField,
    state_of,
)

MODELS = [
    state_of(
        "OutboxDestination",
        "outbox_destination",
        "destination",
        {
            "name": models.CharField(max_length=100, primary_key=True, serialize=False),
            "paused_at": UTCDateTimeField(null=True),
            "paused_until": UTCDateTimeField(null=True),
            "paused_by": models.CharField(max_length=200, null=True),
            "pause_reason": models.TextField(null=True),
            "circuit": models.CharField(default="closed", max_length=20),
            "circuit_until": UTCDateTimeField(null=True),
            "circuit_reason": models.TextField(null=True),
            "rate_at": UTCDateTimeField(null=True),
            "updated_at": UTCDateTimeField(),
        },
    ),
    state_of(
        "OutboxLeader",
        "outbox_leader",
        "leader",
        {
            "name": models.CharField(max_length=50, primary_key=True, serialize=False),
            "relay": models.CharField(max_length=200),
            "term": models.BigIntegerField(),
            "leads_until": UTCDateTimeField(),
        },
    ),
    state_of(
        "OutboxRelay",
        "outbox_relay",
        "relay",
        {
            "name": models.CharField(max_length=200, primary_key=True, serialize=False),
            "host": models.CharField(max_length=255),
            "pid": models.IntegerField(),
            "version": models.CharField(max_length=50),
            "started_at": UTCDateTimeField(),
            "seen_at": UTCDateTimeField(),
            "term": models.BigIntegerField(null=True),
            "leads_until": UTCDateTimeField(null=True),
        },
    ),
    state_of(
        "InboxMessage",
        "inbox_message",
        "processed message",
        {
            "consumer": models.CharField(max_length=100),
            "message_id": models.CharField(
                max_length=255, primary_key=True, serialize=False, verbose_name="message ID"
            ),
            "processed_at": UTCDateTimeField(),
        },
        indexes=[NamedIndex(fields=["processed_at"], name="idx_inbox_message_processed")],
        constraints=[models.UniqueConstraint(fields=("consumer", "message_id"), name="inbox_message_pkey")],
    ),
    state_of(
        "OutboxAttempt",
        "outbox_attempt",
        "failed attempt",
        {
            "delivery_id": OutboxUUIDField(primary_key=True, serialize=False, verbose_name="delivery ID"),
            "attempt": models.IntegerField(),
            "failed_at": UTCDateTimeField(),
            "relay": models.CharField(max_length=200),
            "error_message": models.TextField(),
        },
        constraints=[models.UniqueConstraint(fields=("delivery_id", "attempt"), name="outbox_attempt_pkey")],
    ),
    state_of(
        "OutboxAudit",
        "outbox_audit",
        "operator's action",
        {
            "id": models.BigAutoField(primary_key=True, serialize=False, verbose_name="ID"),
            "at": UTCDateTimeField(),
            "actor": models.CharField(max_length=200),
            "action": models.CharField(max_length=50),
            "details": OutboxJSONField(default=dict, encoder=DjangoJSONEncoder),
            "affected": models.IntegerField(default=0),
        },
        indexes=[NamedIndex(fields=["at"], name="idx_outbox_audit_at")],
    ),
    state_of(
        "OutboxEvent",
        "outbox_event",
        "outbox event",
        {
            "id": OutboxUUIDField(editable=False, primary_key=True, serialize=False, verbose_name="ID"),
            "event_id": OutboxUUIDField(verbose_name="event ID"),
            "destination": models.CharField(max_length=100),
            "aggregate_type": models.CharField(max_length=100),
            "aggregate_id": models.CharField(max_length=255, verbose_name="aggregate ID"),
            "event_type": models.CharField(max_length=100),
            "payload": OutboxJSONField(encoder=DjangoJSONEncoder, null=True),
            "payload_data": models.BinaryField(null=True),
            "payload_encoding": models.CharField(max_length=50, null=True),
            "headers": OutboxJSONField(default=dict, encoder=DjangoJSONEncoder),
            "ordering_key": models.CharField(max_length=255, null=True),
            "position": models.BigIntegerField(editable=False),
            "status": models.CharField(
                choices=[
                    ("pending", "pending"),
                    ("delivered", "delivered"),
                    ("failed", "failed"),
                    ("discarded", "discarded"),
                ],
                default="pending",
                max_length=20,
            ),
            "idempotency_key": models.CharField(max_length=255),
            "attempts": models.IntegerField(default=0),
            "max_attempts": models.IntegerField(default=5),
            "crashes": models.IntegerField(default=0),
            "next_attempt_at": UTCDateTimeField(null=True),
            "leased_until": UTCDateTimeField(null=True),
            "lease_token": OutboxUUIDField(null=True),
            "lease_owner": models.CharField(max_length=200, null=True),
            "created_at": UTCDateTimeField(),
            "updated_at": UTCDateTimeField(),
            "last_attempt_at": UTCDateTimeField(null=True),
            "delivered_at": UTCDateTimeField(null=True),
            "error_message": models.TextField(null=True),
        },
        permissions=(
            ("retry_outboxevent", "Can retry outbox event"),
            ("replay_outboxevent", "Can replay outbox event"),
            ("discard_outboxevent", "Can discard outbox event"),
        ),
        get_latest_by="id",
        indexes=[
            NamedIndex(
                condition=models.Q(("status", "pending")),
                fields=["destination", "next_attempt_at", "position"],
                name="idx_outbox_event_pending_next_attempt",
            ),
            NamedIndex(
                condition=models.Q(("ordering_key__isnull", False), ("status__in", ["pending", "failed"])),
                fields=["destination", "ordering_key", "position"],
                name="idx_outbox_event_key_head",
            ),
            NamedIndex(
                condition=models.Q(("status", "delivered")),
                fields=["destination", "delivered_at"],
                name="idx_outbox_event_delivered",
            ),
            NamedIndex(
                condition=models.Q(("status", "failed")),
                fields=["destination", "position"],
                name="idx_outbox_event_failed",
            ),
            NamedIndex(fields=["aggregate_type", "aggregate_id"], name="idx_outbox_event_aggregate"),
        ],
    ),
    state_of(
        "OutboxIdempotency",
        "outbox_idempotency",
        "idempotency key",
        {
            "event_type": models.CharField(max_length=100),
            "idempotency_key": models.CharField(max_length=255, primary_key=True, serialize=False),
            "event_id": OutboxUUIDField(verbose_name="event ID"),
            "created_at": UTCDateTimeField(),
        },
        indexes=[NamedIndex(fields=["created_at"], name="idx_outbox_idempotency_created")],
        constraints=[
            models.UniqueConstraint(fields=("event_type", "idempotency_key"), name="outbox_idempotency_pkey")
        ],
    ),
    state_of(
        "OutboxStats",
        "outbox_stats",
        "minute of a destination",
        {
            "minute": UTCDateTimeField(primary_key=True, serialize=False),
            "destination": models.CharField(max_length=100),
            "relay": models.CharField(max_length=200),
            "delivered": models.IntegerField(default=0),
            "retried": models.IntegerField(default=0),
            "failed": models.IntegerField(default=0),
            "lag": OutboxJSONField(default=dict, encoder=DjangoJSONEncoder),
        },
        verbose_name_plural="minutes of destinations",
        constraints=[
            models.UniqueConstraint(fields=("minute", "destination", "relay"), name="outbox_stats_pkey")
        ],
    ),
]


class Migration(migrations.Migration):  # type: ignore[misc]
    """Version 1."""

    initial = True

    operations = (migrations.SeparateDatabaseAndState(state_operations=MODELS), CreateOutboxTables(version=1))
