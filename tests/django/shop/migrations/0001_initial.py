"""The shop's tables."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Orders and receipts."""

    initial = True
    dependencies = ()

    operations = (
        migrations.CreateModel(
            name="Order",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("total", models.IntegerField()),
            ],
        ),
        migrations.CreateModel(
            name="Receipt",
            fields=[
                ("id", models.BigAutoField(primary_key=True, serialize=False)),
                ("event_id", models.UUIDField()),
                ("event_type", models.TextField()),
            ],
        ),
    )
