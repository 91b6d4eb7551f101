"""The relay's log for a person on call: work in summary, failures one by one, changes of circuits.

Records have their values in the attribute ``relay``. At DEBUG there is a record for every outcome.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from relaybox.core.commands import command
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed, Retried
from relaybox.core.scrub import scrub
from relaybox.core.text import printable, span
from relaybox.errors import StoreError
from relaybox.operate.observers.count import Count, Holds, Window
from relaybox.relay.observer import Observer
from relaybox.sinks.sink import describe
from relaybox.stores.store import Claim, Settlement
from relaybox.wire.tracing import trace_id

log = logging.getLogger("relaybox.relay")

RETRIES, FAILURES = 5, 100
"""Logged one by one until the next summary; the rest is counted."""
DEFECTS_AGAIN = 60.0
WIDEST_NAME = 24
BRIEF = 5.0
"""Seconds; a relay that stops within them without any work logs it at DEBUG."""
QUIET = 3.0
"""Seconds without an error after which a success ends the spell."""
TEXTS = 20
"""Different errors that are logged in one spell."""
_LONGEST = 300


class LogObserver(Observer):
    """Writes to the logger ``relaybox.relay``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._windows: defaultdict[str, Window] = defaultdict(Window)
        self._holds = Holds()
        self._database = Spell()
        self._defects: defaultdict[tuple[str, str], Spell] = defaultdict(lambda: Spell(DEFECTS_AGAIN))
        self._overdue: defaultdict[str, int] = defaultdict(int)
        self._total = Count()
        self._began = clock()
        self._lines = Lines()
        self._tell = self._lines.tell
        self._deliveries = Deliveries(self._lines)

    def claimed(self, destination: str, claim: Claim) -> None:
        """Log deliveries that the claim failed, what holds a destination up, and a summary that is due."""
        now = self._well()
        if claim.failed:
            window = self._windows[destination]
            window.fail(len(claim.failed), now)
            for delivery in claim.failed:
                died = "the relay died each time it held this event"
                self._deliveries.failed(destination, delivery, died, window)
        if claim.held is not None:
            self._hold(destination, claim.held.why, claim.held.reason or "", now)
        elif self._holds.ends(destination):
            self._resume(destination, now)
        self._summarise(destination, now)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Log failures as errors and retries as information; count the rest."""
        now = self._well()
        window = self._windows[destination]
        count = window.add(settlements, lost, now, datetime.now(UTC))
        if count.retried or count.failed or log.isEnabledFor(logging.DEBUG):
            self._deliveries.settled(destination, settlements, lost, window)
        self._lost(destination, lost)
        self._summarise(destination, now)

    def extended(self, destination: str, lost: frozenset[UUID]) -> None:
        """Log lost leases."""
        self._well()
        self._lost(destination, lost)

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """Log that this relay changed the circuit, or paused the destination."""
        if state == "closed":
            self._resume(destination, self._clock())
        else:
            self._hold(destination, state, reason, self._clock())

    def overdue(self, destination: str, count: int) -> None:
        """Log a new maximum since the last zero, and the return to zero."""
        before = self._overdue[destination]
        if count > before:
            functions = "a function is" if count == 1 else f"{count:,} functions are"
            said = f"{functions} over the timeout and still running; threads cannot be stopped"
            self._tell(logging.WARNING, destination, said, "overdue", functions=count)
        elif before and not count:
            said = "no function is over the timeout any more"
            self._tell(logging.INFO, destination, said, "overdue", functions=0)
        self._overdue[destination] = max(count, before) if count else 0

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        """Log an error once, until it is over or changes."""
        now = self._clock()
        if isinstance(error, StoreError):
            text = one_line(str(error))
            self._database.trouble(text, now, f"database  cannot {doing}, trying again: {text}")
        else:
            said = f"cannot {doing}, trying again: {one_line(describe(error))}"
            text = f"{self._lines.name(destination)}  {said}"
            self._defects[destination, doing].trouble(text, now, text, error if doing == "run" else None)

    def stopped(self) -> None:
        """Log every remaining summary, and the total."""
        now = self._clock()
        for destination in self._windows:
            self._summarise(destination, now, at_once=True)
        level = logging.INFO if self._total or now - self._began > BRIEF else logging.DEBUG
        total = asdict(self._total)
        numbers = (span(now - self._began), *(f"{number:,}" for number in total.values()))
        about = {"relay": {"event": "stopped", **total}}
        log.log(level, "stopped after %s: delivered %s, retried %s, failed %s", *numbers, extra=about)

    def _well(self) -> float:
        now = self._clock()
        if (seconds := self._database.over(now)) is not None:
            about = {"relay": {"event": "database_back"}}
            log.info("database  answers again, after %s", span(seconds), extra=about)
        return now

    def _hold(self, destination: str, why: str, reason: str, at: float) -> None:
        before = self._holds.begin(destination, why, reason, at)
        if why == "half_open":
            said = "circuit half-open: one delivery tries"
            self._tell(logging.DEBUG, destination, said, "circuit", state=why)
        elif before is None or (why == "paused") != (before.why == "paused") or reason != before.reason:
            event, word, fix = "circuit", "circuit open", "deliveries wait"
            if why == "paused":
                event, word, fix = why, why, f"go on with {command(f'resume {destination}')}"
            said = f"{word}: {one_line(reason)}; {fix}" if reason else f"{word}; {fix}"
            about = {"reason": reason} if reason else {}
            self._tell(logging.WARNING, destination, said, event, state=why, **about)

    def _resume(self, destination: str, at: float) -> None:
        hold = self._holds.pop(destination, None)
        lasted = f" after {span(at - hold.since)}" if hold else ""
        if hold and hold.why == "paused":
            self._tell(logging.INFO, destination, f"resumed{lasted}", "resumed")
        else:
            self._tell(logging.INFO, destination, f"circuit closed{lasted}", "circuit", state="closed")

    def _summarise(self, destination: str, now: float, *, at_once: bool = False) -> None:
        window = self._windows[destination]
        if not (window.is_due(now) or (at_once and window.count)):
            return
        for what, limit in (("retries", RETRIES), ("failures", FAILURES)):
            if (more := window.reported[what] - limit) > 0:
                self._tell(logging.INFO, destination, f"and {more:,} more {what}", "more", **{what: more})
        said, about = _summary(window)
        self._tell(logging.INFO, destination, said, "summary", **about)
        self._total += window.count
        window.clear(now)

    def _lost(self, destination: str, lost: frozenset[UUID]) -> None:
        if lost:
            leases = "a lease" if len(lost) == 1 else f"{len(lost):,} leases"
            said = f"lost {leases}: another relay took over, and may deliver once more"
            self._tell(logging.WARNING, destination, said, "lost", leases=len(lost))


class Lines:
    """Writes lines that begin with the name of a destination, in a column."""

    def __init__(self) -> None:
        self._width = 0

    def tell(self, level: int, destination: str, said: str, event: str, **about: Any) -> None:
        """Write a line, with its values in the record."""
        values = {"relay": {"destination": destination, "event": event, **about}}
        log.log(level, "%s  %s", self.name(destination), said, extra=values)

    def name(self, destination: str) -> str:
        """Return the name, as wide as the widest so far."""
        self._width = min(max(self._width, len(destination)), WIDEST_NAME)
        return destination.ljust(self._width)


class Deliveries:
    """Logs what became of single deliveries; ``window`` has how many were since the last summary."""

    def __init__(self, lines: Lines) -> None:
        self._tell = lines.tell

    def settled(
        self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID], window: Window
    ) -> None:
        """Log each outcome, except those of lost leases."""
        for delivery, outcome in settlements:
            if delivery.id in lost:
                continue
            if isinstance(outcome, Failed):
                self.failed(destination, delivery, outcome.error, window)
            elif isinstance(outcome, Retried):
                self._retried(destination, delivery, outcome, window)
            elif isinstance(outcome, Delivered) and log.isEnabledFor(logging.DEBUG):
                shadow = " in shadow" if outcome.shadow else ""
                said = f"delivered {_event(delivery)}{shadow} (attempt {delivery.attempts})"
                self._tell(logging.DEBUG, destination, said, "delivered", **_about(delivery))

    def failed(self, destination: str, delivery: Delivery, error: str, window: Window) -> None:
        """Log a failure as an error, at DEBUG if there were too many."""
        window.reported["failures"] += 1
        level = logging.ERROR if window.reported["failures"] <= FAILURES else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        # A row that killed its relays is claimed once more than it may be tried.
        tried = min(delivery.attempts, delivery.max_attempts)
        tries, see = f"attempt {tried} of {delivery.max_attempts}", command(f"why {delivery.event_id}")
        said = f"failed {_event(delivery)} ({tries}): {one_line(error)}; see {see}"
        self._tell(level, destination, said, "failed", **_about(delivery, error))

    def _retried(self, destination: str, delivery: Delivery, outcome: Retried, window: Window) -> None:
        window.reported["retries"] += 1
        level = logging.INFO if window.reported["retries"] <= RETRIES else logging.DEBUG
        if not log.isEnabledFor(level):
            return
        tries = f"attempt {delivery.attempts} of {delivery.max_attempts}" if outcome.counts else "not counted"
        said = f"again in {span(outcome.after)}: {_event(delivery)} ({tries}): {one_line(outcome.error)}"
        about = _about(delivery, outcome.error)
        self._tell(level, destination, said, "retried", **about, after=round(outcome.after, 3))


def _summary(window: Window) -> tuple[str, dict[str, Any]]:
    about = asdict(window.count)
    said = "  ".join(f"{name} {number:,}" for name, number in about.items())
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


def _about(delivery: Delivery, error: str | None = None) -> dict[str, Any]:
    about: dict[str, Any] = {
        "event_id": str(delivery.event_id),
        "event_type": delivery.event_type,
        "attempt": delivery.attempts,
        "max_attempts": delivery.max_attempts,
    }
    known = {"error": error, "trace_id": trace_id(delivery.headers)}
    return about | {name: value for name, value in known.items() if value is not None}


class Spell:
    """A spell of errors of one thing. It repeats a text after ``again`` seconds, or in the next spell."""

    def __init__(self, again: float = math.inf) -> None:
        self._again = again
        self._began: float | None = None
        self._last = 0.0
        self._reported: dict[str, float] = {}

    def trouble(self, text: str, now: float, said: str, error: BaseException | None = None) -> None:
        """Log ``said``, unless the same ``text`` was logged; ``error`` is shown with its traceback."""
        if self._began is None:
            self._began = now
        self._last = now
        self._reported = {known: at for known, at in self._reported.items() if now - at < self._again}
        if text in self._reported or len(self._reported) >= TEXTS:
            return
        self._reported[text] = now
        log.warning("%s", said, exc_info=error, extra={"relay": {"event": "trouble"}})

    def over(self, now: float) -> float | None:
        """Record a success; if it ends a spell, return how long that lasted."""
        if self._began is None or now - self._last < QUIET:
            return None
        lasted, self._began = self._last - self._began, None
        self._reported.clear()
        return lasted


def one_line(text: str) -> str:
    """Return outside text as one printable line of limited length."""
    line = " ".join(printable(scrub(text)[: 2 * _LONGEST], " ").split())
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}…"
