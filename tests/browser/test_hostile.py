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
from tests.browser.served import served

EVIL = "<img src=x onerror=alert(1)>"
QUOTES = "\"'><script>alert(2)</script>{{7*7}}`</code>"


def test_evil_in_every_field_is_inert(
    fresh_database: Callable[[str], str], open_page: Callable[..., Page]
) -> None:
    database = fresh_database("postgresql-18")
    outbox = Outbox(
        database,
        destinations=[Destination("good", "memory:", dead_letter="dead"), Destination("dead", "memory:")],
    )
    outbox.migrate()
    engine = sa.create_engine(database.replace("postgresql://", "postgresql+psycopg://"))
    rows = list(write(outbox, engine))
    engine.dispose()
    paths = [
        "/",
        "/destinations",
        "/events",
        "/failures",
        "/dead-letters",
        "/operations",
        "/relays",
        "/audit",
        "/system",
    ]
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
    common = {
        "aggregate_type": EVIL,
        "aggregate_id": QUOTES,
        "event_type": EVIL,
        "ordering_key": EVIL,
        "idempotency_key": EVIL,
    }
    common |= {
        "payload": {EVIL: QUOTES, "list": [EVIL]},
        "headers": {"relaybox-dead-letter-from": EVIL, "relaybox-dead-letter-reason": QUOTES, EVIL: EVIL},
    }
    common |= {
        "attempts": 1,
        "max_attempts": 1,
        "created_at": now,
        "updated_at": now,
        "last_attempt_at": now,
        "error_message": EVIL + QUOTES,
    }
    lease = {"leased_until": now + timedelta(hours=1), "lease_token": uuid4(), "lease_owner": EVIL}
    no_lease: dict[str, Any] = dict.fromkeys(lease)
    rows = [
        {
            "id": uuid4(),
            "event_id": uuid4(),
            "destination": destination,
            "status": status,
            "next_attempt_at": due,
            **common,
            **held,
        }
        for destination, status, due, held in (
            ("good", "failed", None, no_lease),
            (EVIL, "failed", None, no_lease),
            ("good", "pending", now, lease),
            (EVIL, "pending", now, no_lease),
            ("dead", "failed", None, no_lease),
        )
    ]
    with engine.begin() as connection:
        connection.execute(tables.event.insert(), rows)
        connection.execute(
            tables.attempt.insert().values(
                delivery_id=rows[0]["id"], attempt=1, relay=EVIL, error_message=QUOTES
            )
        )
        connection.execute(
            tables.destination.insert().values(name=EVIL, paused_at=now, paused_by=EVIL, pause_reason=QUOTES)
        )
        connection.execute(
            tables.destination.insert().values(
                name="good", circuit="open", circuit_until=now, circuit_reason=EVIL
            )
        )
        connection.execute(
            tables.relay.insert().values(name=EVIL, host=QUOTES, pid=1, version=EVIL, seen_at=now)
        )
        connection.execute(
            tables.audit.insert().values(
                actor=EVIL, action="<b>x", details={EVIL: QUOTES, "filter": {EVIL: EVIL}}
            )
        )
        connection.execute(
            tables.operation.insert().values(
                id=uuid4(),
                action="<b>x",
                actor=EVIL,
                details={"filter": {"error": QUOTES}},
                state="failed",
                error=EVIL,
            )
        )
    return rows
