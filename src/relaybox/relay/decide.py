"""The failure policy: turn a sink's answer into the outcome of a delivery."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from relaybox.core.circuit import LONGEST_PAUSE, Circuit
from relaybox.core.event import Delivery
from relaybox.core.outcome import (
    Delivered,
    Failed,
    Gone,
    Interrupted,
    Outcome,
    Reject,
    Released,
    Retried,
    Retry,
    Throttled,
    Unavailable,
    Unreachable,
    delay,
)
from relaybox.core.settings import Destination
from relaybox.sinks.sink import Answer

LONGEST_AFTER = 3600.0
"""Seconds: a destination that asks for a longer pause gets this one."""

SHORTEST_WAIT = 0.25
"""Seconds before the next try if this one does not count: such tries could go on forever without a pause."""


FORGIVEN_STOPS = 2
"""Stops in a row that may interrupt a function before each of them counts as an attempt."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A request to open the circuit, or to pause the destination if it is ``gone``."""

    reason: str
    asked: float | None = None
    """The seconds for which the destination asked for a pause."""
    gone: bool = False


class Policy:
    """Decides the outcomes of one destination's deliveries, from its settings and the lane's circuit."""

    def __init__(self, destination: Destination, circuit: Circuit, random: Callable[[], float]) -> None:
        self._destination = destination
        self._circuit = circuit
        self._random = random
        self._keeps = destination.retention > 0
        self._delivered = Delivered(keep=self._keeps)

    def shadowed(self, delivery: Delivery) -> Delivered:
        """Return the outcome of a delivery that was not sent because it was emitted in shadow."""
        return Delivered(keep=self._keeps or delivery.keyed, shadow=True)

    def decide(
        self, answer: Answer, delivery: Delivery, *, probing: bool = False
    ) -> tuple[Outcome, Opening | None]:
        """Return the outcome of a delivery with this answer, and how to open the circuit, if at all.

        ``probing``: the circuit is half-open.
        """
        match answer:
            case Delivered():
                self._circuit.acknowledge(delivery.event_id)
                if self._keeps or not delivery.keyed:
                    return self._delivered, None
                # Keep the row in spite of ``retention = 0``: pruning notes at its key when it was final.
                return Delivered(), None
            case Released():
                return answer, None
            case Reject():
                return Failed(_reason(answer, "rejected")), None
            case Unavailable():
                outcome, opening = self._unavailable(answer, delivery, probing)
                if probing and opening is None:
                    opening = Opening(_reason(answer, "unavailable"), seconds_asked(answer))
                return outcome, opening
            case Interrupted():
                return self._interrupted(answer, delivery), None
            case Retry():
                return self._retry(answer, delivery), None
        return self._retry(Retry(f"the sink answered {answer!r}"[:200]), delivery), None

    def _interrupted(self, answer: Interrupted, delivery: Delivery) -> Outcome:
        """Count no attempt for the first stops in a row.

        Later stops count; otherwise a function that outlasts every relay's patience would run endlessly.
        """
        counts = delivery.crashes >= FORGIVEN_STOPS
        if counts and delivery.attempts >= delivery.max_attempts:
            return Failed(answer.reason)
        return Retried(seconds_asked(answer) or 0.0, answer.reason, counts, cut_off=True)

    def _retry(self, answer: Retry | Unavailable, delivery: Delivery) -> Outcome:
        if delivery.attempts >= delivery.max_attempts:
            return Failed(_reason(answer, "failed in its last attempt"))
        asked = seconds_asked(answer)
        backoff = delay(self._destination.backoff, delivery.attempts, self._random)
        return Retried(backoff if asked is None else asked, _reason(answer, "failed"))

    def _unavailable(
        self, answer: Unavailable, delivery: Delivery, probing: bool
    ) -> tuple[Outcome, Opening | None]:
        trouble = self._circuit.fail(delivery.event_id)
        # If the destination is unreachable, throttles or is gone, the event is not the cause.
        blameless = isinstance(answer, Unreachable | Throttled | Gone)
        if trouble.poison and not blameless:
            return self._retry(answer, delivery), None
        reason, asked = _reason(answer, "unavailable"), seconds_asked(answer)
        # After an outage, no event waits longer than a circuit stays open. If the destination is
        # unreachable, the backoff has nothing to protect, so wait only for the circuit's interval.
        longest = LONGEST_PAUSE if not isinstance(answer, Unreachable) else self._circuit.pace(trouble.times)
        backoff = min(delay(self._destination.backoff, trouble.times, self._random), longest)
        after = max(backoff if asked is None else asked, SHORTEST_WAIT)
        if probing and trouble.times > 1 and not blameless:
            # Delay it past the next probe, so that another event is probed. Otherwise the next row of its
            # key, which is the first row due, would bring this event to every probe.
            after = max(after, 2 * self._circuit.next_pause(asked) + self._destination.poll_interval)
        outcome = Retried(after, reason, counts=False)
        if isinstance(answer, Gone):
            return outcome, Opening(reason, gone=True)
        who = delivery.event_id if delivery.ordering_key is None else delivery.ordering_key
        if self._circuit.opens(who, at_once=isinstance(answer, Unreachable)):
            return outcome, Opening(reason, asked)
        return outcome, None


def seconds_asked(answer: Retry | Unavailable) -> float | None:
    """Return ``after`` in seconds, clamped; None if it is missing or invalid: a handler may set anything."""
    after = answer.after
    try:
        seconds = after.total_seconds() if isinstance(after, timedelta) else float(after)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_AFTER)


def _reason(answer: Retry | Reject | Unavailable, otherwise: str) -> str:
    return answer.reason if isinstance(answer.reason, str) and answer.reason else otherwise
