"""The admin: what operators see, may do and do, what is asked first and said of it, and what it costs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.contrib.admin import site
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.db import connection, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from relaybox.contrib.django.models import OutboxAudit, OutboxEvent
from tests.django import orders

LIST = "/admin/relaybox/outboxevent/"
XSS = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def _shop(settings: Any, monkeypatch: Any, using: str) -> None:
    orders.open_shop(settings, monkeypatch)
    settings.DATABASE_ROUTERS = [orders.everything_in(using)]


@pytest.fixture
def client(using: str) -> Client:
    return log_in(using)


def log_in(using: str, *permissions: str) -> Client:
    """Log in as a user with these permissions for outbox events, or as a superuser if none are given."""
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


def post(client: Client, action: str, *rows: OutboxEvent, follow: bool = False, **data: Any) -> Any:
    chosen = {"action": action, "_selected_action": [row.pk for row in rows], **data}
    return client.post(LIST, chosen, follow=follow)


def confirm(client: Client, action: str, *rows: OutboxEvent, **data: Any) -> list[str]:
    """Do it; the messages that say what was done."""
    response = post(client, action, *rows, confirmed="yes", follow=True, **data)
    assert response.status_code == 200
    return [str(message) for message in response.context["messages"]]


def status(row: OutboxEvent) -> str:
    row.refresh_from_db()
    return str(row.status)


def of_order(using: str, number: int, event: str = "order.shipped", **options: Any) -> OutboxEvent:
    return orders.emit(using, "order", str(number), event, **options)[0]


def test_the_list_says_where_each_delivery_is_newest_first(using: str, client: Client) -> None:
    orders.delivered(of_order(using, 1))
    orders.failed(of_order(using, 2), "HTTP 422: no such\ncurrency")
    orders.backing_off(of_order(using, 3))
    orders.sending(of_order(using, 4))
    orders.parked(orders.emit(using, "order", "5", "order.paid")[1])
    html = page(client)
    assert listed(html) == [
        ("parked", "order 5", "warehouse"),
        ("due", "order 5", "billing"),
        ("sending", "order 4", "search"),
        ("scheduled", "order 3", "search"),
        ("failed", "order 2", "search"),
        ("delivered", "order 1", "search"),
    ]
    assert "2 of 5" in html
    assert re.search(r">in [34]\xa0min</time>", html)
    assert "HTTP 422: no such currency" in html


def test_the_list_is_filtered_by_state(using: str, client: Client) -> None:
    orders.delivered(of_order(using, 1))
    orders.failed(of_order(using, 2))
    orders.backing_off(of_order(using, 3))
    orders.sending(of_order(using, 4))
    of_order(using, 5)
    expected = {
        "failed": "2",
        "pending": "53",
        "due": "5",
        "scheduled": "3",
        "sending": "4",
        "delivered": "1",
    }
    for state, numbers in {**expected, "discarded": ""}.items():
        shown = [row[1] for row in listed(page(client, status=state))]
        assert shown == [f"order {number}" for number in numbers], state


def test_the_list_is_filtered_by_destination_and_time(using: str, client: Client) -> None:
    paid = orders.emit(using, "order", "1", "order.paid")
    orders.change(paid[0], created_at=datetime.now(UTC) - timedelta(hours=3))
    orders.change(paid[1], destination="gone")
    assert [row[2] for row in listed(page(client, destination="gone"))] == ["gone"]
    assert [row[2] for row in listed(page(client, emitted="1h"))] == ["gone"]
    assert len(listed(page(client, emitted="24h"))) == 2
    html = page(client)
    for name in ("billing", "gone", "search", "warehouse"):
        assert f'?destination={name}"' in html


def test_what_cannot_be_asked_leads_back_to_the_list(using: str, client: Client) -> None:
    for query in ("status=bogus", "destination=nowhere", "p=2", "payload=x", "emitted=1y"):
        response = client.get(f"{LIST}?{query}")
        assert (response.status_code, response["Location"]) == (302, f"{LIST}?e=1"), query
    assert client.get(LIST, {"e": "1"}).status_code == 200


def test_an_aggregate_or_an_event_type_is_searched_for(using: str, client: Client) -> None:
    of_order(using, 17)
    of_order(using, 170)
    orders.emit(using, "customer", "17", "customer.renamed")
    for query in ("order 17", "order:17", "  order   17 "):
        assert [row[1] for row in listed(page(client, q=query))] == ["order 17"], query
    assert [row[1] for row in listed(page(client, q="customer.renamed"))] == ["customer 17"]
    assert listed(page(client, q="order.")) == []


def test_an_event_is_searched_for_by_its_id_or_that_of_a_delivery(using: str, client: Client) -> None:
    rows = orders.emit(using, "order", "1", "order.paid")
    of_order(using, 2)
    for id_ in {rows[0].event_id, rows[0].pk, rows[1].pk}:
        assert sorted(row[2] for row in listed(page(client, q=str(id_)))) == ["billing", "warehouse"]
    assert [row[2] for row in listed(page(client, q=str(rows[0].pk), destination="billing"))] == ["billing"]
    assert listed(page(client, q=str(uuid4()))) == []


def test_pages_follow_each_other_by_cursor(using: str, client: Client, monkeypatch: Any) -> None:
    monkeypatch.setattr(site._registry[OutboxEvent], "list_per_page", 3)
    for number in range(8):
        of_order(using, number)
    found, query = [], "?status=due"
    for _ in range(3):
        html = page(client, f"{LIST}{query}")
        found.append([row[1] for row in listed(html)])
        older = re.search(r'<a href="([^"]+)">Older', html)
        query = unescape(older[1]) if older else ""
        assert bool(re.search(r'<a href="\?status=due">« Newest', html)) is (len(found) > 1)
    assert found == [
        ["order 7", "order 6", "order 5"],
        ["order 4", "order 3", "order 2"],
        ["order 1", "order 0"],
    ]
    assert query == ""


def test_the_page_of_a_delivery_tells_all_of_it(using: str, client: Client) -> None:
    payload = {"lines": [{"sku": "KB-87"}], "total": 1234567890123456789}
    billing, warehouse = orders.emit(using, "order", "1", "order.paid", payload, headers={"tenant": "acme"})
    orders.failed(billing, "HTTP 422: no such currency", 3)
    html = page(client, detail(billing))
    assert "  ],\n  &quot;total&quot;: 1234567890123456789\n}" in html
    assert "&quot;tenant&quot;: &quot;acme&quot;" in html
    said = text(html)
    assert "failed at" in said
    assert "after 3 attempts: HTTP 422: no such currency" in said
    assert f"manage.py outbox retry {billing.pk}" in said
    assert html.count("<pre>HTTP 422: no such currency</pre>") == 3
    assert detail(warehouse) in html
    assert detail(billing) in page(client, detail(warehouse))


def test_bytes_are_counted_and_a_bare_number_is_shown(using: str, client: Client) -> None:
    row = of_order(using, 1)
    orders.change(row, payload=None, payload_data=b"\x00" * 2048, payload_encoding="zstd")
    assert "2,048 bytes of zstd" in page(client, detail(row))
    assert "<pre>42</pre>" in page(client, detail(of_order(using, 2, payload=42)))


def test_what_others_wrote_is_text_and_nothing_more(using: str, client: Client) -> None:
    [row] = orders.emit(using, f"o{XSS}", f"1{XSS}", "order.shipped", {XSS: XSS}, headers={"x": XSS})
    orders.failed(row, f"HTTP 422: {XSS}")
    other = of_order(using, 1)
    orders.change(other, destination=XSS, ordering_key=XSS)
    for html in (
        page(client),
        page(client, q=f"o{XSS} 1{XSS}"),
        page(client, detail(row)),
        page(client, detail(other)),
        post(client, "retry", row, other).content.decode(),
        client.get(f"{LIST}?status={XSS}", follow=True).content.decode(),
    ):
        assert "alert(1)" in html or "Outbox events" in html
        assert XSS not in html
    [done, *_] = confirm(client, "discard", other)
    assert done == f"Discarded 1 to {XSS}."
    assert XSS not in page(client)


def test_what_is_secret_is_on_no_page(using: str, client: Client, settings: Any) -> None:
    settings.OUTBOX = {**orders.OUTBOX, "REDACT": ["customer.email"]}
    payload = {"pin": "hush", "customer": {"email": "hush"}, "at": "amqp://me:hush@host", "total": 17}
    headers = {"authorization": "Bearer hush", "tenant": "acme"}
    [billing, _] = orders.emit(using, "order", "1", "order.paid", payload, headers=headers)
    orders.failed(billing, "401: customer.email=hush password=hush at amqp://me:hush@host", 3)
    [search] = orders.emit(using, "order", "2", "order.shipped", payload)
    orders.tried(search, "X-Auth: hush", 1)
    shown = [page(client), page(client, detail(billing)), page(client, detail(search))]
    shown += [post(client, "retry", billing).content.decode()]
    for html in shown:
        assert "hush" not in html
        assert "•••" in html
    assert "&quot;total&quot;: 17" in shown[1]
    assert "&quot;tenant&quot;: &quot;acme&quot;" in shown[1]


def test_a_delivery_that_is_not_there_leads_to_the_index(using: str, client: Client) -> None:
    for id_ in (UUID(int=7), "no-uuid"):
        response = client.get(f"{LIST}{id_}/change/", follow=True)
        assert response.redirect_chain[-1][0] == reverse("admin:index")
        assert "Perhaps it was deleted?" in response.content.decode()


def test_nobody_adds_changes_or_deletes(using: str, client: Client) -> None:
    row = of_order(using, 1)
    assert client.get(f"{LIST}add/").status_code == 403
    assert client.post(detail(row), {"status": "delivered"}).status_code == 405
    assert client.post(f"{LIST}{row.pk}/delete/", {"post": "yes"}).status_code == 403
    assert "delete_selected" not in page(client)
    assert status(row) == "pending"


def test_a_list_of_any_length_takes_the_same_queries_and_counts_nothing(using: str, client: Client) -> None:
    def asked() -> list[str]:
        with CaptureQueriesContext(connections[using]) as queries:
            page(client)
        return [query["sql"] for query in queries]

    orders.morning(using, orders=20)
    asked()
    some = asked()
    orders.morning(using, orders=20)
    more = asked()
    assert len(some) == len(more)
    assert not [sql for sql in more if "COUNT(" in sql.upper() and "LIMIT" not in sql.upper()]


CROWD = """
INSERT INTO outbox_event (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload,
  headers, status, idempotency_key, next_attempt_at, delivered_at)
