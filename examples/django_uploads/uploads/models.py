"""What is known of a file."""

from django.db import models


class Upload(models.Model):
    """A file that was uploaded, and what the runner found in it."""

    class State(models.TextChoices):
        """How far it is."""

        STORED = "stored"
        PROCESSED = "processed"

    name = models.CharField(max_length=255)
    size = models.PositiveBigIntegerField()
    sha256 = models.CharField(max_length=64)
    file = models.FileField(upload_to="uploads/")
    state = models.CharField(max_length=20, choices=State.choices, default=State.STORED)
    words = models.PositiveBigIntegerField(null=True)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name
