"""Whatever events, errors and people say is shown as text, and runs nowhere."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import sqlalchemy as sa
from playwright.sync_api import Page, expect

from relaybox import Destination, Outbox
from relaybox.web import dashboard
from tests.browser.site import served
from tests.databases import engine as engine_of

OpenPage = Callable[..., Page]
EVIL = "<img src=x onerror=alert(1)>"
QUOTES = "\"'><script>alert(2)</script>{{7*7}}`</code>"


def test_evil_in_every_field_is_inert(migrated_database: Callable[[str], str], open_page: OpenPage) -> None:
    database = migrated_database("postgresql-18")
    outbox = Outbox(
        database,
        destinations=[Destination("good", "memory:", dead_letter="dead"), Destination("dead", "memory:")],
    )
    rows = write(outbox, engine_of(database))
    paths = ["/", "/destinations", "/events", "/failures", "/dead-letters", "/operations", "/relays"]
    paths += ["/audit", "/system"]
    paths += [f"/events/{row['id']}" for row in rows] + [f"/events?destination={EVIL}&error={QUOTES}"]
    paths += [
        "/destinations/%3Cimg%20src=x%20onerror=alert(1)%3E",
        f"/nothing/{EVIL}",
        f"/actions/confirm?action=retry&error={QUOTES}",
    ]
    with served(dashboard(outbox)) as address:
        page = open_page(expected=("404",))
        for path in paths:
            page.goto(address + path)
            assert page.locator("main img, main script").count() == 0, path
            expect(page.locator("#main")).to_be_visible()
        page.goto(f"{address}/events")
        expect(page.locator("#events")).to_contain_text(EVIL)
        page.goto(f"{address}/events/{rows[0]['id']}")
        for text in (EVIL, "{{7*7}}"):
            expect(page.locator("main")).to_contain_text(text)


def write(outbox: Outbox, engine: sa.Engine) -> list[dict[str, Any]]:
    """Rows that say it everywhere."""
    now, tables = datetime.now(UTC), outbox.tables
    said = ("aggregate_type", "event_type", "ordering_key", "idempotency_key")
    common: dict[str, Any] = {**dict.fromkeys(said, EVIL), "aggregate_id": QUOTES}
    common |= {"error_message": EVIL + QUOTES}
    common |= dict.fromkeys(("created_at", "updated_at", "last_attempt_at"), now)
    common |= {"attempts": 1, "max_attempts": 1, "payload": {EVIL: QUOTES, "list": [EVIL]}}
    dead = {"relaybox-dead-letter-from": EVIL, "relaybox-dead-letter-reason": QUOTES}
    lease = {"leased_until": now + timedelta(hours=1), "lease_token": uuid4(), "lease_owner": EVIL}
    none: dict[str, Any] = dict.fromkeys(lease)
    kinds = [("good", "failed", none), (EVIL, "failed", none), ("dead", "failed", none)]
    kinds += [("good", "pending", lease), (EVIL, "pending", none)]
    rows = []
    for destination, status, held in kinds:
        row = {**common, **held, "headers": {**dead, EVIL: EVIL}, "destination": destination}
        due = now if status == "pending" else None
        rows.append({**row, "id": uuid4(), "event_id": uuid4(), "status": status, "next_attempt_at": due})
    circuit = {"name": "good", "circuit": "open", "circuit_until": now, "circuit_reason": EVIL}
    pause = {"name": EVIL, "paused_at": now, "paused_by": EVIL, "pause_reason": QUOTES}
    attempt = {"delivery_id": rows[0]["id"], "attempt": 1, "relay": EVIL, "error_message": QUOTES}
    ended = {"id": uuid4(), "action": "<b>x", "actor": EVIL, "state": "failed", "error": EVIL}
    noted = {"actor": EVIL, "action": "<b>x", "details": {EVIL: QUOTES, "filter": {EVIL: EVIL}}}
    with engine.begin() as connection:
        connection.execute(tables.event.insert(), rows)
        for table, values in (
            (tables.attempt, attempt),
            (tables.destination, pause),
            (tables.destination, circuit),
            (tables.relay, {"name": EVIL, "host": QUOTES, "pid": 1, "version": EVIL, "seen_at": now}),
            (tables.audit, noted),
            (tables.operation, {**ended, "details": {"filter": {"error": QUOTES}}}),
        ):
            connection.execute(table.insert().values(**values))
    return rows
