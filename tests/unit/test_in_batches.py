"""Many deliveries in one request: sizes, keys, failures, limits, and sends that end early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from uuid import UUID

import pytest

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.errors import PayloadError
from relaybox.sinks.sink import Answer, InBatches, Regardless
from relaybox.testing.sink_contract import deliveries, make_delivery
from tests.waiting import PATIENCE, await_for, cancel

Say = Callable[[Delivery], Answer | BaseException]


class Service(InBatches):
    """Answers each delivery as a test says, and raises for all of them what a test says."""

    def __init__(self, concurrency: int = 1, size: int = 3) -> None:
        super().__init__(concurrency, size)
        self.requests: list[list[Delivery]] = []
        self.troubles: dict[UUID, Answer] = {}
        self.raised: dict[UUID, BaseException] = {}
        self.open = asyncio.Event()
        self.open.set()
        self.under_way = self.most = 0

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        self.requests.append(list(deliveries))
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        try:
            await self.open.wait()
            await asyncio.sleep(0)
        finally:
            self.under_way -= 1
        for delivery in deliveries:
            if delivery.event_id in self.raised:
                raise self.raised[delivery.event_id]
        return [self.troubles.get(delivery.event_id, Delivered()) for delivery in deliveries]

    @property
    def sizes(self) -> list[int]:
        return [len(request) for request in self.requests]

    async def reached(self, count: int) -> None:
        """Return when so many requests are under way."""
        await await_for(lambda: self.under_way >= count)


class Reported(Regardless):
    """Lets a delivery begin unless it is refused, and records its calls."""

    def __init__(self, refused: Sequence[Delivery] = ()) -> None:
        self.refused = {delivery.event_id for delivery in refused}
        self.asked: list[UUID] = []
        self.answers: list[tuple[UUID, Answer]] = []

    def begin(self, delivery: Delivery) -> bool:
        self.asked.append(delivery.event_id)
        return delivery.event_id not in self.refused

    def report(self, delivery: Delivery, answer: Answer) -> None:
        self.answers.append((delivery.event_id, answer))


async def test_a_request_holds_no_more_than_its_size() -> None:
    service = Service(size=3)
    batch = deliveries(8)
    assert list(await service.send([])) == []
    assert await service.send(batch) == [Delivered()] * 8
    assert service.sizes == [3, 3, 2]
    assert [delivery for request in service.requests for delivery in request] == batch


async def test_of_one_key_there_is_one_in_a_request_and_the_next_follows_when_it_arrived() -> None:
    service = Service(concurrency=5, size=10)
    run = [make_delivery(key=key) for key in "aabcabcc"]
    assert await service.send(run) == [Delivered()] * 8
    for request in service.requests:
        keys = [delivery.ordering_key for delivery in request]
        assert len(keys) == len(set(keys))
    for key in "abc":
        sent = [one for request in service.requests for one in request if one.ordering_key == key]
        assert sent == [delivery for delivery in run if delivery.ordering_key == key]


async def test_a_failure_in_the_middle_of_a_key_releases_the_rest_of_it() -> None:
    service = Service(size=2)
    run, other = deliveries(4, "a"), deliveries(4, "b")
    service.troubles[run[1].event_id] = Reject("never")
    progress = Reported()
    answers = await service.send([*run, *other], progress)
    assert [type(answer) for answer in answers] == [Delivered, Reject, Released, Released, *[Delivered] * 4]
    tried = [*run[:2], *other]
    assert {delivery.event_id for request in service.requests for delivery in request} == {
        delivery.event_id for delivery in tried
    }
    assert len(progress.answers) == len(tried), "what was not tried is not reported"
    assert set(progress.asked) == {delivery.event_id for delivery in tried}


@pytest.mark.parametrize(
    ("raised", "kind", "reason"),
    [
        (Unavailable("down"), Unavailable, "down"),
        (Retry("later"), Retry, "later"),
        (Reject("never"), Reject, "never"),
        (PayloadError("$.a", "is bad"), Reject, r"\$\.a: is bad"),
        (RuntimeError("oh"), Retry, "RuntimeError: oh"),
        (asyncio.CancelledError(), Retry, "CancelledError"),
        (TimeoutError(), Retry, "TimeoutError"),
    ],
)
async def test_what_is_raised_is_the_answer_of_all_in_the_request_and_of_nobody_else(
    raised: BaseException, kind: type[Answer], reason: str
) -> None:
    service = Service(size=2)
    batch = [*deliveries(2, "a"), *deliveries(1, "b"), *deliveries(2)]
    service.raised[batch[2].event_id] = raised
    answers = await service.send(batch)
    assert [type(answer) for answer in answers] == [kind, Released, kind, Delivered, Delivered]
    assert getattr(answers[2], "__traceback__", None) is None
    with pytest.raises(kind, match=reason):
        raise answers[2]  # type: ignore[misc]


async def test_what_may_not_begin_leaves_its_place_to_others_and_releases_its_key() -> None:
    service = Service(size=2)
    run, others = deliveries(3, "a"), deliveries(3)
    progress = Reported(refused=[run[0], others[1]])
    answers = await service.send([*run, *others], progress)
    assert answers == [*[Released()] * 3, Delivered(), Released(), Delivered()]
    assert service.requests == [[others[0], others[2]]]
    assert run[1].event_id not in progress.asked


async def test_progress_is_asked_right_before_the_request_and_called_right_after_it() -> None:
    service = Service(concurrency=1, size=1)
    batch = deliveries(2)
    progress = Reported()
    service.open.clear()
    sending = asyncio.ensure_future(service.send(batch, progress))
    await service.reached(1)
    assert progress.asked == [batch[0].event_id]
    service.open.set()
    await sending
    assert progress.answers == [(delivery.event_id, Delivered()) for delivery in batch]


async def test_as_many_requests_are_under_way_as_the_limit_allows_and_at_once_if_it_is_raised() -> None:
    service = Service(concurrency=2, size=2)
    service.open.clear()
    sending = asyncio.ensure_future(service.send(deliveries(20)))
    for limit in (2, 3):
        await service.reached(limit)
        for _ in range(10):
            await asyncio.sleep(0)
        assert service.sizes == [2] * limit
        service.limit(3)
    service.open.set()
    assert await sending == [Delivered()] * 20
    assert (service.most, len(service.requests)) == (3, 10)


async def test_a_limit_that_is_lowered_meanwhile_holds_from_the_next_request_on() -> None:
    service = Service(concurrency=4, size=1)
    service.open.clear()
    sending = asyncio.ensure_future(service.send([make_delivery(key=str(n % 8)) for n in range(40)]))
    await service.reached(4)
    service.limit(1)
    service.most = 0
    before = len(service.requests)
    service.open.set()
    assert await sending == [Delivered()] * 40
    assert len(service.requests) == 40 > before
    assert service.most == 1


async def test_two_sends_share_the_limit_and_not_their_requests() -> None:
    service = Service(concurrency=2, size=5)
    service.open.clear()
    first, second = deliveries(10), deliveries(10)
    sending = [asyncio.ensure_future(service.send(batch)) for batch in (first, second)]
    await service.reached(2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(service.requests) == 2
    service.open.set()
    assert await asyncio.gather(*sending) == [[Delivered()] * 10] * 2
    assert service.most == 2
    ids = {delivery.event_id for delivery in first}
    assert {len({one.event_id for one in request} & ids) for request in service.requests} == {0, 5}


async def test_a_send_that_is_cancelled_ends_and_gives_its_places_back() -> None:
    service = Service(concurrency=2, size=1)
    service.open.clear()
    progress = Reported()
    sending = asyncio.ensure_future(service.send(deliveries(5), progress))
    await service.reached(2)
    await cancel(sending)
    assert service.under_way == 0
    assert progress.answers == []
    service.open.set()
    assert await asyncio.wait_for(service.send(deliveries(5)), PATIENCE) == [Delivered()] * 5


async def test_what_was_answered_before_a_send_is_cancelled_has_been_reported() -> None:
    service = Service(concurrency=1, size=2)
    run = deliveries(6, "a")

    class Two(Reported):
        def report(self, delivery: Delivery, answer: Answer) -> None:
            super().report(delivery, answer)
            if len(self.answers) == 2:
                service.open.clear()

    progress = Two()
    sending = asyncio.ensure_future(service.send(run, progress))
    await await_for(lambda: len(service.requests) >= 3)
    await cancel(sending)
    assert [event_id for event_id, _ in progress.answers] == [delivery.event_id for delivery in run[:2]]
