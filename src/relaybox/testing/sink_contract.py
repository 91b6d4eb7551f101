"""The contract of a sink as tests, for our sinks and for your own.

Subclass ``SinkContract`` in a test module and give it a ``harness`` fixture. pytest (with pytest-asyncio in
auto mode) then runs the whole contract::

    class TestMySink(SinkContract):
        @pytest.fixture
        async def harness(self): ...

Set ``waits = False`` if the destination answers at once, such as a list.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal, Protocol
from uuid import UUID, uuid4

import msgspec
import pytest

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.sinks.sink import Answer, Regardless, Sink

Trouble = Literal["retry", "reject", "unavailable", "crash"]


class SinkHarness(Protocol):
    """What the contract needs of a sink's destination."""

    sink: Sink

    def trouble(self, event_id: UUID, kind: Trouble) -> None:
        """Make the destination answer this event so; ``crash``: break off without an answer."""

    def together(self, event_ids: Sequence[UUID]) -> None:
        """Make the destination answer none of these events before all have arrived."""

    async def arrival(self) -> None:
        """Return as soon as an event has arrived."""

    def received(self) -> list[UUID]:
        """Return the ids of the events that arrived, in order of arrival, with any answer."""


class AnswersContract:
    """Tests of the answers to a send."""

    async def test_what_the_destination_acknowledges_is_delivered(self, harness: SinkHarness) -> None:
        [delivery] = deliveries(1)
        assert await harness.sink.send([delivery]) == [Delivered()]
        assert harness.received() == [delivery.event_id]

    async def test_there_is_one_answer_for_each_delivery_in_the_same_order(
        self, harness: SinkHarness
    ) -> None:
        batch = deliveries(6)
        harness.trouble(batch[1].event_id, "retry")
        harness.trouble(batch[3].event_id, "reject")
        harness.trouble(batch[4].event_id, "unavailable")
        assert [type_of(answer) for answer in await harness.sink.send(batch)] == [
            Delivered, Retry, Delivered, Reject, Unavailable, Delivered,
        ]  # fmt: skip
        assert sorted(harness.received()) == sorted(event_ids(batch))

    async def test_what_may_not_begin_is_not_sent(self, harness: SinkHarness) -> None:
        class Only(Regardless):
            def begin(self, delivery: Delivery) -> bool:
                return delivery is batch[1]

        batch = deliveries(3)
        assert await harness.sink.send(batch, Only()) == [Released(), Delivered(), Released()]
        assert harness.received() == [batch[1].event_id]

    async def test_a_send_of_nothing_is_answered_with_nothing(self, harness: SinkHarness) -> None:
        assert list(await harness.sink.send([])) == []

    async def test_answers_say_why(self, harness: SinkHarness) -> None:
        batch = deliveries(4)
        kinds: list[Trouble] = ["retry", "reject", "unavailable", "crash"]
        for delivery, kind in zip(batch, kinds, strict=True):
            harness.trouble(delivery.event_id, kind)
        for answer in await harness.sink.send(batch):
            assert isinstance(answer, Retry | Reject | Unavailable)
            assert answer.reason

    async def test_a_destination_that_breaks_off_is_an_answer_and_no_error(
        self, harness: SinkHarness
    ) -> None:
        batch = deliveries(3)
        harness.trouble(batch[1].event_id, "crash")
        answers = await harness.sink.send(batch)
        assert [isinstance(answer, Retry | Unavailable) for answer in answers] == [False, True, False]

    async def test_a_payload_of_a_newer_version_is_tried_again_later(self, harness: SinkHarness) -> None:
        batch = deliveries(2)
        batch[0] = msgspec.structs.replace(batch[0], payload_encoding="of-tomorrow", payload_data=b"x")
        assert [type_of(answer) for answer in await harness.sink.send(batch)] == [Retry, Delivered]

    async def test_every_try_carries_the_same_event_id(self, harness: SinkHarness) -> None:
        [delivery] = deliveries(1)
        harness.trouble(delivery.event_id, "retry")
        for attempt in (1, 2, 3):
            again = msgspec.structs.replace(delivery, attempts=attempt, lease_token=uuid4())
            assert [type_of(answer) for answer in await harness.sink.send([again])] == [Retry]
        assert harness.received() == [delivery.event_id] * 3


