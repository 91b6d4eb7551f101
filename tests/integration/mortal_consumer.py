"""A consumer that is killed between its commit and its acknowledgement.

``python -m tests.integration.mortal_consumer KIND URL PLACE DATABASE``
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

from sqlalchemy.ext.asyncio import create_async_engine

from relaybox import Event
from relaybox.consumer import Done
from relaybox.consumers.loop import Loop
from relaybox.inboxes.sql import Inbox
from tests.databases import async_url
from tests.integration.consumed import insert

SETTINGS = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
"""For Kafka, so that another soon learns that this one is gone."""


def consumer(kind: str, url: str, place: str, **options: Any) -> Loop:
    """A consumer of a broker's topic, queue or stream, called ``books``."""
    if kind == "kafka":
        from relaybox.consumers.kafka import KafkaConsumer

        given = {"group": f"books-{place}", "settings": SETTINGS, **options}
        return KafkaConsumer(url.removeprefix("kafka://"), place, **given)
    if kind == "rabbitmq":
        from relaybox.consumers.rabbitmq import RabbitmqConsumer

        return RabbitmqConsumer(url, place, **options)
    from relaybox.consumers.nats import NatsConsumer

    return NatsConsumer(url, f"{place}.>", durable="books", **options)


def main(kind: str, url: str, place: str, database: str) -> None:
    """Consume until the first message is done, and die."""
    engine = create_async_engine(async_url(database))
    made = consumer(kind, url, place, inbox=Inbox(), transaction=engine, consumer="books")
    handle = made.ahandle

    @made.on("order.*")
    async def effect(event: Event, connection: Any) -> None:
        await connection.execute(insert(event))

    async def handle_and_die(event: Event) -> Any:
        verdict = await handle(event)
        assert verdict == Done()
        os.kill(os.getpid(), signal.SIGKILL)

    made.ahandle = handle_and_die  # type: ignore[method-assign]
    made.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
