"""What a sink is handed with a batch: it asks before each delivery, and says what was answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relaybox.event import Delivery
from relaybox.relay.batch import Batch
from relaybox.sink import Answer

if TYPE_CHECKING:
    from relaybox.relay.lane import Lane


class Sending:
    """The ``Progress`` of one batch."""

    def __init__(self, lane: Lane, batch: Batch) -> None:
        self._lane = lane
        self._batch = batch

    def begin(self, delivery: Delivery) -> bool:
        """Whether it may be sent now."""
        return self._lane.may_begin(self._batch, delivery)

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """It was answered so."""
        self._lane.answer(self._batch, delivery, answer)
