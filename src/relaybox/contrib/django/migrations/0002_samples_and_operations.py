"""Samples for the charts, and bulk actions that run in the background."""

from django.core.serializers.json import DjangoJSONEncoder
from django.db import migrations, models

from relaybox.contrib.django.tables import (
    CreateOutboxTables,
    OutboxJSONField,
    OutboxUUIDField,
    UTCDateTimeField,
    state_of,
)

MODELS = [
    state_of(
        "OutboxOperation",
        "outbox_operation",
        "operation",
        {
            "id": OutboxUUIDField(editable=False, primary_key=True, serialize=False, verbose_name="ID"),
            "action": models.CharField(max_length=50),
            "actor": models.CharField(max_length=200),
            "details": OutboxJSONField(default=dict, encoder=DjangoJSONEncoder),
            "state": models.CharField(default="running", max_length=20),
            "total": models.IntegerField(null=True),
            "capped": models.IntegerField(default=0),
            "done": models.IntegerField(default=0),
            "skipped": models.IntegerField(default=0),
            "started_at": UTCDateTimeField(),
            "updated_at": UTCDateTimeField(),
            "finished_at": UTCDateTimeField(null=True),
            "error": models.TextField(null=True),
        },
    ),
    state_of(
        "OutboxSample",
        "outbox_sample",
        "sample of a destination",
        {
            "minute": UTCDateTimeField(primary_key=True, serialize=False),
            "destination": models.CharField(max_length=100),
            "pending": models.IntegerField(default=0),
            "failed": models.IntegerField(default=0),
            "oldest_seconds": models.FloatField(null=True),
            "position": models.BigIntegerField(null=True),
        },
        verbose_name_plural="samples of destinations",
        constraints=[models.UniqueConstraint(fields=("minute", "destination"), name="outbox_sample_pkey")],
    ),
]


class Migration(migrations.Migration):  # type: ignore[misc]
    """Version 2."""

    dependencies = (("relaybox", "0001_initial"),)

    operations = (migrations.SeparateDatabaseAndState(state_operations=MODELS), CreateOutboxTables(version=2))
