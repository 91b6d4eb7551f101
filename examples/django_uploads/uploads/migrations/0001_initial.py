"""The table of uploads."""

from django.db import migrations, models

STATES = [("stored", "Stored"), ("processed", "Processed")]


class Migration(migrations.Migration):
    """As ``makemigrations`` writes it."""

    initial = True
    operations = (
        migrations.CreateModel(
            name="Upload",
            fields=[
                (
                    "id",
                    models.BigAutoField(
                        auto_created=True, primary_key=True, serialize=False, verbose_name="ID"
                    ),
                ),
                ("name", models.CharField(max_length=255)),
                ("size", models.PositiveBigIntegerField()),
                ("sha256", models.CharField(max_length=64)),
                ("file", models.FileField(upload_to="uploads/")),
                ("state", models.CharField(choices=STATES, default="stored", max_length=20)),
                ("words", models.PositiveBigIntegerField(null=True)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
            ],
        ),
    )
