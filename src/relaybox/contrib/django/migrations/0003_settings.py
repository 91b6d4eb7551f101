"""What relays report of their destinations' settings."""

from django.core.serializers.json import DjangoJSONEncoder
from django.db import migrations, models

from relaybox.contrib.django.tables import CreateOutboxTables, OutboxJSONField, UTCDateTimeField, state_of

MODELS = [
    state_of(
        "OutboxSetting",
        "outbox_setting",
        "setting of a destination",
        {
            "destination": models.CharField(max_length=100),
            "relay": models.CharField(max_length=200, primary_key=True, serialize=False),
            "setting": OutboxJSONField(default=dict, encoder=DjangoJSONEncoder),
            "said_at": UTCDateTimeField(),
        },
        verbose_name_plural="settings of destinations",
        constraints=[models.UniqueConstraint(fields=("destination", "relay"), name="outbox_setting_pkey")],
    )
]


class Migration(migrations.Migration):  # type: ignore[misc]
    """Version 3."""

    dependencies = (("relaybox", "0002_samples_and_operations"),)

    operations = (migrations.SeparateDatabaseAndState(state_operations=MODELS), CreateOutboxTables(version=3))
