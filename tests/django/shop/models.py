"""What the shop keeps."""

from __future__ import annotations

from django.db import models


class Order(models.Model):
    """An order and its total in cents."""

    total = models.IntegerField()


class Receipt(models.Model):
    """A delivery that arrived: one row each time, so that a second one shows."""

    event_id = models.UUIDField()
    event_type = models.TextField()
