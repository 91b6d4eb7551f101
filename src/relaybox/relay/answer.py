"""Decide on each answer of a sink at once: the outcome of the delivery, and what follows for others."""

from __future__ import annotations

from typing import Any

from relaybox.core.clock import Clock
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Interrupted, Released
from relaybox.core.scrub import scrub
from relaybox.relay.batch import Batch
from relaybox.relay.breaker import Outage
from relaybox.relay.crashpoint import reached
from relaybox.relay.decide import Policy
from relaybox.relay.gate import Gate
from relaybox.relay.observer import Observer, Sends
from relaybox.relay.source import Source
from relaybox.sinks.sink import Answer
from relaybox.stores.store import Settlement


class Answers:
    """Turns the answers of one lane's sink into outcomes."""

    def __init__(self, policy: Policy, source: Source, outage: Outage) -> None:
        self._policy = policy
        self._settler = source.settler
        self._in_flight = source.in_flight
        self._outage = outage

    def take(self, batch: Batch, delivery: Delivery, answer: Answer) -> None:
        """Decide the outcome of an answered delivery, and queue it for the settle."""
        reached("answered")
        position = delivery.position
        if position in batch.answered:
            return
        batch.answered.add(position)
        self._in_flight.answered += 1
        if delivery.ordering_key is not None and type(answer) is not Delivered:
            self._leave_rest(batch, delivery)
        if position not in batch.unsettled:
            return
        if type(answer) is not Delivered:
            _scrub(answer)
        # An interrupted function says nothing about the destination.
        if not isinstance(answer, Released | Interrupted):
            batch.tried = True
        outcome, opening = self._policy.decide(answer, delivery, probing=batch.probing)
        self._settler.add(Settlement(delivery, outcome))
        if opening is not None:
            self._outage.begin(opening, probing=batch.probing)

    def _leave_rest(self, batch: Batch, delivery: Delivery) -> None:
        """Give back the deliveries behind a failed one of their key at once: the batch may take long."""
        for other in batch.after(delivery):
            if (other.position, batch.lease.token) in self._in_flight.returning:
                continue
            # Mark it first: a sink may ask in another thread whether it may begin.
            batch.answered.add(other.position)
            if other.position in batch.begun:
                batch.answered.discard(other.position)
            else:
                self._settler.add_unsent(batch, other, Released())


def _scrub(answer: Answer) -> None:
    """Hide secrets in the reason, which is stored, logged, traced and shown."""
    reason = getattr(answer, "reason", None)
    if isinstance(reason, str) and (hidden := scrub(reason)) != reason:
        answer.reason, answer.args = hidden, (hidden,)  # type: ignore[union-attr]


class Sending:
    """The ``Progress`` that a sink gets with a batch: ask before each send, and report each answer."""

    def __init__(self, gate: Gate, answers: Answers, batch: Batch) -> None:
        self._gate = gate
        self._answers = answers
        self._batch = batch

    def begin(self, delivery: Delivery) -> bool:
        """True if the delivery may be sent now."""
        return self._gate.may_begin(self._batch, delivery)

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """Take the sink's answer."""
        self._answers.take(self._batch, delivery, answer)


class Times:
    """Send times that were not yet reported.

    One flat list holds them: one object per send would be work for the garbage collector.
    """

    def __init__(self, name: str, observer: Observer) -> None:
        self._name = name
        self._observer = observer
        self._flat: list[Any] = []
        self.add = self._flat.extend

    def report(self) -> None:
        """Report all times to the observer, and forget them."""
        flat = self._flat
        if flat:
            sends = Sends(flat[::4], flat[1::4], flat[2::4], flat[3::4])
            flat.clear()
            self._observer.sent(self._name, sends)


class TimedSending(Sending):
    """A ``Sending`` that also records when each send began and ended."""

    def __init__(self, gate: Gate, answers: Answers, batch: Batch, clock: Clock, times: Times) -> None:
        super().__init__(gate, answers, batch)
        self._now = clock.now
        self._add = times.add
        self._began: dict[int, float] = {}

    def begin(self, delivery: Delivery) -> bool:
        """True if the delivery may be sent now."""
        if not self._gate.may_begin(self._batch, delivery):
            return False
        self._began[delivery.position] = self._now()
        return True

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """Take the sink's answer."""
        if type(answer) is not Released:
            ended = self._now()
            self._add((delivery, answer, self._began.get(delivery.position, ended), ended))
        self._answers.take(self._batch, delivery, answer)
