"""A page costs the same with ten rows and with a thousand."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import sqlalchemy as sa
from starlette.testclient import TestClient

from relaybox.stores.postgres import Psycopg
from relaybox.web import dashboard
from tests.browser import seed
from tests.databases import engine
from tests.trips import counted

PATHS = [
    *(
        "/",
        "/?period=7d",
        "/destinations",
        "/destinations/billing",
        "/failures",
        "/failures?destination=billing",
    ),
    *("/events", "/events?status=failed", "/events?status=failed&destination=billing", "/dead-letters"),
    *("/operations", "/relays", "/audit", "/system"),
    "/actions/confirm?action=retry&status=failed&destination=billing",
]
MOST = 40
"""Round trips of one page, with six destinations."""


def test_the_number_of_queries_does_not_grow(migrated_database: Callable[[str], str]) -> None:
    database = migrated_database("postgresql-18")
    outbox = seed.shop(database)
    with (
        counted(Psycopg) as trips,
        TestClient(dashboard(outbox), base_url="http://127.0.0.1", client=("127.0.0.1", 1)) as client,
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
