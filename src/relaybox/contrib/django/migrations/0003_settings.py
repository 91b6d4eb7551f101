"""What relays report of their destinations' settings."""

from django.db import migrations

from relaybox.contrib.django.tables import CreateOutboxTables, state_of

MODELS = [state_of("setting")]


class Migration(migrations.Migration):  # type: ignore[misc]
    """Version 3."""

    dependencies = (("relaybox", "0002_samples_and_operations"),)

    operations = (migrations.SeparateDatabaseAndState(state_operations=MODELS), CreateOutboxTables(version=3))
