"""What a person on call reads: work in summary, failures one by one, circuits and trouble as they change.

Each record carries what it says as values too, in its attribute ``relay``, for a log that programs read. At
the level DEBUG there is a record for every outcome.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from relaybox.core.commands import command
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Retried
from relaybox.errors import StoreError
from relaybox.operate.observers.count import Count
from relaybox.operate.observers.held import Holding
from relaybox.operate.observers.text import one_line, span
from relaybox.operate.observers.trouble import Spell
from relaybox.operate.observers.window import Window
from relaybox.relay.observer import Observer
from relaybox.sinks.sink import describe
from relaybox.stores.store import Claim, Settlement
from relaybox.wire.tracing import trace_id

log = logging.getLogger("relaybox.relay")

RETRIES = 5
"""Told one by one until the next summary; the rest is counted."""
FAILURES = 100
DEFECTS_AGAIN = 60.0
WIDEST_NAME = 24
BRIEF = 5.0
"""Seconds; what found nothing in them says so only to whoever wants to hear everything."""


class LogObserver(Observer):
    """Writes to the logger ``relaybox.relay``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: defaultdict[str, Window] = defaultdict(Window)
        self._holding = Holding(self._tell)
        self._database = Spell(log)
        self._defects: defaultdict[tuple[str, str], Spell] = defaultdict(lambda: Spell(log, DEFECTS_AGAIN))
        self._overdue: defaultdict[str, int] = defaultdict(int)
        self._total = Count()
        self._began = clock()
        self._width = 0

    def claimed(self, destination: str, claim: Claim) -> None:
        """What failed on the spot, what holds a destination up, and whatever is due to be told."""
        now = self._well()
        if claim.failed:
            self._windows[destination].fail(len(claim.failed), now)
            for delivery in claim.failed:
                self._failure(destination, delivery, "the relay died each time it held this event")
        self._holding.see(destination, claim.held, now)
        self._summarise(destination, now)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """What failed is an error, what is to be tried again a matter of interest, the rest is counted."""
        now = self._well()
        count = self._windows[destination].add(settlements, lost, now, datetime.now(UTC))
        if count.retried or count.failed or log.isEnabledFor(logging.DEBUG):
            self._tell_each(destination, settlements, lost)
        self._lost(destination, lost)
        self._summarise(destination, now)

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        """What was lost was taken over."""
        self._well()
        self._lost(destination, lost)

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """The circuit changed."""
        self._holding.change(destination, state, reason, self._clock())

    def overdue(self, destination: str, count: int) -> None:
        """Said when there are more than ever since there were none, and when there are none."""
        before = self._overdue[destination]
        if count > before:
            functions = "a function is" if count == 1 else f"{count:,} functions are"
            said = f"{functions} over the timeout and still running; threads cannot be stopped"
            self._tell(logging.WARNING, destination, said, {"event": "overdue", "functions": count})
        elif before and not count:
            said = "no function is over the timeout any more"
            self._tell(logging.INFO, destination, said, {"event": "overdue", "functions": 0})
        self._overdue[destination] = max(count, before) if count else 0

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        """Told once, until it is over or becomes another."""
        now = self._clock()
        if isinstance(error, StoreError):
            told = one_line(str(error))
            self._database.trouble(told, now, f"database  cannot {doing}, trying again: {told}")
        else:
            told = f"{self._name(destination)}  cannot {doing}, trying again: {one_line(describe(error))}"
            self._defects[destination, doing].trouble(told, now, told, error if doing == "run" else None)

    def stopped(self) -> None:
        """Tell what is left to tell."""
        now = self._clock()
        for destination in self._windows:
            self._summarise(destination, now, at_once=True)
        total = self._total
        log.log(
            logging.INFO if total or now - self._began > BRIEF else logging.DEBUG,
            "stopped after %s: delivered %s, retried %s, failed %s",
            span(now - self._began),
            *(f"{number:,}" for number in (total.delivered, total.retried, total.failed)),
            extra=_values("stopped", delivered=total.delivered, retried=total.retried, failed=total.failed),
        )

    def _well(self) -> float:
        now = self._clock()
        for_seconds = self._database.over(now)
        if for_seconds is not None:
            log.info("database  answers again, after %s", span(for_seconds), extra=_values("database_back"))
        return now

    def _tell_each(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        for delivery, outcome in settlements:
            if delivery.id in lost:
                continue
            if isinstance(outcome, Failed):
                self._failure(destination, delivery, outcome.error)
            elif isinstance(outcome, Retried):
                self._retry(destination, delivery, outcome)
            elif isinstance(outcome, Delivered) and log.isEnabledFor(logging.DEBUG):
                shadow = " in shadow" if outcome.shadow else ""
                said = f"delivered {_event(delivery)}{shadow} (attempt {delivery.attempts})"
                self._tell(logging.DEBUG, destination, said, _about("delivered", delivery))

    def _failure(self, destination: str, delivery: Delivery, error: str) -> None:
        window = self._windows[destination]
        window.told_failures += 1
        level = logging.ERROR if window.told_failures <= FAILURES else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        # One that relays died of is claimed once more than it may be tried.
        tried = min(delivery.attempts, delivery.max_attempts)
        tries = f"attempt {tried} of {delivery.max_attempts}"
        see = command(f"why {delivery.event_id}")
        said = f"failed {_event(delivery)} ({tries}): {one_line(error)}; see {see}"
        self._tell(level, destination, said, _about("failed", delivery, error))

    def _retry(self, destination: str, delivery: Delivery, outcome: Retried) -> None:
        window = self._windows[destination]
        window.told_retries += 1
        level = logging.INFO if window.told_retries <= RETRIES else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        tries = f"attempt {delivery.attempts} of {delivery.max_attempts}" if outcome.counts else "not counted"
        said = f"again in {span(outcome.after)}: {_event(delivery)} ({tries}): {one_line(outcome.error)}"
        about = _about("retried", delivery, outcome.error) | {"after": round(outcome.after, 3)}
        self._tell(level, destination, said, about)

    def _summarise(self, destination: str, now: float, *, at_once: bool = False) -> None:
        window = self._windows[destination]
        if not (window.is_due(now) or (at_once and window.count)):
            return
        for told, limit, what in (
            (window.told_retries, RETRIES, "retries"),
            (window.told_failures, FAILURES, "failures"),
        ):
            if told > limit:
                more = told - limit
                said = f"and {more:,} more {what}"
                self._tell(logging.INFO, destination, said, {"event": "more", what: more})
        self._tell(logging.INFO, destination, *_summary(window))
        self._total += window.count
        window.clear(now)

    def _lost(self, destination: str, lost: frozenset[UUID]) -> None:
        if lost:
            leases = "a lease" if len(lost) == 1 else f"{len(lost):,} leases"
            said = f"lost {leases}: another relay took over, and may deliver once more"
            self._tell(logging.WARNING, destination, said, {"event": "lost", "leases": len(lost)})

    def _tell(self, level: int, destination: str, said: str, about: dict[str, Any]) -> None:
        values = {"relay": {"destination": destination, **about}}
        log.log(level, "%s  %s", self._name(destination), said, extra=values)

    def _name(self, destination: str) -> str:
        self._width = min(max(self._width, len(destination)), WIDEST_NAME)
        return destination.ljust(self._width)


def _summary(window: Window) -> tuple[str, dict[str, Any]]:
    count = window.count
    said = f"delivered {count.delivered:,}  retried {count.retried:,}  failed {count.failed:,}"
    about: dict[str, Any] = {
        "event": "summary",
        "delivered": count.delivered,
        "retried": count.retried,
        "failed": count.failed,
    }
    if window.shadowed:
        said += f"  in shadow {window.shadowed:,}"
        about["shadowed"] = window.shadowed
    half, most = window.lag(0.5), window.lag(0.99)
    if half is not None and most is not None:
        said += f"  lag p50 {span(half)}  p99 {span(most)}"
        about |= {"lag_p50": round(half, 4), "lag_p99": round(most, 4)}
    return said, about


def _event(delivery: Delivery) -> str:
    return f"{delivery.event_type} of {delivery.aggregate_type} {delivery.aggregate_id}"


def _about(event: str, delivery: Delivery, error: str | None = None) -> dict[str, Any]:
    about: dict[str, Any] = {
        "event": event,
        "event_id": str(delivery.event_id),
        "event_type": delivery.event_type,
        "attempt": delivery.attempts,
        "max_attempts": delivery.max_attempts,
    }
    if error is not None:
        about["error"] = error
    if (trace := trace_id(delivery.headers)) is not None:
        about["trace_id"] = trace
    return about


def _values(event: str, **values: Any) -> dict[str, Any]:
    return {"relay": {"event": event, **values}}
