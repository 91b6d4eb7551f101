"""A day in the life of a shop, written straight into its tables: for pictures, and for counting queries."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import sqlalchemy as sa

from relaybox import Destination, Outbox, Route
from relaybox.maintenance.lag import bucket

MINUTES = 24 * 60
WEBHOOK = "https://hooks.example.org/events"

TIMEOUT = "TimeoutError: no answer within 30 s"
REFUSED = "Reject: 422 Unprocessable Entity: currency EUX is not known"
GONE = "Reject: 409 Conflict: shipment 4711 was cancelled"


def shop(database: str) -> Outbox:
    """An outbox of the kind that pictures are made of."""
    outbox = Outbox(
        database,
        destinations=[
            Destination(
                "billing",
                "https://billing.example.org/events",
                secret="s3cret-of-billing",
                ordered=True,
                dead_letter="dead-letters",
            ),
            Destination("search", "https://search.example.org/index", ordered=True, rate_limit="200/s"),
            Destination("warehouse", "kafka://kafka-1.example.org:9092", ordered=True),
            Destination("mailer", WEBHOOK, dead_letter="dead-letters"),
            Destination("analytics", "https://ingest.example.org/v1", batch_size=500),
            Destination("dead-letters", "memory:"),
        ],
        routes=[
            Route(["order.*", "invoice.*"], to=["billing", "warehouse", "analytics"]),
            Route("product.*", to="search"),
            Route("customer.*", to=["mailer", "analytics"]),
        ],
    )
    outbox.migrate()
    return outbox


def ident(moment: datetime, chance: random.Random) -> UUID:
    """A UUIDv7 of that moment."""
    milliseconds = int(moment.timestamp() * 1000)
    return UUID(
        int=(milliseconds << 80)
        | (7 << 76)
        | (chance.getrandbits(12) << 64)
        | (2 << 62)
        | chance.getrandbits(62)
    )


def event(
    moment: datetime, chance: random.Random, destination: str, event_type: str, **values: Any
) -> dict[str, Any]:
    """A row, due unless something else is said."""
    kind = event_type.partition(".")[0].capitalize()
    number = chance.randint(1000, 9999)
    row: dict[str, Any] = {
        "id": ident(moment, chance),
        "event_id": ident(moment, chance),
        "destination": destination,
        "aggregate_type": kind,
        "aggregate_id": str(number),
        "event_type": event_type,
        "payload": {
            f"{kind.lower()}_id": number,
            "total": {"amount": "249.90", "currency": "EUX"},
            "customer": {
                "name": "Grace Hopper",
                "email": "grace@example.org",
                "card_number": "4111111111111111",
            },
            "lines": [{"sku": "KB-104", "quantity": 1}, {"sku": "MS-7", "quantity": 2}],
        },
        "headers": {
            "tenant": "eu-west",
            "traceparent": f"00-{uuid4().hex}-{chance.getrandbits(64):016x}-01",
            "authorization": "Bearer abc",
        },
        "ordering_key": str(number),
        "status": "pending",
        "idempotency_key": "",
        "attempts": 0,
        "max_attempts": 5,
        "next_attempt_at": moment,
        "leased_until": None,
        "lease_token": None,
        "lease_owner": None,
        "created_at": moment,
        "updated_at": moment,
        "last_attempt_at": None,
        "delivered_at": None,
        "error_message": None,
        **values,
    }
    row["idempotency_key"] = str(row["event_id"])
    return row


def delivered(moment: datetime) -> dict[str, Any]:
    """What makes a row delivered."""
    at = moment + timedelta(milliseconds=180)
    return {
        "status": "delivered",
        "attempts": 1,
        "next_attempt_at": None,
        "delivered_at": at,
        "updated_at": at,
        "last_attempt_at": at,
    }


def failed(moment: datetime, error: str, attempts: int = 1) -> dict[str, Any]:
    """What makes a row failed."""
    at = moment + timedelta(seconds=40)
    return {
        "status": "failed",
        "attempts": attempts,
        "next_attempt_at": None,
        "updated_at": at,
        "last_attempt_at": at,
        "error_message": error,
    }


def events(now: datetime, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Some of each state, most of them delivered."""
    kinds = {
        "billing": "order.paid",
        "search": "product.changed",
        "warehouse": "order.paid",
        "mailer": "customer.registered",
        "analytics": "order.placed",
    }
    for second in range(900, 0, -3):
        moment = now - timedelta(seconds=second + chance.random())
        name = chance.choice(list(kinds))
        stuck = name == "mailer" or (name == "warehouse" and second < 420)
        yield event(moment, chance, name, kinds[name], **({} if stuck else delivered(moment)))
    for index in range(23):
        moment = now - timedelta(minutes=chance.randint(1, 240))
        yield event(moment, chance, "billing", "order.paid", **failed(moment, REFUSED))
        if index % 3 == 0:
            headers = {"relaybox-dead-letter-from": "billing", "relaybox-dead-letter-reason": REFUSED}
            yield event(moment, chance, "dead-letters", "order.paid", headers=headers, **delivered(moment))
    for _ in range(4):
        moment = now - timedelta(minutes=chance.randint(1, 90))
        yield event(moment, chance, "billing", "invoice.sent", **failed(moment, GONE))
    for _ in range(7):
        moment = now - timedelta(hours=chance.randint(2, 20))
        yield event(moment, chance, "analytics", "customer.registered", **failed(moment, TIMEOUT, 5))
    for second in (4, 3, 2):
        moment = now - timedelta(seconds=second)
        lease = {
            "leased_until": now + timedelta(minutes=30),
            "lease_token": uuid4(),
            "lease_owner": "relay-7f9c-2",
            "attempts": 1,
        }
        yield event(moment, chance, "search", "product.changed", **lease)
    moment = now - timedelta(seconds=30)
    yield event(
        moment,
        chance,
        "search",
        "product.changed",
        attempts=2,
        next_attempt_at=now + timedelta(hours=1),
        last_attempt_at=moment,
        error_message="Retry: 500 Internal Server Error: shard is being moved",
    )


