"""What relays say of their destinations."""

from django.core.serializers.json import DjangoJSONEncoder
from django.db import migrations, models

from relaybox.contrib.django.tables import CreateOutboxTables, OutboxJSONField, UTCDateTimeField


class Migration(migrations.Migration):  # type: ignore[misc]
    """Version 3."""

    dependencies = (("relaybox", "0002_samples_and_operations"),)

    operations = (
        migrations.SeparateDatabaseAndState(
            state_operations=[
                migrations.CreateModel(
                    name="OutboxSetting",
                    fields=[
                        ("destination", models.CharField(max_length=100)),
                        ("relay", models.CharField(max_length=200, primary_key=True, serialize=False)),
                        ("setting", OutboxJSONField(default=dict, encoder=DjangoJSONEncoder)),
                        ("said_at", UTCDateTimeField()),
                    ],
                    options={
                        "verbose_name": "setting of a destination",
                        "verbose_name_plural": "settings of destinations",
                        "db_table": "outbox_setting",
                        "default_permissions": ("view",),
                        "constraints": [
                            models.UniqueConstraint(
                                fields=("destination", "relay"), name="outbox_setting_pkey"
                            )
                        ],
                    },
                ),
            ]
        ),
        CreateOutboxTables(version=3),
    )
