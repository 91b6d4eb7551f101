"""What consumers are tested with: a database with an inbox and a table for effects, and messages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import msgspec
import sqlalchemy as sa

from relaybox import Event, Outbox
from relaybox.core.event import Delivery
from relaybox.testing.sink_contract import make_delivery
from relaybox.wire.envelope import Envelope, packer
from relaybox.wire.signature import parse_keys, sign
from tests.databases import sync_url

SECRET = "whsec_" + "c2VjcmV0" * 4
OTHER_SECRET = "whsec_" + "b3RoZXJz" * 4

METADATA = sa.MetaData()
EFFECT = sa.Table(
    "effect",
    METADATA,
    sa.Column("n", sa.Integer, primary_key=True),
    sa.Column("event_id", sa.String(36)),
    sa.Column("note", sa.String(200)),
)


@dataclass(frozen=True)
class Ground:
    """A database with an inbox and ``effect``."""

    url: str
    engine: sa.Engine

    def effects(self) -> list[tuple[str, str]]:
        """Return what handlers left, in the order in which they did."""
        with self.engine.begin() as connection:
            rows = connection.execute(sa.select(EFFECT.c.event_id, EFFECT.c.note).order_by(EFFECT.c.n))
            return [(row[0], row[1]) for row in rows]

    def count(self, event_id: str) -> int:
        """Return how often an event took effect."""
        return [found for found, _ in self.effects()].count(event_id)

    def marks(self, consumer: str = "books") -> int:
        """Return how many messages the inbox remembers for a consumer."""
        count = sa.text("SELECT count(*) FROM inbox_message WHERE consumer = :consumer")
        with self.engine.begin() as connection:
            return connection.scalar(count, {"consumer": consumer}) or 0


@contextmanager
def ground(url: str) -> Iterator[Ground]:
    """Make the tables."""
    Outbox(url).migrate()
    engine = sa.create_engine(sync_url(url))
    METADATA.create_all(engine)
    try:
        yield Ground(url, engine)
    finally:
        engine.dispose()


def insert(event: Event, note: str | None = None) -> sa.Insert:
    """Return the statement of an event's effect."""
    return EFFECT.insert().values(event_id=str(event.id), note=event.type if note is None else note)


def delivery(event_type: str = "order.paid", payload: str | None = '{"total":42}', **given: Any) -> Delivery:
    """Make a delivery as a relay has it."""
    event_id = given.pop("event_id", None) or uuid4()
    ids = {"event_id": event_id, "idempotency_key": str(event_id), "aggregate_id": "7"}
    moment = datetime(2026, 11, 15, 6, 15, 12, tzinfo=UTC)
    fields = {"event_type": event_type, "created_at": moment, "destination": "books"}
    return msgspec.structs.replace(make_delivery(payload), **(ids | fields | given))


def packed(event_type: str = "order.paid", format: Any = "json", **given: Any) -> tuple[UUID, Envelope]:
    """Return an event in a format."""
    made = delivery(event_type, **given)
    return made.event_id, packer(format)(made)


def request(
    event_type: str = "order.paid", format: Any = "json", *, secret: str = SECRET, at: float = 0, **given: Any
) -> tuple[dict[str, str], bytes]:
    """Return a signed request, made ``at`` seconds from now."""
    event_id, (body, content_type, headers) = packed(event_type, format, **given)
    return signed(str(event_id), body, secret, at) | {"content-type": content_type, **headers}, body


def signed(message_id: str, body: bytes, secret: str = SECRET, at: float = 0) -> dict[str, str]:
    """Return the headers that sign a body."""
    timestamp = int(time.time() + at)
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": sign(parse_keys(secret), message_id, timestamp, body),
    }
