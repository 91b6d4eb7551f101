"""What the shop's workers do."""

from __future__ import annotations

from typing import Any

from celery import shared_task

from relaybox.contrib.django.celery import OutboxTask
from tests.django.shop.models import Order


@shared_task(base=OutboxTask)
def ship(order: int, **about: Any) -> None:
    """Write an order, from a transaction's own task."""
    Order.objects.create(total=order)


@shared_task(base=OutboxTask)
def lose(order: int) -> None:
    """Fail."""
    raise ZeroDivisionError
