"""Sends are timed where an observer wants it, and only there."""

from __future__ import annotations

from typing import Any

import msgspec

from relaybox.event import Delivery
from relaybox.observe import Observer, Sends
from relaybox.observers.several import Observers
from relaybox.outcome import Delivered, Released, Retry
from relaybox.relay.batch import Batch
from relaybox.relay.sending import TimedSending, Times
from tests.unit.deliveries import make


class Lane:
    """Lets some begin."""

    def __init__(self, *refused: int) -> None:
        self.refused = refused
        self.answers: list[Any] = []

    def may_begin(self, batch: Batch, delivery: Delivery) -> bool:
        return delivery.position not in self.refused

    def answer(self, batch: Batch, delivery: Delivery, answer: Any) -> None:
        self.answers.append((delivery.position, answer))


class Clock:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        self.time += 1.0
        return self.time

    async def sleep(self, seconds: float) -> None:
        raise AssertionError


def deliveries(count: int) -> list[Delivery]:
    return [msgspec.structs.replace(make(), position=at) for at in range(count)]


def test_each_delivery_has_its_own_times() -> None:
    lane, times = Lane(2), Times()
    first, second, third, fourth = batch = deliveries(4)
    sending = TimedSending(lane, Batch(batch, 60.0), Clock(), times)  # type: ignore[arg-type]
    assert [sending.begin(one) for one in (first, second, third)] == [True, True, False]
    answers = [Retry("no"), Delivered(), Released(), Retry("the sink failed")]
    for one, answer in zip((second, first, third, fourth), answers, strict=True):
        sending.report(one, answer)
    # What never began, and failed with its batch, took no time.
    told = ([second, first, fourth], [*answers[:2], answers[3]], [2.0, 1.0, 5.0], [3.0, 4.0, 5.0])
    assert times.take() == told
    assert times.take() is None
    assert [position for position, _ in lane.answers] == [1, 0, 2, 3]


class Timed(Observer):
    timed = True

    def __init__(self) -> None:
        self.heard: list[Any] = []

    def sent(self, destination: str, sends: Sends) -> None:
        self.heard.append((destination, sends))


def test_only_those_who_want_it_hear_of_sends() -> None:
    assert not Observers([Observer(), Observer()]).timed
    timed = Timed()
    both, nothing = Observers([Observer(), timed]), Sends([], [], [], [])
    assert both.timed
    both.sent("runner", nothing)
    assert timed.heard == [("runner", nothing)]
