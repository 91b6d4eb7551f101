"""The admin's actions: who may do what, what is asked first, what is done and what is said of it."""

from __future__ import annotations

import re
from html import unescape
from typing import Any
from uuid import UUID

import pytest
from django.contrib.admin.models import LogEntry
from django.test import Client

from relaybox.contrib.django.models import OutboxAudit, OutboxEvent
from tests.django import orders
from tests.django.browsing import LIST, confirm, detail, log_in, of_order, page, post, status, text


@pytest.fixture(autouse=True)
def _shop(settings: Any, monkeypatch: Any, using: str) -> None:
    orders.open_shop(settings, monkeypatch)
    settings.DATABASE_ROUTERS = [orders.Everything(using)]


@pytest.fixture
def client(using: str) -> Client:
    return log_in(using)


def test_who_may_only_view_sees_no_actions_and_does_none(using: str) -> None:
    viewer = log_in(using, "view")
    row = orders.failed(of_order(using, 1))
    assert 'name="action"' not in page(viewer)
    assert 'name="action"' not in page(viewer, detail(row))
    confirm(viewer, "retry", row)
    assert status(row) == "failed"


def test_each_action_has_its_own_permission(using: str) -> None:
    client = log_in(using, "view", "retry")
    row = orders.failed(of_order(using, 1))
    assert re.findall(r'<option value="(\w+)"', page(client)) == ["retry"]
    assert re.findall(r'name="action" value="(\w+)"', page(client, detail(row))) == ["retry"]
    confirm(client, "discard", row)
    assert status(row) == "failed"
    confirm(client, "retry", row)
    assert status(row) == "pending"


def test_who_may_not_view_sees_nothing(using: str) -> None:
    client = log_in(using, "retry")
    row = orders.failed(of_order(using, 1))
    assert client.get(LIST).status_code == 403
    assert client.get(detail(row)).status_code == 403
    assert post(client, "retry", row, confirmed="yes").status_code == 403
    assert status(row) == "failed"
    anonymous = Client().get(LIST)
    assert (anonymous.status_code, "/login/" in anonymous["Location"]) == (302, True)


def test_an_action_needs_a_token_of_the_form(using: str, client: Client) -> None:
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = client.cookies
    row = orders.failed(of_order(using, 1))
    assert post(strict, "retry", row, confirmed="yes").status_code == 403
    assert status(row) == "failed"


def test_an_action_is_confirmed_first(using: str, client: Client) -> None:
    billing, search, _ = orders.emit(using, "order", "1", "order.placed")
    orders.failed(billing)
    orders.failed(search)
    due = of_order(using, 2)
    html = post(client, "retry", billing, search, due).content.decode()
    assert "Retry 2 deliveries?" in text(html)
    assert "1 to billing, 1 to search" in html
    assert "Left as it is: 1" in html
    assert set(re.findall(r'name="_selected_action" value="([^"]+)"', html)) == {
        str(billing.pk),
        str(search.pk),
    }
    assert (status(billing), status(search)) == ("failed", "failed")
    assert not OutboxAudit.objects.using(using).exists()


def test_retry_is_done_said_and_audited(using: str, client: Client) -> None:
    billing, search, warehouse = orders.emit(using, "order", "1", "order.placed")
    for row in (billing, search, warehouse):
        orders.failed(row)
    assert confirm(client, "retry", billing, search) == ["Retried 1 to billing, 1 to search."]
    assert [status(row) for row in (billing, search, warehouse)] == ["pending", "pending", "failed"]
    assert billing.attempts == 0
    audit = OutboxAudit.objects.using(using).get()
    assert (audit.actor, audit.action, audit.affected) == ("ada", "retry", 2)
    assert LogEntry.objects.using(using).count() == 2
    assert "Retried by way of the admin." in page(client, f"{LIST}{billing.pk}/history/")


def test_discard_leaves_what_is_being_sent(using: str, client: Client) -> None:
    busy, idle = orders.sending(of_order(using, 1)), of_order(using, 2)
    done, left = confirm(client, "discard", busy, idle)
    assert done == "Discarded 1 to search."
    assert left.startswith("Left 1 as it is. What is being sent")
    assert (status(busy), status(idle)) == ("pending", "discarded")


def test_replay_writes_a_new_delivery_and_the_next_action_leaves_it_alone(using: str, client: Client) -> None:
    row = orders.delivered(of_order(using, 1))
    assert confirm(client, "replay", row) == ["Replayed 1 to search."]
    assert status(row) == "delivered"
    copy = OutboxEvent.objects.using(using).exclude(pk=row.pk).get()
    assert (copy.event_id, copy.status) == (row.event_id, "pending")
    orders.delivered(copy)
    confirm(client, "replay", row)
    assert OutboxEvent.objects.using(using).count() == 3


def test_an_action_that_nothing_is_ready_for_says_so_at_once(using: str, client: Client) -> None:
    row = orders.delivered(of_order(using, 1))
    response = client.post(LIST, {"action": "retry", "_selected_action": str(row.pk)}, follow=True)
    [message] = response.context["messages"]
    assert str(message).startswith("Left 1 as it is. Only deliveries that failed")


def test_the_page_of_a_delivery_offers_what_can_be_done_and_is_returned_to(
    using: str, client: Client
) -> None:
    row = orders.failed(of_order(using, 1))
    html = page(client, detail(row), _changelist_filters="status=failed")
    assert re.findall(r'name="action" value="(\w+)"', html) == ["retry", "replay", "discard"]
    [address] = re.findall(r'<form method="post" action="(/admin/relaybox[^"]+)"', html)
    assert unescape(address) == f"{LIST}?status=failed"
    kept = unescape(re.findall(r'name="from_detail" value="([^"]*)"', html)[0])
    data = {"action": "retry", "_selected_action": str(row.pk), "from_detail": kept}
    assert "Retry 1 delivery?" in text(client.post(unescape(address), data).content.decode())
    response = client.post(unescape(address), {**data, "confirmed": "yes"})
    assert response["Location"] == f"{detail(row)}?_changelist_filters=status%3Dfailed"
    assert status(row) == "pending"
    assert re.findall(r'name="action" value="(\w+)"', page(client, detail(row))) == ["discard"]


@pytest.mark.parametrize(
    "selected", [{"_selected_action": "no-uuid"}, {"_selected_action": str(UUID(int=7))}]
)
def test_an_action_on_what_is_not_there_changes_nothing(
    using: str, client: Client, selected: dict[str, str]
) -> None:
    row = orders.failed(of_order(using, 1))
    response = client.post(LIST, {"action": "retry", "confirmed": "yes", **selected}, follow=True)
    assert response.status_code == 200
    assert len(list(response.context["messages"])) == 1
    assert status(row) == "failed"


def test_a_request_for_everything_across_pages_is_about_what_it_names(using: str, client: Client) -> None:
    rows = [orders.failed(of_order(using, number)) for number in range(3)]
    confirm(client, "discard", rows[0], select_across="1", index="0")
    assert [status(row) for row in rows] == ["discarded", "failed", "failed"]
