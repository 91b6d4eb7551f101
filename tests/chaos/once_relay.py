"""A relay whose handler runs once, in a process of its own: ``python -m tests.chaos.once_relay PLAN``.

Of each delivery it writes the number to the standard output, also where the inbox knows it already. Where
the plan names a death, the process dies there.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy.ext.asyncio import AsyncConnection

from relaybox import Event, Outbox, parts
from relaybox.envelope import event_of
from relaybox.event import Delivery
from relaybox.sinks.handler import HandlerSink
from tests.chaos.mortal_relay import Death, Mortal
from tests.integration.shop import MEMBERSHIP, SOON

INSERT = sa.text("INSERT INTO effect (n) VALUES (:n)")


class Plan(msgspec.Struct, frozen=True):
    """What the process does."""

    database: str
    options: dict[str, Any]
    asynchronous: bool
    death: Death = "never"

    def outbox(self) -> Outbox:
        """An outbox with one handler."""
        outbox = Outbox(self.database)
        outbox.handler("*", name="books", once=True, **self.options)(awrite if self.asynchronous else write)
        return outbox


def write(event: Event, connection: sa.Connection) -> None:
    """The effect."""
    connection.execute(INSERT, event.payload)


async def awrite(event: Event, connection: AsyncConnection) -> None:
    """The effect."""
    await connection.execute(INSERT, event.payload)


class Telling(HandlerSink):
    """Says what comes to it."""

    def begin(self, delivery: Delivery) -> Awaitable[None] | None:
        os.write(1, b"%d\n" % event_of(delivery).payload["n"])
        return super().begin(delivery)


async def main() -> None:
    """Run the relay of the plan until it is stopped, or worse."""
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    MEMBERSHIP["interval"] = SOON
    open_store = parts.open_store
    parts.open_store = lambda *given, **options: Mortal(open_store(*given, **options), plan.death)  # type: ignore
    outbox = plan.outbox()
    outbox._sink_of = lambda destination, handlers: Telling(
        destination, parts.handler_of(destination, handlers)
    )
    await outbox.relay().run()


if __name__ == "__main__":
    asyncio.run(main())
