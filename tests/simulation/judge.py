"""What a schedule is judged by beside what arrived: leases, blame for failures and deaths, dead letters.

It sees every committed change of a row, and finds fault only where nothing that befell a relay explains it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING
from uuid import UUID

from relaybox.config import Destination
from relaybox.testing.checker import Finding
from tests.simulation.database import Emitted, Row, Transaction
from tests.simulation.driver import SUFFERS

if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule


class Judge:
    """Watches the rows of one schedule from its beginning."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._database = schedule.database
        self._leases = {destination.name: destination.lease for destination in schedule.plan.destinations}
        self.dead_letters: list[Emitted] = []
        """What was put there by the settles that failed it elsewhere."""
        schedule.database.on_change = self._changed
        self._commit = schedule.database.commit
        schedule.database.commit = self._committing  # type: ignore[method-assign]
        self._writer: object = None
        self._sizes: Counter[str] = Counter()
        """How many rows were leased under each token."""
        self._deaths: Counter[tuple[str, UUID]] = Counter()
        """How often a relay died that held this row and no other under its token."""
        self._suspects: defaultdict[str | None, dict[int, Row]] = defaultdict(dict)
        """The suspects that each relay holds, by their positions."""
        self._findings: list[Finding] = []

    def findings(self) -> list[Finding]:
        """What was found; call it when the schedule is over."""
        found = self._findings
        for destination in self._schedule.plan.destinations:
            found = found + list(self._blameless(destination))
        return found + list(self._dead_letters())

    def _committing(self, transaction: Transaction, *, flush: bool = True) -> None:
        self._writer = transaction.node
        self._commit(transaction, flush=flush)

    def _changed(self, before: Row | None, row: Row | None) -> None:
        if before is None and row is not None and row.emitted.destination == "dead":
            self.dead_letters.append(row.emitted)
        if before is not None and row is not None and before.status in ("delivered", "discarded"):
            self._find("untrue", row, f"changed after it was {before.status}")
        if row is not None and row.leased_until is not None and row.token is None:
            self._find("untrue", row, f"is leased until {row.leased_until:g} to nobody")
        if before is None or before.token is None:
            if row is not None and row.token is not None:
                self._claimed(row)
            return
        self._suspects[before.owner].pop(before.emitted.position, None)
        self._judge_writer(before, row)
        if row is not None and row.crashes > before.crashes:
            # Nobody settled it: whoever held it died, or lost it.
            if before.crashes > 1 and self._sizes[before.token] == 1:
                self._deaths[row.emitted.destination, row.emitted.event_id] += 1
            self._ran_out(before)
        if row is not None and row.token is not None and row.token != before.token:
            self._claimed(row, before)

    def _judge_writer(self, before: Row, row: Row | None) -> None:
        """Nobody but who holds a row ends its lease, moves its end, or says what became of it."""
        if before.leased_until is None or before.leased_until <= self._database.now():
            return
        writer = getattr(self._writer, "name", None)
        held = before.status, before.token, before.leased_until
        if writer != before.owner and (row is None or held != (row.status, row.token, row.leased_until)):
            self._find("untrue", before, f"was changed by {writer} while {before.owner} held it")

    def _claimed(self, row: Row, before: Row | None = None) -> None:
        assert row.token is not None
        if before is not None and not before.unleased(self._database.now()):
            self._find("duplicate", row, f"was claimed by {row.owner} while {before.owner} held it")
        self._sizes[row.token] += 1
        if row.crashes > 1:
            others = self._suspects[row.owner]
            if any(map(self._is_held, others.values())) and self._is_well(row.owner, row):
                self._find("untrue", row, f"{row.owner} held another suspect when it claimed this one")
            others[row.emitted.position] = row

    def _is_held(self, row: Row) -> bool:
        """Whether it still is as it was claimed; a server that is killed may forget a claim."""
        now = self._database.rows.get(row.emitted.id.hex)
        return now is not None and now.token == row.token and not now.unleased(self._database.now())

    def _ran_out(self, row: Row) -> None:
        if row.leased_until is None or row.leased_until > self._database.now():
            return
        if self._is_well(row.owner, row):
            self._find("duplicate", row, f"the lease of {row.owner} ran out, though nothing befell it")

    def _is_well(self, owner: str | None, row: Row) -> bool:
        """Whether nothing befell a relay, or anybody for whom it may have waited, in the last lease."""
        schedule = self._schedule
        if {"slow network", "lost answers"} & set(schedule.plan.faults):
            return False
        lease = self._leases[row.emitted.destination]
        until = (row.leased_until or 0.0) - self._database.skew
        since = min(until, schedule.world.now) - 1.5 * lease
        troubled = [*schedule.site.troubled]
        for node in schedule.all_nodes:
            if node.stalled or (node.dead and node.name == owner):
                return False
            failed = [begins for begins, ends in node.troubled if _is_trip(begins, ends) and begins >= since]
            if node.name == owner and len(failed) > 1:
                # One is made up for, because it is tried again.
                return False
            troubled += [(begins, ends) for begins, ends in node.troubled if not _is_trip(begins, ends)]
        return not any(ends >= since for _, ends in troubled)

    def _blameless(self, destination: Destination) -> Iterator[Finding]:
        """Events that failed before they were refused, or killed a relay, as often as they may."""
        receiver = self._schedule.receivers[destination.name]
        for row in self._database.rows.values():
            event_id, name = row.emitted.event_id, row.emitted.destination
            if row.status == "pending" and not 0 <= row.attempts <= row.emitted.max_attempts:
                text = f"is pending after {row.attempts} attempts of {row.emitted.max_attempts}"
                yield Finding("untrue", name, event_id, text)
            if name != destination.name or row.status != "failed":
                continue
            tries = receiver.charged[event_id] + self._deaths[name, event_id]
            if (
                tries < row.emitted.max_attempts
                and receiver.number(event_id) not in receiver.troubles.rejects
            ):
                text = f"failed after {tries} failures of its own: {row.error}"
                yield Finding("untrue", name, event_id, text)

    def _dead_letters(self) -> Iterator[Finding]:
        """Each event that failed is copied once."""
        to = {destination.name: destination.dead_letter for destination in self._schedule.plan.destinations}
        failed: Counter[UUID] = Counter()
        for row in self._database.rows.values():
            if row.status == "failed" and to[row.emitted.destination] is not None:
                failed[row.emitted.event_id] += 1
        copies = Counter(emitted.event_id for emitted in self.dead_letters)
        for event_id in failed | copies:
            if failed[event_id] != copies[event_id]:
                text = f"failed {failed[event_id]} times and was copied {copies[event_id]} times"
                kind = "lost" if failed[event_id] > copies[event_id] else "duplicate"
                yield Finding(kind, "dead", event_id, text)

    def _find(self, kind: str, row: Row, text: str) -> None:
        self._findings.append(Finding(kind, row.emitted.destination, row.emitted.event_id, text))  # type: ignore[arg-type]


def _is_trip(begins: float, ends: float) -> bool:
    """Whether what befell a node is that a round trip failed."""
    return abs(ends - begins - SUFFERS) < 1e-9
