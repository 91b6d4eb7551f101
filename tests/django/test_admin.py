"""The admin: what operators see, may do and do, and what it costs."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from html import unescape
from typing import Any
from uuid import UUID, uuid4

import pytest
from django.contrib.admin import site
from django.db import connection, connections
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from relaybox.contrib.django.models import OutboxEvent
from tests.django import orders
from tests.django.browsing import LIST, confirm, detail, listed, log_in, of_order, page, post, status, text

XSS = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def _shop(settings: Any, monkeypatch: Any, using: str) -> None:
    orders.open_shop(settings, monkeypatch)
    settings.DATABASE_ROUTERS = [orders.Everything(using)]


@pytest.fixture
def client(using: str) -> Client:
    return log_in(using)


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


@pytest.mark.parametrize(
    ("state", "numbers"),
    [
        ("failed", [2]),
        ("pending", [5, 3]),
        ("due", [5]),
        ("scheduled", [3]),
        ("sending", [4]),
        ("delivered", [1]),
        ("discarded", []),
    ],
)
def test_the_list_is_filtered_by_state(using: str, client: Client, state: str, numbers: list[int]) -> None:
    orders.delivered(of_order(using, 1))
    orders.failed(of_order(using, 2))
    orders.backing_off(of_order(using, 3))
    orders.sending(of_order(using, 4))
    of_order(using, 5)
    assert [row[1] for row in listed(page(client, status=state))] == [f"order {n}" for n in numbers]


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


@pytest.mark.parametrize(
    "query",
    [{"status": "bogus"}, {"destination": "nowhere"}, {"p": "2"}, {"payload": "x"}, {"emitted": "1y"}],
)
def test_what_cannot_be_asked_leads_back_to_the_list(
    using: str, client: Client, query: dict[str, str]
) -> None:
    response = client.get(LIST, query)
    assert (response.status_code, response["Location"]) == (302, f"{LIST}?e=1")
    assert client.get(LIST, {"e": "1"}).status_code == 200


@pytest.mark.parametrize("query", ["order 17", "order:17", "  order   17 "])
def test_an_aggregate_is_searched_for(using: str, client: Client, query: str) -> None:
    of_order(using, 17)
    of_order(using, 170)
    orders.emit(using, "customer", "17", "customer.renamed")
    assert [row[1] for row in listed(page(client, q=query))] == ["order 17"]


def test_an_event_is_searched_for_by_its_id_or_that_of_a_delivery(using: str, client: Client) -> None:
    rows = orders.emit(using, "order", "1", "order.paid")
    of_order(using, 2)
    for id_ in {rows[0].event_id, rows[0].pk, rows[1].pk}:
        assert sorted(row[2] for row in listed(page(client, q=str(id_)))) == ["billing", "warehouse"]
    assert [row[2] for row in listed(page(client, q=str(rows[0].pk), destination="billing"))] == ["billing"]
    assert listed(page(client, q=str(uuid4()))) == []


def test_an_event_type_is_searched_for(using: str, client: Client) -> None:
    of_order(using, 1)
    orders.emit(using, "order", "2", "order.paid")
    assert [row[1] for row in listed(page(client, q="order.shipped"))] == ["order 1"]
    assert listed(page(client, q="order.")) == []


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


@pytest.mark.parametrize("id_", [str(UUID(int=7)), "no-uuid"])
def test_a_delivery_that_is_not_there_leads_to_the_index(using: str, client: Client, id_: str) -> None:
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


@pytest.fixture
def crowd() -> int:
    """Enough rows for a planner to prefer an index."""
    with connection.cursor() as cursor:
        cursor.execute("""
INSERT INTO outbox_event (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload,
  headers, status, idempotency_key, next_attempt_at, delivered_at)
SELECT id, id, destination, 'order', (n / 3)::text, 'order.placed', '{}', '{}', status, id::text,
  CASE status WHEN 'pending' THEN now() END, CASE status WHEN 'delivered' THEN now() END
FROM (SELECT n, lpad(to_hex(1700000000000 + n), 12, '0') || '7' || substr(md5(n::text), 14, 3) || '8'
  || substr(md5(n::text), 18, 15) AS hex, (ARRAY['billing', 'search', 'warehouse'])[n % 3 + 1] AS destination,
  CASE WHEN n % 500 = 0 THEN 'failed' WHEN n % 100 = 0 THEN 'pending' ELSE 'delivered' END AS status
  FROM generate_series(1, 30000) AS n) AS made, LATERAL (SELECT hex::uuid AS id) AS ids""")
        cursor.execute("ANALYZE outbox_event")
    return 30_000


@pytest.mark.parametrize("using", ["default"], indirect=True)
@pytest.mark.parametrize(
    "query",
    [
        {},
        {"status": "failed"},
        {"status": "pending", "destination": "billing"},
        {"status": "sending"},
        {"status": "discarded"},
        {"destination": "search", "emitted": "24h"},
        {"q": "order 17"},
        {"q": "order.placed"},
        {"q": str(UUID(int=7))},
    ],
    ids=str,
)
def test_no_query_of_a_list_scans_the_table(
    using: str, client: Client, crowd: int, query: dict[str, str]
) -> None:
    plans: list[str] = []

    def explain(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "outbox_event" in sql and sql.lstrip().upper().startswith("SELECT"):
            with connections[using].connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN {sql}", params)
                plans.append("\n".join(row[0] for row in cursor.fetchall()))
        return execute(sql, params, many, context)

    with connections[using].execute_wrapper(explain):
        page(client, **query)
    assert plans
    assert not [plan for plan in plans if "Seq Scan on outbox_event" in plan]
