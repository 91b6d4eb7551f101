"""The contract of a sink on search indexes, with every event a document of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from uuid import UUID

import msgspec
import pytest

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.search.engine import Change
from relaybox.search.sink import SearchSink
from relaybox.sinks.sink import REGARDLESS, Answer, Progress
from relaybox.testing.sink_contract import SinkContract, Trouble
from tests.unit.searching import Double

ANSWERS: dict[Trouble, Answer] = {
    "retry": Retry("later"),
    "reject": Reject("never"),
    "unavailable": Unavailable("down"),
    "crash": Retry("it broke off"),
}


class Engine(Double):
    """Answers to each document as the harness says."""

    def __init__(self) -> None:
        super().__init__("order")
        self.received: list[UUID] = []
        self.awaited: set[UUID] = set()
        self.first, self.all = asyncio.Event(), asyncio.Event()

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        self.received += [UUID(change.id) for change in changes]
        self.first.set()
        if self.awaited <= set(self.received):
            self.all.set()
        if self.awaited & {UUID(change.id) for change in changes}:
            await self.all.wait()
        return await super().write(index, changes)


class ByEvent(SearchSink):
    """Takes each event for an update of a document that is called by the event's id."""

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        given = {delivery.event_id: delivery for delivery in deliveries}

        class Passed:
            def begin(self, delivery: Delivery) -> bool:
                return progress.begin(given[delivery.event_id])

            def report(self, delivery: Delivery, answer: Answer) -> None:
                progress.report(given[delivery.event_id], answer)

        own = [
            msgspec.structs.replace(one, aggregate_id=str(one.event_id), event_type="order.updated")
            for one in deliveries
        ]
        return await super().send(own, Passed())


class Harness:
    def __init__(self) -> None:
        self.engine = Engine()
        self.sink = ByEvent(Destination("shop", "meilisearch://engine"), self.engine)

    def trouble(self, event_id: UUID, kind: Trouble) -> None:
        self.engine.refused[str(event_id)] = ANSWERS[kind]

    def together(self, event_ids: Sequence[UUID]) -> None:
        self.engine.awaited = set(event_ids)

    async def arrival(self) -> None:
        await self.engine.first.wait()

    def received(self) -> list[UUID]:
        return self.engine.received


class TestSearchSink(SinkContract):
    @pytest.fixture
    async def harness(self) -> Harness:
        return Harness()
