"""Decide when a destination's failures open its circuit, and when the event itself is the cause.

``Unavailable`` says that the destination cannot be reached, not that the event is wrong. Several in a row
from different events (or keys) open the circuit: nothing is sent until a probe succeeds, and no event loses
an attempt. An event that is unavailable while others are acknowledged is poison, and its attempts count.

This is the view of one lane. The destination's row says for all relays whether the circuit is open.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from uuid import UUID

THRESHOLD = 5
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 60.0
REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class Trouble:
    """How often in a row an event found the destination unavailable, and whether the event is the cause."""

    times: int
    poison: bool


class Circuit:
    """The recent results of one lane's destination."""

    def __init__(self) -> None:
        self._troubled: set[Hashable] = set()
        self._acknowledged = 0
        self._failures: OrderedDict[UUID, tuple[int, int]] = OrderedDict()
        self._trips = 0
        self.failed_last: UUID | None = None
        """The last event that found the destination unavailable. A probe prefers another event."""

    def acknowledge(self, event_id: UUID) -> None:
        """Record that the destination took an event."""
        self._acknowledged += 1
        if self._troubled:
            self._troubled.clear()
        self._trips = 0
        if self._failures:
            self._failures.pop(event_id, None)

    def fail(self, event_id: UUID) -> Trouble:
        """Record a failure. It is poison if others were acknowledged since the event failed before."""
        times, acknowledged = self._failures.pop(event_id, (0, self._acknowledged))
        self._failures[event_id] = (times + 1, self._acknowledged)
        if len(self._failures) > REMEMBERED:
            self._failures.popitem(last=False)
        self.failed_last = event_id
        return Trouble(times + 1, acknowledged < self._acknowledged)

    def times(self, event_id: UUID) -> int:
        """Return how often in a row the destination was unavailable to this event."""
        return self._failures.get(event_id, (0, 0))[0]

    def opens(self, who: Hashable, *, at_once: bool) -> bool:
        """True if this failure opens the circuit; ``who`` is the event, or its key if ordered."""
        self._troubled.add(who)
        return at_once or len(self._troubled) >= THRESHOLD

    @staticmethod
    def pace(times: int) -> float:
        """Return the seconds to wait after this many failures in a row."""
        return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(times - 1, 10))

    def next_pause(self, asked: float | None) -> float:
        """Return the seconds that a pause would last now, at least as long as the destination asked for."""
        return max(self.pace(self._trips + 1), asked or 0.0)

    def pause(self, asked: float | None) -> float:
        """Count a trip and return the seconds until a probe; they double each time."""
        length = self.next_pause(asked)
        self._trips = min(self._trips + 1, 10)
        self._troubled.clear()
        return length
