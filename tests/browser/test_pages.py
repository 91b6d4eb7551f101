"""Pages without a browser: what one costs, and that nothing that is asked of it is an error of the server."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import quote

import pytest
import sqlalchemy as sa
from starlette.testclient import TestClient

from relaybox.database.pools.postgresql import Psycopg
from relaybox.web import dashboard
from relaybox.web.pages.actions import ACTIONS
from tests.browser import seed
from tests.browser.site import LOCAL
from tests.databases import engine
from tests.trips import counted
from tests.web.stage import bearer

PATHS = [
    *(
        "/",
        "/?period=7d",
        "/destinations",
        "/destinations/billing",
        "/failures",
        "/dead-letters",
        "/operations",
    ),
    *("/events", "/events?status=failed", "/events?status=failed&destination=billing", "/relays", "/audit"),
    *("/failures?destination=billing", "/system"),
    "/actions/confirm?action=retry&status=failed&destination=billing",
]
MOST = 40
"""Round trips of one page, with six destinations."""


def test_the_number_of_queries_does_not_grow(migrated_database: Callable[[str], str]) -> None:
    database = migrated_database("postgresql-18")
    outbox = seed.shop(database)
    with (
        counted(Psycopg) as trips,
        TestClient(dashboard(outbox), headers=bearer(LOCAL)) as client,
    ):
        write(outbox, engine(database), 10)
        few = costs(client, trips)
        write(outbox, engine(database), 990)
        many = costs(client, trips)
    assert {path: many[path] for path in few if many[path] > few[path]} == {}
    assert max(few.values()) <= MOST


def costs(client: TestClient, trips: list[Any]) -> dict[str, int]:
    found = {}
    for path in PATHS:
        trips.clear()
        answer = client.get(path, headers={"accept": "text/html"})
        assert answer.status_code == 200, (path, answer.text)
        found[path] = len(trips)
    return found


def write(outbox: Any, engine: sa.Engine, count: int) -> None:
    chance, now = random.Random(count), datetime.now(UTC)
    rows = []
    for index in range(count):
        moment = now - timedelta(seconds=count - index)
        for name in ("billing", "search", "dead-letters"):
            about = seed.failed(moment, seed.REFUSED) if index % 2 else seed.delivered(moment)
            rows.append(seed.event(moment, chance, name, "order.paid", **about))
    tables = outbox.tables
    with engine.begin() as connection:
        connection.execute(tables.event.insert(), rows)
        said = {"actor": "ada", "action": "retry", "details": {}, "affected": 1}
        connection.execute(tables.audit.insert(), [said] * count)


NOBODY = "01977f3c-5d0e-7bb2-a8a6-4f1f5a4e2a11"
TEXTS = [
    *("%00", "%FF", "%F0%9F%92%A9", "-1", "9" * 40, "x" * 3000, "%22%3E%3Cb%3E"),
    *("..%2F..%2Fetc", "0x10", "1e999", "9999-12-31T23:59:59-23:59"),
]
PARAMETERS = [
    *("cursor", "status", "destination", "event_type", "aggregate_id", "ordering_key", "event_id"),
    *("since", "until", "error", "fingerprint", "period", "action", "id"),
]
PAGES = [
    *("/", "/destinations", "/events", "/failures", "/dead-letters", "/operations", "/relays"),
    *("/audit", "/login", "/actions/confirm"),
]
HTML = {"accept": "text/html"}


@pytest.fixture(scope="module")
def client(module_database: Callable[[str], str]) -> Iterator[TestClient]:
    """Return a client that reads pages without a screen."""
    web = dashboard(seed.shop(module_database("postgresql-18")))
    with TestClient(web, headers={**HTML, **bearer(LOCAL)}) as client:
        yield client


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: text[:12])
def test_parameters(client: TestClient, text: str) -> None:
    for page in PAGES:
        query = "&".join(f"{name}={text}" for name in PARAMETERS)
        queries = [query] if page != "/events" else [f"{name}={text}" for name in PARAMETERS]
        for one in queries:
            answer = client.get(f"{page}?{one}")
            assert answer.status_code < 500, (page, one, answer.text)
            assert "<h1>" in answer.text


@pytest.mark.parametrize("text", [*TEXTS, NOBODY], ids=lambda text: text[:12])
def test_paths(client: TestClient, text: str) -> None:
    for place in ("/events/", "/destinations/", "/static/", "/actions/", "/"):
        answer = client.get(place + text)
        assert 400 <= answer.status_code < 500, (place, answer.text)
        assert "To the overview" in answer.text


@pytest.mark.parametrize("action", ACTIONS)
def test_forms(client: TestClient, action: str) -> None:
    csrf = re.search(r'name="csrf" value="(\w+)"', client.get("/destinations/billing").text)
    assert csrf is not None
    fields = ("destination", "reason", "for", "to", "id", "rate", "status", "since", "back")
    bodies = ["", *(f"{name}={text}" for text in TEXTS for name in fields)]
    bodies += [f"id={NOBODY}", "rate=0&status=failed"]
    bodies += ["destination=billing&reason=x&for=99999999d", "id=&status=due", "back=//evil.example&id=x"]
    for body in bodies:
        headers = {"content-type": "application/x-www-form-urlencoded"}
        sent = f"csrf={csrf[1]}&{body}"
        answer = client.post(f"/actions/{action}", content=sent, headers=headers, follow_redirects=False)
        assert answer.status_code in (303, 400, 413, 422), (body, answer.text)
        assert "evil" not in answer.headers.get("location", "")


def test_cookies(client: TestClient) -> None:
    for value in ("%%%", "bnVsbA==", "WzEsMl0=", '"><script>', quote("ü"), "W" * 3000):
        names = ("relaybox_flash", "relaybox_theme", "relaybox_zone", "relaybox_session")
        header = "; ".join(f"{name}={value}" for name in names)
        answer = client.get("/", headers={"cookie": header})
        assert answer.status_code == 200
        assert value not in answer.text or value == "bnVsbA=="
