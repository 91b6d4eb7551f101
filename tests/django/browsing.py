"""A browser without a window for the admin, and what its pages say."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from uuid import UUID

from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

from relaybox.contrib.django.models import OutboxEvent
from tests.django import orders

LIST = "/admin/relaybox/outboxevent/"


def log_in(using: str, *permissions: str) -> Client:
    """As somebody who has these permissions of outbox events; without any: as a superuser."""
    users = get_user_model().objects.db_manager(using)
    if permissions:
        user = users.create(username="vera", is_staff=True)
        names = [f"{name}_outboxevent" for name in permissions]
        user.user_permissions.set(Permission.objects.using(using).filter(codename__in=names))
    else:
        user = users.create(username="ada", is_staff=True, is_superuser=True)
    client = Client()
    client.force_login(user)
    return client


def page(client: Client, path: str = LIST, **query: str) -> str:
    response = client.get(path, query)
    assert response.status_code == 200, response
    return str(response.content.decode())


def listed(html: str) -> list[tuple[str, str, str]]:
    """State, aggregate and destination of each row."""
    cells = {
        name: [text(cell) for cell in re.findall(rf'class="field-{name}[^"]*">(.*?)</t[dh]>', html, re.S)]
        for name in ("state", "aggregate", "destination")
    }
    return list(zip(*cells.values(), strict=True))


def text(html: str) -> str:
    return unescape(re.sub(r"<[^>]+>", "", html)).strip()


def detail(row: OutboxEvent | UUID) -> str:
    return f"{LIST}{getattr(row, 'pk', row)}/change/"


def post(client: Client, action: str, *rows: OutboxEvent, **data: Any) -> Any:
    return client.post(LIST, {"action": action, "_selected_action": [row.pk for row in rows], **data})


def confirm(client: Client, action: str, *rows: OutboxEvent, **data: Any) -> list[str]:
    """Do it; the messages that say what was done."""
    response = client.post(
        LIST,
        {"action": action, "_selected_action": [row.pk for row in rows], "confirmed": "yes", **data},
        follow=True,
    )
    assert response.status_code == 200
    return [str(message) for message in response.context["messages"]]


def status(row: OutboxEvent) -> str:
    row.refresh_from_db()
    return str(row.status)


def of_order(using: str, number: int, event: str = "order.shipped", **options: Any) -> OutboxEvent:
    return orders.emit(using, "order", str(number), event, **options)[0]