SELECT id, id, destination, 'order', (n / 3)::text, 'order.placed', '{}', '{}', status, id::text,
  CASE status WHEN 'pending' THEN now() END, CASE status WHEN 'delivered' THEN now() END
FROM (SELECT n, lpad(to_hex(1700000000000 + n), 12, '0') || '7' || substr(md5(n::text), 14, 3) || '8'
  || substr(md5(n::text), 18, 15) AS hex, (ARRAY['billing', 'search', 'warehouse'])[n % 3 + 1] AS destination,
  CASE WHEN n % 500 = 0 THEN 'failed' WHEN n % 100 = 0 THEN 'pending' ELSE 'delivered' END AS status
  FROM generate_series(1, 30000) AS n) AS made, LATERAL (SELECT hex::uuid AS id) AS ids"""
"""Enough rows for a planner to prefer an index."""


@pytest.mark.parametrize("using", ["default"], indirect=True)
def test_no_query_of_a_list_scans_the_table(using: str, client: Client) -> None:
    plans: list[str] = []

    def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "outbox_event" in sql and sql.lstrip().upper().startswith("SELECT"):
            with connection.connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN {sql}", params)
                plans.append("\n".join(row[0] for row in cursor.fetchall()))
        return execute(sql, params, many, context)

    with connection.cursor() as cursor:
        cursor.execute(CROWD)
        cursor.execute("ANALYZE outbox_event")
    for query in (
        "",
        "status=failed",
        "status=pending&destination=billing",
        "status=sending",
        "status=discarded",
        "destination=search&emitted=24h",
        "q=order+17",
        "q=order.placed",
        f"q={UUID(int=7)}",
    ):
        plans.clear()
        with connection.execute_wrapper(explain):
            page(client, f"{LIST}?{query}")
        assert plans, query
        assert not [plan for plan in plans if "Seq Scan on outbox_event" in plan], query


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
    assert "Not changed: 1" in html
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
    assert "Retried in the admin." in page(client, f"{LIST}{billing.pk}/history/")


def test_discard_leaves_what_is_being_sent(using: str, client: Client) -> None:
    busy, idle = orders.sending(of_order(using, 1)), of_order(using, 2)
    done, left = confirm(client, "discard", busy, idle)
    assert done == "Discarded 1 to search."
    assert left.startswith("Not changed: 1 delivery. Deliveries that are being sent")
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
    [message] = post(client, "retry", row, follow=True).context["messages"]
    assert str(message).startswith("Not changed: 1 delivery. Only deliveries that failed")


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


def test_an_action_on_what_is_not_there_changes_nothing(using: str, client: Client) -> None:
    row = orders.failed(of_order(using, 1))
    for selected in ("no-uuid", str(UUID(int=7))):
        chosen = {"action": "retry", "confirmed": "yes", "_selected_action": selected}
        response = client.post(LIST, chosen, follow=True)
        assert response.status_code == 200
        assert len(list(response.context["messages"])) == 1
        assert status(row) == "failed"


def test_a_request_for_everything_across_pages_is_about_what_it_names(using: str, client: Client) -> None:
    rows = [orders.failed(of_order(using, number)) for number in range(3)]
    confirm(client, "discard", rows[0], select_across="1", index="0")
    assert [status(row) for row in rows] == ["discarded", "failed", "failed"]