class OrderOfKeysContract:
    """Tests of which deliveries wait for others, and which do not."""

    waits: bool

    async def test_the_events_of_a_key_arrive_in_order(self, harness: SinkHarness) -> None:
        batch = [
            delivery for pair in zip(deliveries(8, "a"), deliveries(8, "b"), strict=True) for delivery in pair
        ]
        assert await harness.sink.send(batch) == [Delivered()] * 16
        for key in ("a", "b"):
            of_key = event_ids([delivery for delivery in batch if delivery.ordering_key == key])
            assert [id_ for id_ in harness.received() if id_ in set(of_key)] == of_key

    @pytest.mark.parametrize("kind", ["retry", "reject", "unavailable", "crash"])
    async def test_after_a_failure_the_rest_of_its_key_is_released_untried(
        self, harness: SinkHarness, kind: Trouble
    ) -> None:
        run, other = deliveries(4, "a"), deliveries(2, "b")
        harness.trouble(run[1].event_id, kind)
        answers = await harness.sink.send([*run, *other])
        assert answers[0] == Delivered()
        assert isinstance(answers[1], Retry | Reject | Unavailable)
        assert answers[2:] == [Released(), Released(), Delivered(), Delivered()]
        assert set(harness.received()) == set(event_ids([*run[:2], *other]))

    async def test_without_a_key_a_failure_holds_up_nobody(self, harness: SinkHarness) -> None:
        batch = deliveries(4)
        harness.trouble(batch[0].event_id, "reject")
        answers = await harness.sink.send(batch)
        assert [type_of(answer) for answer in answers] == [Reject, Delivered, Delivered, Delivered]

    async def test_different_keys_are_under_way_at_the_same_time(self, harness: SinkHarness) -> None:
        if not self.waits:
            pytest.skip("its destination answers at once")
        batch = [delivery for key in (None, None, "a", "b", "c") for delivery in deliveries(1, key)]
        harness.together(event_ids(batch))
        assert await harness.sink.send(batch) == [Delivered()] * 5

    async def test_two_sends_may_be_under_way_at_the_same_time(self, harness: SinkHarness) -> None:
        first, second = deliveries(2, "a"), deliveries(2, "b")
        if self.waits:
            harness.together(event_ids([first[0], second[0]]))
        for answers in await asyncio.gather(harness.sink.send(first), harness.sink.send(second)):
            assert answers == [Delivered()] * 2


class ClosingContract:
    """Tests of a send that is cancelled, and of the end of a sink."""

    waits: bool

    async def test_a_send_that_is_cancelled_ends(self, harness: SinkHarness) -> None:
        if not self.waits:
            pytest.skip("its destination answers at once")
        [delivery] = deliveries(1)
        harness.together([delivery.event_id, uuid4()])
        send = asyncio.ensure_future(harness.sink.send([delivery]))
        await harness.arrival()
        send.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(send, 60)

    async def test_it_can_be_closed_twice(self, harness: SinkHarness) -> None:
        await harness.sink.send(deliveries(1))
        await harness.sink.close()
        await harness.sink.close()

    async def test_it_can_be_closed_unused(self, harness: SinkHarness) -> None:
        await harness.sink.close()


class SinkContract(AnswersContract, OrderOfKeysContract, ClosingContract):
    """Each test is a sentence of the contract in ``relaybox.sinks.sink``."""

    waits = True
    """True if the destination can keep a delivery waiting."""


_positions = itertools.count(1)


def deliveries(count: int, key: str | None = None) -> list[Delivery]:
    """Return new deliveries with one key, or without one."""
    return [make_delivery(key=key) for _ in range(count)]


def make_delivery(
    payload: str | None = '{"total": 42}',
    *,
    key: str | None = None,
    data: bytes | None = None,
    headers: str = "{}",
    attempts: int = 1,
) -> Delivery:
    """Return a delivery as a store hands it out; ``data`` is a binary payload."""
    return Delivery(
        id=uuid4(),
        event_id=uuid4(),
        destination="shop",
        aggregate_type="Order",
        aggregate_id="1",
        event_type="order.paid",
        payload=None if data is not None else payload,
        payload_data=data,
        payload_encoding=None if data is None else "binary",
        headers=headers,
        ordering_key=key,
        position=next(_positions),
        idempotency_key=str(uuid4()),
        attempts=attempts,
        max_attempts=5,
        crashes=0,
        created_at=datetime(2025, 1, 31, 12, 0, 0, 250_000, tzinfo=UTC),
        lease_token=uuid4(),
        lease_owner="relay-1",
    )


def event_ids(batch: Sequence[Delivery]) -> list[UUID]:
    """Return the ids that receivers see."""
    return [delivery.event_id for delivery in batch]


def type_of(answer: Answer) -> type[Answer]:
    """Return ``Unavailable`` for its subclasses, else the answer's own type."""
    return Unavailable if isinstance(answer, Unavailable) else type(answer)
