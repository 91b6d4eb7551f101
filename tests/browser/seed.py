"""A day in the life of a shop, written straight into its tables: for pictures, and for counting queries."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import sqlalchemy as sa

from relaybox import Destination, Outbox, Route
from relaybox.relay.upkeep.tally import bucket

MINUTES = 24 * 60
DEAD = "dead-letters"

TIMEOUT = "TimeoutError: no answer within 30 s"
REFUSED = "Reject: 422 Unprocessable Entity: currency EUX is not known"
GONE = "Reject: 409 Conflict: shipment 4711 was cancelled"


def shop(database: str) -> Outbox:
    """Return the outbox that the pictures are made of."""
    billing = "https://billing.example.org/events"
    outbox = Outbox(
        database,
        destinations=[
            Destination("billing", billing, secret="s3cret-of-billing", ordered=True, dead_letter=DEAD),
            Destination("search", "https://search.example.org/index", ordered=True, rate_limit="200/s"),
            Destination("warehouse", "kafka://kafka-1.example.org:9092", ordered=True),
            Destination("mailer", "https://hooks.example.org/events", dead_letter=DEAD),
            Destination("analytics", "https://ingest.example.org/v1", batch_size=500),
            Destination(DEAD, "memory:"),
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
    """Return a UUIDv7 of that moment."""
    time, first, second = int(moment.timestamp() * 1000), chance.getrandbits(12), chance.getrandbits(62)
    return UUID(int=time << 80 | 7 << 76 | first << 64 | 2 << 62 | second)


def event(
    moment: datetime, chance: random.Random, destination: str, event_type: str, **values: Any
) -> dict[str, Any]:
    """Return a row; it is due unless ``more`` says otherwise."""
    kind, number = event_type.partition(".")[0], chance.randint(1000, 9999)
    customer = {"name": "Grace Hopper", "email": "grace@example.org", "card_number": "4111111111111111"}
    payload = {
        f"{kind}_id": number,
        "total": {"amount": "249.90", "currency": "EUX"},
        "customer": customer,
        "lines": [{"sku": "KB-104", "quantity": 1}, {"sku": "MS-7", "quantity": 2}],
    }
    trace = f"00-{uuid4().hex}-{chance.getrandbits(64):016x}-01"
    id_ = ident(moment, chance)
    return {
        **dict.fromkeys(("leased_until", "lease_token", "lease_owner")),
        **dict.fromkeys(("last_attempt_at", "delivered_at", "error_message")),
        **dict.fromkeys(("next_attempt_at", "created_at", "updated_at"), moment),
        "id": ident(moment, chance),
        "event_id": id_,
        "idempotency_key": str(id_),
        "destination": destination,
        "event_type": event_type,
        "status": "pending",
        "aggregate_type": kind.capitalize(),
        "aggregate_id": str(number),
        "ordering_key": str(number),
        "payload": payload,
        "headers": {"tenant": "eu-west", "traceparent": trace, "authorization": "Bearer abc"},
        "attempts": 0,
        "max_attempts": 5,
        **values,
    }


def delivered(moment: datetime) -> dict[str, Any]:
    """Return the columns of a delivered row."""
    at = moment + timedelta(milliseconds=180)
    times = dict.fromkeys(("delivered_at", "updated_at", "last_attempt_at"), at)
    return {"status": "delivered", "attempts": 1, "next_attempt_at": None, **times}


def failed(moment: datetime, error: str, attempts: int = 1) -> dict[str, Any]:
    """Return the columns of a failed row."""
    at = dict.fromkeys(("updated_at", "last_attempt_at"), moment + timedelta(seconds=40))
    return {"status": "failed", "attempts": attempts, "next_attempt_at": None, "error_message": error, **at}


def events(now: datetime, chance: random.Random) -> Iterator[dict[str, Any]]:
    """Return some events of each state, most of them delivered."""
    kinds = {"billing": "order.paid", "search": "product.changed", "warehouse": "order.paid"}
    kinds |= {"mailer": "customer.registered", "analytics": "order.placed"}
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
            yield event(moment, chance, DEAD, "order.paid", headers=headers, **delivered(moment))
    for _ in range(4):
        moment = now - timedelta(minutes=chance.randint(1, 90))
        yield event(moment, chance, "billing", "invoice.sent", **failed(moment, GONE))
    for _ in range(7):
        moment = now - timedelta(hours=chance.randint(2, 20))
        yield event(moment, chance, "analytics", "customer.registered", **failed(moment, TIMEOUT, 5))
    for second in (4, 3, 2):
        lease = {"leased_until": now + timedelta(minutes=30), "lease_token": uuid4(), "attempts": 1}
        moment = now - timedelta(seconds=second)
        yield event(moment, chance, "search", "product.changed", lease_owner="relay-7f9c-2", **lease)
    moment = now - timedelta(seconds=30)
    error = {"error_message": "Retry: 500 Internal Server Error: shard is being moved", "attempts": 2}
    times = {"next_attempt_at": now + timedelta(hours=1), "last_attempt_at": moment}
    yield event(moment, chance, "search", "product.changed", **error, **times)


def history(now: datetime, chance: random.Random) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a day of roll-ups and samples: a quiet night, a busy noon, an hour with a slow receiver."""
    rates = {"billing": 40.0, "search": 25.0, "warehouse": 18.0, "mailer": 6.0, "analytics": 90.0}
    stats, samples = [], []
    position, first = 0.0, now.replace(second=0, microsecond=0) - timedelta(minutes=MINUTES)
    for index in range(MINUTES + 1):
        if 300 <= index < 330:
            continue
        minute = first + timedelta(minutes=index)
        day = 0.35 + 0.65 * math.sin(math.pi * ((minute.hour * 60 + minute.minute) % MINUTES) / MINUTES) ** 2
        slow = math.sin(math.pi * (index - 900) / 60) if 900 <= index < 960 else 0
        held = max(0, index - MINUTES + 7)
        for name, rate in rates.items():
            count = rate * day * chance.uniform(0.85, 1.15)
            position += count * 60
            down = held and name in ("mailer", "warehouse")
            slower = 3.5 if 900 <= index < 960 else 0
            lags = Counter(str(bucket(chance.lognormvariate(-2.3 + slower, 0.7))) for _ in range(40))
            each = max(1, int(count * 60 / 40))
            about = {"minute": minute, "destination": name, "relay": "relay-7f9c-1"}
            about |= {"retried": chance.randint(0, 4), "failed": int(chance.random() > 0.98)}
            lag = {} if down else {key: number * each for key, number in lags.items()}
            stats.append({**about, "delivered": 0 if down else int(count * 60), "lag": lag})
        pending = int((40 + 5_000 * slow + held * 140) * chance.uniform(0.9, 1.1))
        level = {"failed": 34, "oldest_seconds": max(0.2, 0.4 + 45 * slow + held * 60), "minute": minute}
        samples.append({**level, "destination": "", "position": int(position), "pending": pending})
        each_of = {**level, "position": None, "pending": pending // 5}
        samples += [{**each_of, "destination": name} for name in rates]
    return stats, samples


def fill(outbox: Outbox, engine: sa.Engine) -> None:
    """Write all of it."""
    chance, now, tables = random.Random(8), datetime.now(UTC), outbox.tables
    stats, samples = history(now, chance)
    rows = sorted(events(now, chance), key=lambda row: row["created_at"])
    broken = [row for row in rows if row["attempts"] > 1]
    attempts = [
        {
            "delivery_id": row["id"],
            "attempt": number,
            "error_message": row["error_message"],
            "relay": "relay-7f9c-1",
            "failed_at": row["created_at"] + timedelta(seconds=8 * number),
        }
        for row in broken
        for number in range(1, row["attempts"] + 1)
    ]
    with engine.begin() as connection:
        for table, written in (
            (tables.event, rows),
            (tables.stats, stats),
            (tables.sample, samples),
            (tables.attempt, attempts),
        ):
            connection.execute(table.insert(), written)
        _states(connection, outbox, now)
        _people(connection, outbox, now, rows)
        see_relays(connection, outbox)


def _states(connection: sa.Connection, outbox: Outbox, now: datetime) -> None:
    paused = {"paused_at": now - timedelta(minutes=9), "paused_until": now + timedelta(hours=2)}
    paused |= {"name": "mailer", "paused_by": "ada", "pause_reason": "the provider's maintenance window"}
    reason = "kafka-1.example.org:9092: connection refused"
    away = {"name": "warehouse", "circuit": "open", "circuit_until": now + timedelta(seconds=40)}
    for values in (paused, {**away, "circuit_reason": reason}):
        connection.execute(outbox.tables.destination.insert().values(**values))


def _people(connection: sa.Connection, outbox: Outbox, now: datetime, rows: list[dict[str, Any]]) -> None:
    chance = random.Random(1)
    chosen = {"filter": {"status": "failed", "destination": "analytics"}}
    said = [
        ("vic", "login", {"from": "10.0.4.17"}, 0, 190),
        ("ada", "login", {"from": "10.0.4.12"}, 0, 95),
        ("ada", "retry", chosen, 1000, 92),
        ("ada", "retry", chosen, 412, 92),
        ("grace", "test", {"destination": "billing"}, 1, 61),
        ("cli:deploy", "discard", {"ids": [str(rows[0]["id"])]}, 1, 34),
        ("ada", "pause", {"destination": "mailer", "reason": "the provider's maintenance window"}, 0, 9),
    ]
    names = ("actor", "action", "details", "affected", "at")
    written = [dict(zip(names, (*one, now - timedelta(minutes=ago)), strict=True)) for *one, ago in said]
    connection.execute(outbox.tables.audit.insert(), written)
    since = {"status": "delivered", "destination": "search", "since": "2026-11-01T00:00:00+00:00"}
    began = now - timedelta(minutes=92)
    done = {"id": ident(began, chance), "action": "retry", "actor": "ada", "details": chosen}
    done |= {"state": "done", "total": 1412, "done": 1412}
    done |= {"started_at": began, "finished_at": began + timedelta(minutes=1)}
    runs = {"id": ident(now, chance), "action": "replay", "actor": "grace", "state": "running"}
    runs |= {"details": {"filter": since, "rate": 50}, "started_at": now - timedelta(seconds=73)}
    runs |= {"total": 10_000, "capped": 1, "done": 3_650, "skipped": 12}
    for values in (done, runs):
        connection.execute(outbox.tables.operation.insert().values(**values))


def see_relays(connection: sa.Connection, outbox: Outbox) -> None:
    """Two that live, and one that does not."""
    table, now = outbox.tables.relay, datetime.now(UTC)
    connection.execute(table.delete())
    beat = {"version": "0.1.0", "started_at": now - timedelta(hours=31), "seen_at": now}
    beat |= {"term": None, "leads_until": None}
    first = {"name": "relay-7f9c-1", "host": "worker-1", "pid": 412}
    leads = {"term": 12, "leads_until": now + timedelta(seconds=10)}
    gone = {"name": "relay-52d0-9", "host": "worker-0", "pid": 77, "seen_at": now - timedelta(minutes=50)}
    second = {"name": "relay-7f9c-2", "host": "worker-2", "pid": 398}
    connection.execute(table.insert(), [{**beat, **first, **leads}, {**beat, **second}, {**beat, **gone}])
    operation = outbox.tables.operation
    connection.execute(operation.update().where(operation.c.state == "running").values(updated_at=now))