def history(now: datetime, chance: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A day of roll-ups and samples: a quiet night, a busy noon, a receiver that is slow for an hour."""
    rates = {"billing": 40.0, "search": 25.0, "warehouse": 18.0, "mailer": 6.0, "analytics": 90.0}
    stats, samples = [], []
    position, first = 0.0, now.replace(second=0, microsecond=0) - timedelta(minutes=MINUTES)
    for index in range(MINUTES + 1):
        minute = first + timedelta(minutes=index)
        if 300 <= index < 330:
            continue
        day = 0.35 + 0.65 * math.sin(math.pi * ((minute.hour * 60 + minute.minute) % MINUTES) / MINUTES) ** 2
        slow = 900 <= index < 960
        held = index > MINUTES - 7
        emitted = 0.0
        for name, rate in rates.items():
            count = rate * day * chance.uniform(0.85, 1.15)
            emitted += count
            down = held and name in ("mailer", "warehouse")
            lags = [chance.lognormvariate(-2.3 + (3.5 if slow else 0), 0.7) for _ in range(40)]
            lag: dict[str, int] = {}
            for seconds in lags:
                key = str(bucket(seconds))
                lag[key] = lag.get(key, 0) + max(1, int(count * 60 / 40))
            quantity = 0 if down else int(count * 60)
            stats.append(
                {
                    "minute": minute,
                    "destination": name,
                    "relay": "relay-7f9c-1",
                    "delivered": quantity,
                    "retried": chance.randint(0, 4),
                    "failed": int(chance.random() > 0.98),
                    "lag": {} if down else lag,
                }
            )
        position += emitted * 60
        waiting = (
            40
            + (5_000 * math.sin(math.pi * (index - 900) / 60) if slow else 0)
            + (index - MINUTES + 7) * 140 * held
        )
        oldest = (
            0.4
            + (45 * math.sin(math.pi * (index - 900) / 60) if slow else 0)
            + (index - MINUTES + 7) * 60 * held
        )
        level = {
            "pending": int(waiting * chance.uniform(0.9, 1.1)),
            "failed": 34,
            "oldest_seconds": max(0.2, oldest),
        }
        samples.append({"minute": minute, "destination": "", "position": int(position), **level})
        samples += [
            {
                "minute": minute,
                "destination": name,
                "position": None,
                **level,
                "pending": level["pending"] // 5,
            }
            for name in rates
        ]
    return stats, samples


def fill(outbox: Outbox, engine: sa.Engine) -> None:
    """Write all of it."""
    chance, now, tables = random.Random(8), datetime.now(UTC), outbox.tables
    stats, samples = history(now, chance)
    rows = sorted(events(now, chance), key=lambda row: row["created_at"])
    with engine.begin() as connection:
        connection.execute(tables.event.insert(), rows)
        connection.execute(tables.stats.insert(), stats)
        connection.execute(tables.sample.insert(), samples)
        broken = [row for row in rows if row["status"] == "failed" and row["attempts"] > 1]
        retried = [row for row in rows if row["attempts"] == 2]
        attempts = [
            {
                "delivery_id": row["id"],
                "attempt": number,
                "failed_at": row["created_at"] + timedelta(seconds=8 * number),
                "relay": "relay-7f9c-1",
                "error_message": row["error_message"],
            }
            for row in broken + retried
            for number in range(1, row["attempts"] + 1)
        ]
        connection.execute(tables.attempt.insert(), attempts)
        _states(connection, outbox, now)
        _people(connection, outbox, now, rows)
        see_relays(connection, outbox)


def _states(connection: sa.Connection, outbox: Outbox, now: datetime) -> None:
    table = outbox.tables.destination
    connection.execute(
        table.insert().values(
            name="mailer",
            paused_at=now - timedelta(minutes=9),
            paused_until=now + timedelta(hours=2),
            paused_by="ada",
            pause_reason="the provider's maintenance window",
        )
    )
    connection.execute(
        table.insert().values(
            name="warehouse",
            circuit="open",
            circuit_until=now + timedelta(seconds=40),
            circuit_reason="kafka-1.example.org:9092: connection refused",
        )
    )


def _people(connection: sa.Connection, outbox: Outbox, now: datetime, rows: list[dict[str, Any]]) -> None:
    chance = random.Random(1)
    audit = outbox.tables.audit
    said = [
        ("vic", "login", {"from": "10.0.4.17"}, 0, 190),
        ("ada", "login", {"from": "10.0.4.12"}, 0, 95),
        ("ada", "retry", {"filter": {"status": "failed", "destination": "analytics"}}, 1000, 92),
        ("ada", "retry", {"filter": {"status": "failed", "destination": "analytics"}}, 412, 92),
        ("grace", "test", {"destination": "billing"}, 1, 61),
        ("cli:deploy", "discard", {"ids": [str(rows[0]["id"])]}, 1, 34),
        ("ada", "pause", {"destination": "mailer", "reason": "the provider's maintenance window"}, 0, 9),
    ]
    connection.execute(
        audit.insert(),
        [
            {
                "actor": actor,
                "action": action,
                "details": details,
                "affected": count,
                "at": now - timedelta(minutes=ago),
            }
            for actor, action, details, count, ago in said
        ],
    )
    operation = outbox.tables.operation
    chosen = {"filter": {"status": "failed", "destination": "analytics"}}
    again = {
        "filter": {"status": "delivered", "destination": "search", "since": "2026-11-01T00:00:00+00:00"},
        "rate": 50,
    }
    for values in (
        {
            "id": ident(now - timedelta(minutes=92), chance),
            "action": "retry",
            "actor": "ada",
            "details": chosen,
            "state": "done",
            "total": 1412,
            "done": 1412,
            "started_at": now - timedelta(minutes=92),
            "finished_at": now - timedelta(minutes=91),
        },
        {
            "id": ident(now, chance),
            "action": "replay",
            "actor": "grace",
            "details": again,
            "state": "running",
            "total": 10_000,
            "capped": 1,
            "done": 3_650,
            "skipped": 12,
            "started_at": now - timedelta(seconds=73),
        },
    ):
        connection.execute(operation.insert().values(**values))


def see_relays(connection: sa.Connection, outbox: Outbox) -> None:
    """Two that live, and one that does not."""
    table, now = outbox.tables.relay, datetime.now(UTC)
    connection.execute(table.delete())
    beat = {
        "host": "worker-1",
        "pid": 412,
        "version": "0.1.0",
        "started_at": now - timedelta(hours=31),
        "seen_at": now,
    }
    gone = {"seen_at": now - timedelta(minutes=50), "term": None, "leads_until": None}
    connection.execute(table.insert(), [
        {"name": "relay-7f9c-1", **beat, "term": 12, "leads_until": now + timedelta(seconds=10)},
        {"name": "relay-7f9c-2", **beat, "host": "worker-2", "pid": 398, "term": None, "leads_until": None},
        {"name": "relay-52d0-9", **beat, "host": "worker-0", "pid": 77, **gone},
    ])  # fmt: skip
    connection.execute(
        outbox.tables.operation.update()
        .where(outbox.tables.operation.c.state == "running")
        .values(updated_at=now)
    )
