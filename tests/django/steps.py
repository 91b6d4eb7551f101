"""What many tests do: emit orders and look at them, call commands, and put functions in handlers' places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import StringIO
from typing import Any

from django.core.management import call_command
from django.db import transaction

from relaybox.contrib.django import emit_event
from relaybox.contrib.django.conf import forget
from relaybox.contrib.django.handlers import registered
from relaybox.contrib.django.models import OutboxEvent
from tests.django.project.celery import app
from tests.django.shop.models import Order

NOBODY = "redis://127.0.0.1:1/0"
"""A broker that refuses."""


def place(using: str = "default", number: int = 1, event_type: str = "order.placed", **options: Any) -> Any:
    """Emit an event of an order, in a transaction of its own."""
    with transaction.atomic(using=using):
        return emit_event("order", number, event_type, {"number": number}, using=using, **options)


def events(using: str = "default") -> Any:
    """Return the rows of the outbox, oldest first."""
    return OutboxEvent.objects.using(using).order_by("position")


def statuses(using: str = "default") -> list[str]:
    """Return the status of each row, oldest first."""
    return list(events(using).values_list("status", flat=True))


def orders(using: str = "default") -> Any:
    """Return the orders of the shop."""
    return Order.objects.using(using)


def totals(using: str = "default") -> list[int]:
    """Return the total of each order."""
    return list(orders(using).values_list("total", flat=True))


def command(*arguments: str, **options: Any) -> str:
    """Return what ``manage.py outbox`` prints."""
    stdout = StringIO()
    call_command("outbox", *arguments, stdout=stdout, **options)
    return stdout.getvalue()


@contextmanager
def eager(*, propagates: bool = False) -> Iterator[None]:
    """Tasks run where they are called, as many projects have it in their tests."""
    before = app.conf.task_always_eager, app.conf.task_eager_propagates
    app.conf.task_always_eager, app.conf.task_eager_propagates = True, propagates
    try:
        yield
    finally:
        app.conf.task_always_eager, app.conf.task_eager_propagates = before


@contextmanager
def handled_by(function: Callable[..., Any], name: str = "memory") -> Iterator[None]:
    """Replace this handler of the shop with the function."""
    before = registered[name]
    registered[name] = before._replace(function=function)
    forget()
    try:
        yield
    finally:
        registered[name] = before
        forget()
