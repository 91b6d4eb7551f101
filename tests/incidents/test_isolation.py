"""One destination, or one event, in trouble: the others do not notice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox import Destination, Event, Retry
from relaybox.core.outcome import Outcome
from relaybox.database.statements import delivery as statements
from relaybox.relay.batch import Batch
from relaybox.relay.decide import Opening, Policy
from relaybox.relay.send import Sender
from relaybox.sinks.handler import HandlerSink
from relaybox.wire.envelope import event_of
from tests.incidents.conftest import Case, variants
from tests.integration.runner import Runner, running
from tests.integration.shop import QUICK, Shop, shop_for
from tests.integration.test_outages import Circuits
from tests.waiting import await_for


@variants("one queue for all destinations")
async def test_one_bad_sink_stops_all_the_others(case: Case) -> None:
    if case.broken:
        turn, send = asyncio.Lock(), Sender._send

        async def in_turn(self: Sender, batch: Batch) -> None:
            async with turn:
                await send(self, batch)

        case.patch.setattr(Sender, "_send", in_turn)
    shop = Shop(case.database("postgresql-18"))
    hangs = asyncio.Event()
    taken: Counter[str] = Counter()

    @shop.outbox.handler("order.paid", name="bad", **QUICK)
    async def hang(event: Event) -> None:
        hangs.set()
        await asyncio.Event().wait()

    for name in ("mail", "search", "billing"):

        @shop.outbox.handler("order.sent", name=name, **QUICK)
        async def take(event: Event, name: str = name) -> None:
            taken[name] += 1

    async with shop.outbox.relay(patience=0.1):
        shop.emit(1)
        await hangs.wait()
        shop.emit(20, event_type="order.sent")
        with case.check("the other destinations"):
            expected = {"mail": 20, "search": 20, "billing": 20}
            await await_for(lambda: taken == expected, "the other destinations", case.seconds)


@pytest.fixture
async def runner() -> AsyncIterator[Runner]:
    async with running() as runner:
        yield runner


def every_time_counts(self: Policy, answer: Any, delivery: Any, *_: Any) -> tuple[Outcome, Opening | None]:
    return self._retry(answer, delivery), None


@variants("attempts that always count")
async def test_an_outage_burns_all_attempts(case: Case, runner: Runner) -> None:
    if case.broken:
        case.patch.setattr(Policy, "_unavailable", every_time_counts)
    case.patch.setattr("relaybox.core.circuit.FIRST_PAUSE", 0.05)
    place = Destination("runner", runner.url, allow=["127.0.0.0/8"], max_attempts=3, **QUICK)
    shop = shop_for(case.database("postgresql-18"), place)
    runner.down = "503"
    shop.emit(10)
    seen = Circuits()
    async with shop.outbox.relay(observers=[seen]):
        # Four more times than an event has attempts, or as long as it takes to use them up.
        await await_for(
            lambda: seen.changes.count("half_open") >= 4 or "failed" in shop.states(), "a long outage"
        )
        runner.down = None
        await await_for(lambda: "pending" not in shop.states(), "the end of the backlog")
    with case.check("the outage failed events"):
        assert shop.states() == {"delivered": 10}, "the outage failed events"


def all_decoded_first(send: Any) -> Any:
    async def decode_and_send(self: HandlerSink, deliveries: Sequence[Any], *rest: Any) -> Any:
        for delivery in deliveries:
            event_of(delivery)
        return await send(self, deliveries, *rest)

    return decode_and_send


@variants("a batch that is decoded as a whole")
async def test_one_row_that_nobody_can_read_stops_all_behind_it(case: Case) -> None:
    if case.broken:
        case.patch.setattr(HandlerSink, "send", all_decoded_first(HandlerSink.send))
    shop = Shop(case.database("sqlite"))
    taken = shop.collect("shop", max_attempts=1)

    shop.emit(5)
    make_unreadable(shop, 0)
    async with shop.outbox.relay():
        await await_for(lambda: "pending" not in shop.states(), "every row final")
    with case.check("readable rows were not delivered"):
        assert sorted(taken) == [1, 2, 3, 4], "readable rows were not delivered"
    assert shop.rows()[0][0] == "failed"


def make_unreadable(shop: Shop, n: int) -> None:
    """Change the row to a format of a version that is not installed here."""
    event = shop.outbox.tables.event
    values = {"payload": sa.null(), "payload_data": b"\xff", "payload_encoding": "lzma-of-tomorrow"}
    with shop.engine.begin() as connection:
        ids = connection.scalars(sa.select(event.c.id).order_by(event.c.position)).all()
        connection.execute(sa.update(event).where(event.c.id == ids[n]).values(values))


@variants("the oldest first, whenever they are due")
async def test_events_that_fail_fill_every_batch_and_new_ones_starve(case: Case) -> None:
    case.patch.setattr("relaybox.relay.sizing.LARGEST", 5)
    if case.broken:
        always = ("next_attempt_at <= {now}", "next_attempt_at IS NOT NULL")
        oldest = ("ORDER BY next_attempt_at, position", "ORDER BY position")
        case.rewrite(statements.WORDS, "in_line", always, oldest)
    shop = Shop(case.database("sqlite"))
    taken: list[int] = []

    @shop.outbox.handler("*", name="shop", max_attempts=1_000, batch_size=5, poll_interval="20ms")
    async def fail_old_ones(event: Event) -> None:
        if event.payload["n"] < 40:
            raise Retry("500")
        taken.append(event.payload["n"])

    shop.emit(41)
    async with shop.outbox.relay():
        with case.check("the new event"):
            await await_for(lambda: taken == [40], "the new event", case.seconds)
