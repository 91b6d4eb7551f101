"""The outbox that the shop and the relay are configured with."""

from __future__ import annotations

import time
from typing import Any

from relaybox.app import Outbox
from relaybox.config import Destination, Route
from relaybox.demo.journal import Change, Journal, Receipt
from relaybox.demo.workspace import FLAKY, HANDLER, RECEIVERS, SECRET, WEBHOOK, Place
from relaybox.event import Event

LEASE, TIMEOUT, FLAKY_TIMEOUT = 3.0, 2.0, 1.0
"""Seconds. Far below the defaults, so that a killed relay's work is taken over while one watches."""
POLICY: dict[str, Any] = {
    "ordered": True,
    "lease": LEASE,
    "timeout": TIMEOUT,
    "poll_interval": "100ms",
    "backoff": {"base": "100ms", "cap": "1s"},
    "max_attempts": 25,
}


def make_outbox(place: Place) -> Outbox:
    """Three ordered destinations, and every event for all of them."""
    http: dict[str, Any] = {**POLICY, "secret": f"file:{place.path(SECRET)}", "allow": ["127.0.0.0/8"]}
    outbox = Outbox(
        place.database,
        destinations=[
            Destination(WEBHOOK, place.url(WEBHOOK), **http),
            Destination(FLAKY, place.url(FLAKY), **{**http, "timeout": FLAKY_TIMEOUT}),
        ],
        routes=[Route("order.*", to=RECEIVERS)],
    )
    journal = Journal(place.received(HANDLER))

    @outbox.handler("order.*", name=HANDLER, **POLICY)
    def book(event: Event) -> None:
        number, ref = event.payload["number"], event.payload["ref"]
        change = Change(ref, int(event.aggregate_id), number, event.type)
        journal.write(Receipt(change, time.monotonic()))

    return outbox
