"""Create the tables with the statements of ``relaybox migrate``, and add the models to Django's state."""

from django.db import migrations, models

from relaybox.contrib.django.tables import EVENT_PERMISSIONS, CreateOutboxTables, state_of

STATUSES = [(name, name) for name in ("pending", "delivered", "failed", "discarded")]
SIDE_TABLES = ("destination", "leader", "relay", "inbox", "attempt", "audit", "idempotency", "stats")
MODELS = [
    *map(state_of, SIDE_TABLES),
    state_of(
        "event",
        own={"status": models.CharField(choices=STATUSES, default="pending", max_length=20)},
        permissions=EVENT_PERMISSIONS,
        get_latest_by="id",
    ),
]


class Migration(migrations.Migration):  # type: ignore[misc]
    """Version 1."""

    initial = True

    operations = (migrations.SeparateDatabaseAndState(state_operations=MODELS), CreateOutboxTables(version=1))
