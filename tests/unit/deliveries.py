"""Deliveries as relays and their observers see them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from relaybox.event import Delivery
from relaybox.testing.sink_contract import make_delivery


def make(event_type: str = "order.paid", *, age: float = 0.0, **given: Any) -> Delivery:
    """Return a delivery that was emitted ``age`` seconds ago."""
    created = datetime.now(UTC) - timedelta(seconds=age)
    fields = {"aggregate_id": "7", "payload": "{}", "destination": "runner", "created_at": created, **given}
    return msgspec.structs.replace(make_delivery(), event_type=event_type, **fields)
