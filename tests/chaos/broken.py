"""Relays that break their promises, so that the harness is seen to notice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar

import sqlalchemy as sa

from relaybox import Outbox, sink
from relaybox.event import Delivery
from relaybox.signature import parse_keys, sign
from relaybox.sinks import http
from tests.chaos import broken_sinks
from tests.chaos.drivers import engine

LATE = 0.5
ABOUT_ONE_IN = 20
_runs = sink.runs


class Broken(http.HttpSink):
    """A sink with one defect; which one, the process decides."""

    defect = ""
    outbox: Outbox
    _later: ClassVar[set[asyncio.Task[None]]] = set()

    async def deliver(self, delivery: Delivery) -> None:
        """Post it, more or less."""
        if self.defect == "settles before it sends":
            task = asyncio.create_task(self._send_later(delivery))
            self._later.add(task)
            return
        await super().deliver(delivery)
        if delivery.position % ABOUT_ONE_IN:
            return
        if self.defect == "sends twice":
            await super().deliver(delivery)
        if self.defect == "forgets rows":
            event = self.outbox.tables.event
            with engine(self.outbox.settings.database).begin() as connection:
                last = sa.select(sa.func.max(event.c.position)).scalar_subquery()
                connection.execute(event.delete().where(event.c.position == last))

    async def _send_later(self, delivery: Delivery) -> None:
        await asyncio.sleep(LATE)
        await super().deliver(delivery)

    def _request(self, delivery: Delivery) -> tuple[bytes, bytes]:
        headers, body = super()._request(delivery)
        if self.defect == "alters payloads":
            body = body.replace(b'"n"', b'"m"')
        return headers, body


def spoil(defect: str, outbox: Outbox) -> None:
    """Give every relay of this process the defect."""
    if defect in broken_sinks.DEFECTS:
        broken_sinks.spoil(defect)
        return
    Broken.defect, Broken.outbox = defect, outbox
    http.HttpSink = Broken  # type: ignore[misc]
    if defect == "signs with another secret":
        other = parse_keys("another")
        http.sign = lambda keys, *message: sign(other, *message)  # type: ignore[attr-defined]
    if defect == "sends backwards":
        sink.runs = _backwards


def _backwards(deliveries: Sequence[Delivery]) -> tuple[list[int], dict[int, int]]:
    """From the last of each key to the first."""
    _, following = _runs(deliveries)
    lasts = [at for at in range(len(deliveries)) if at not in following]
    return lasts, {after: at for at, after in following.items()}
