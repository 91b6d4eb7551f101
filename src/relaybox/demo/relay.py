"""The relay, to be run in a process of its own."""

from __future__ import annotations

import logging

from relaybox import parts
from relaybox.demo.outbox import make_outbox
from relaybox.demo.workspace import Place


def deliver(place: Place) -> None:
    """Deliver until stopped or killed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parts.run(_deliver(place))


async def _deliver(place: Place) -> None:
    relay = make_outbox(place).relay(patience=3.0)
    place.ready()
    await relay.run()
