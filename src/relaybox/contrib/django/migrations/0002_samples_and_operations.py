"""Samples for the charts, and bulk actions that run in the background."""

from django.db import migrations

from relaybox.contrib.django.tables import CreateOutboxTables, state_of

MODELS = [state_of("operation"), state_of("sample")]


class Migration(migrations.Migration):  # type: ignore[misc]
    """Version 2."""

    dependencies = (("relaybox", "0001_initial"),)

    operations = (migrations.SeparateDatabaseAndState(state_operations=MODELS), CreateOutboxTables(version=2))
