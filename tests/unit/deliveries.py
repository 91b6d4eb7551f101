"""Deliveries as relays and their observers see them, and rows as operators do."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec

from relaybox.core.event import Delivery
from relaybox.stores.ledger import Entry
from relaybox.testing.sink_contract import make_delivery


def make(event_type: str = "order.paid", *, age: float = 0.0, **given: Any) -> Delivery:
    """Return a delivery that was emitted ``age`` seconds ago."""
    created = datetime.now(UTC) - timedelta(seconds=age)
    fields = {"aggregate_id": "7", "payload": "{}", "destination": "runner", "created_at": created, **given}
    return msgspec.structs.replace(make_delivery(), event_type=event_type, **fields)


def entry(at: datetime, **given: Any) -> Entry:
    """Return the row of a delivery that was emitted, changed and seen at this time."""
    fields: dict[str, Any] = dict.fromkeys(Entry.__dataclass_fields__)
    fields |= {"id": UUID(int=1), "event_id": UUID(int=1), "destination": "shop", "status": "pending"}
    fields |= {"aggregate_type": "Order", "aggregate_id": "1", "event_type": "order.paid", "position": 1}
    fields |= {"ordering_key": "k", "idempotency_key": "1", "attempts": 0, "max_attempts": 5, "crashes": 0}
    return Entry(**{**fields, "created_at": at, "updated_at": at, "seen_at": at, **given})
