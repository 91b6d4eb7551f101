"""The ``Progress`` that a sink gets with a batch: ask before each send, and report each answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relaybox.core.clock import Clock
from relaybox.core.event import Delivery
from relaybox.core.outcome import Released
from relaybox.relay.batch import Batch
from relaybox.relay.observer import Sends
from relaybox.sinks.sink import Answer

if TYPE_CHECKING:
    from relaybox.relay.lane import Lane


class Sending:
    """The ``Progress`` of one batch."""

    def __init__(self, lane: Lane, batch: Batch) -> None:
        self._lane = lane
        self._batch = batch

    def begin(self, delivery: Delivery) -> bool:
        """True if the delivery may be sent now."""
        return self._lane.may_begin(self._batch, delivery)

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """Record the sink's answer."""
        self._lane.answer(self._batch, delivery, answer)


class Times:
    """Send times that were not yet reported.

    One flat list holds them: one object per send would be work for the garbage collector.
    """

    def __init__(self) -> None:
        self._flat: list[Any] = []
        self.add = self._flat.extend

    def take(self) -> Sends | None:
        """Return and forget all times; None if there are none."""
        flat = self._flat
        if not flat:
            return None
        sends = Sends(flat[::4], flat[1::4], flat[2::4], flat[3::4])
        flat.clear()
        return sends


class TimedSending(Sending):
    """A ``Sending`` that also records when each send began and ended."""

    def __init__(self, lane: Lane, batch: Batch, clock: Clock, times: Times) -> None:
        super().__init__(lane, batch)
        self._now = clock.now
        self._add = times.add
        self._began: dict[int, float] = {}

    def begin(self, delivery: Delivery) -> bool:
        """True if the delivery may be sent now."""
        if not self._lane.may_begin(self._batch, delivery):
            return False
        self._began[delivery.position] = self._now()
        return True

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """Record the sink's answer."""
        if type(answer) is not Released:
            ended = self._now()
            self._add((delivery, answer, self._began.get(delivery.position, ended), ended))
        self._lane.answer(self._batch, delivery, answer)
