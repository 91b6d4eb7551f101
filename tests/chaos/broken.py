"""Relays that break their promises, so that the harness is seen to notice."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import sqlalchemy as sa

from relaybox import Destination, Outbox
from relaybox.core.event import Delivery
from relaybox.core.outcome import Unavailable
from relaybox.operate import open_relay as parts
from relaybox.sinks import sink
from relaybox.sinks.http import sink as http
from relaybox.sinks.sink import DELIVERED, REGARDLESS, Answer, Progress
from relaybox.wire.signature import parse_keys, sign
from tests.chaos.drivers import engine
from tests.chaos.workload import BROKER

LATE = 0.5
ABOUT_ONE_IN = 20
_runs = sink.runs


class Broken(http.HttpSink):
    """A sink with one defect; which one, the process decides."""

    defect = ""
    outbox: Outbox
    _later: ClassVar[set[asyncio.Task[None]]] = set()

    async def deliver(self, delivery: Delivery) -> None:
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
    if defect in SINK_DEFECTS:
        spoil_sinks(defect)
        return
    Broken.defect, Broken.outbox = defect, outbox
    http.HttpSink = Broken  # type: ignore[misc]
    if defect == "signs with another secret":
        other = parse_keys("another")
        http.sign = lambda keys, *message: sign(other, *message)  # type: ignore[attr-defined]
    if defect == "sends backwards":
        sink.runs = _backwards


def _backwards(deliveries: Sequence[Delivery]) -> tuple[list[int], dict[int, int]]:
    """Return runs from the last of each key to the first."""
    _, following = _runs(deliveries)
    lasts = [at for at in range(len(deliveries)) if at not in following]
    return lasts, {after: at for at, after in following.items()}


SINK_DEFECTS = (
    "takes trouble for success",
    "sends to the broker twice",
    "sends to the broker backwards",
    "holds up the others",
    "does not say why",
)
HELD_UP = 10.0  # Seconds for which a process does nothing else, once

_open_sink = parts.open_sink


class BrokenSink:
    """A sink with a defect; everything else is the sink's own."""

    def __init__(self, sink: Any, defect: str) -> None:
        self._sink = sink
        self._defect = defect
        self._held_up = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sink, name)

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        altered = Altered(progress, self._alter)
        if self._defect == "sends to the broker backwards":
            return list(reversed(await self._sink.send(deliveries[::-1], altered)))
        if self._defect == "sends to the broker twice":
            await self._sink.send([one for one in deliveries if not one.position % ABOUT_ONE_IN])
        return [self._alter(answer) for answer in await self._sink.send(deliveries, altered)]

    def _alter(self, answer: Answer) -> Answer:
        if not isinstance(answer, Unavailable):
            return answer
        match self._defect:
            case "takes trouble for success":
                return DELIVERED
            case "does not say why":
                return type(answer)("")
            case "holds up the others" if not self._held_up:
                self._held_up = True
                time.sleep(HELD_UP)
        return answer


class Altered:
    def __init__(self, progress: Progress, alter: Callable[[Answer], Answer]) -> None:
        self.begin = progress.begin
        self._report = progress.report
        self._alter = alter

    def report(self, delivery: Delivery, answer: Answer) -> None:
        self._report(delivery, self._alter(answer))


def spoil_sinks(defect: str) -> None:
    """Give every sink to a broker that this process opens the defect."""

    def open_broken(destination: Destination, handlers: Any) -> Any:
        sink = _open_sink(destination, handlers)
        return BrokenSink(sink, defect) if destination.name == BROKER else sink

    parts.open_sink = open_broken
