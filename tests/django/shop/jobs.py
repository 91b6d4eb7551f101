"""What the shop does by Django's tasks."""

from __future__ import annotations

from typing import Any

from asgiref.sync import sync_to_async

from relaybox import Reject
from tests.django.shop.models import Order

try:
    from django.tasks import TaskContext, task
except ImportError:
    from django_tasks import TaskContext, task


@task
def pack(total: int, using: str = "default") -> int:
    """Write an order."""
    Order.objects.using(using).create(total=total)
    return total


@task
async def apack(total: int, using: str = "default") -> None:
    """Do the same in an asynchronous task."""
    await sync_to_async(Order.objects.using(using).create)(total=total)


@task(takes_context=True)
def stubborn(context: TaskContext, using: str) -> None:
    """Succeed in the second attempt."""
    if context.attempt < 2:
        raise ZeroDivisionError("not yet")
    Order.objects.using(using).create(total=context.attempt)


@task
def refuse(reason: str) -> None:
    """Fail for good."""
    raise Reject(reason)


def no_task(*args: Any) -> None:
    """Fail: it must not be called."""
    raise AssertionError
