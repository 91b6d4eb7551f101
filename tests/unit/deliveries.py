"""Deliveries as observers see them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

from relaybox.event import Delivery


def make(event_type: str = "order.paid", *, age: float = 0.0, **given: Any) -> Delivery:
    """One that was emitted ``age`` seconds ago."""
    fields: dict[str, Any] = {
        "aggregate_type": "Order",
        "aggregate_id": "7",
        "headers": "{}",
        "attempts": 1,
        "max_attempts": 5,
        "destination": "runner",
        **given,
    }
    return Delivery(
        id=uuid4(),
        event_id=uuid4(),
        event_type=event_type,
        payload="{}",
        payload_data=None,
        payload_encoding=None,
        ordering_key=None,
        position=1,
        idempotency_key="x",
        crashes=0,
        created_at=datetime.now(UTC) - timedelta(seconds=age),
        lease_token=uuid4(),
        lease_owner="me",
        **fields,
    )
