"""What became of each event: rows and records side by side, judged."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import groupby
from typing import Any, Literal
from uuid import UUID

from relaybox.cli.scratch import Fate, Scratch
from relaybox.testing.checker import Committed, Overtaking, overtakings

Difference = Literal["lost", "phantom", "disorder", "altered", "duplicate"]


@dataclass(frozen=True, slots=True)
class Terms:
    """What is compared with what."""

    destination: str
    on_failed: str
    since: datetime | None
    until: datetime | None
    kept_since: datetime | None
    """What was emitted before may be pruned; None: nothing is."""
    place: Callable[[int], str]
    """The words for a place among the records."""

    def covers(self, moment: datetime) -> bool:
        """Whether an event of that moment is compared."""
        return (self.since is None or self.since <= moment) and (self.until is None or moment < self.until)


@dataclass(slots=True)
class Comparison:
    """How many there are of each kind, and the first of each in words."""

    shown: int
    counts: Counter[str] = field(default_factory=Counter)
    findings: dict[Difference, list[tuple[UUID, str]]] = field(default_factory=lambda: defaultdict(list))
    has_payloads: bool = False
    newest_lost: datetime | None = None
    oldest_record: datetime | None = None

    def find(self, kind: Difference, event: UUID, text: str, times: int = 1) -> None:
        """Count it, and keep the first few."""
        self.counts[kind] += times
        if len(self.findings[kind]) < self.shown:
            self.findings[kind].append((event, text))

    def differences(self, *, strict: bool) -> int:
        """How many there are that should not be; duplicates only count when ``strict``."""
        kinds = ("lost", "phantom", "disorder", "altered", *(("duplicate",) if strict else ()))
        return sum(self.counts[kind] for kind in kinds)


def compare(scratch: Scratch, terms: Terms, to: Comparison) -> None:
    """Judge every event, then every record that belongs to none."""
    to.counts["outside"] += scratch.left_out()
    for _, of_key in groupby(scratch.fates(), key=lambda fate: fate.key):
        for overtaking in overtakings(_judged(of_key, terms, to), terms.on_failed):
            to.find("disorder", overtaking.row.event_id, _overtook(overtaking, terms))
    for event, place in scratch.strangers():
        _judge_stranger(event, place, terms, to)


def _judged(fates: Iterator[Fate], terms: Terms, to: Comparison) -> Iterator[Any]:
    """Judge each by itself, and hand on what has a place in the order of its key."""
    for fate in fates:
        to.counts["events"] += 1
        to.counts["keyed"] += fate.key is not None
        if fate.place is not None:
            _judge_recorded(fate, to, terms)
        elif fate.sent:
            text = f"was emitted at {fate.created:%Y-%m-%d %H:%M:%S} UTC, and its row says delivered"
            to.find("lost", fate.event, text)
            to.newest_lost = max(to.newest_lost or fate.created, fate.created)
            continue
        else:
            # What was delivered since the records were read may stand in them by now.
            to.counts["pending" if fate.status == "delivered" else fate.status] += 1
        row = Committed(terms.destination, fate.event, fate.key, fate.position)
        yield row, fate.place, fate.status


def _judge_recorded(fate: Fate, to: Comparison, terms: Terms) -> None:
    to.counts["recorded"] += 1
    if (moment := moment_of(fate.event)) is not None:
        to.oldest_record = min(to.oldest_record or moment, moment)
    again = fate.times - fate.rows
    if again > 0:
        assert fate.place is not None
        text = f"was recorded {fate.times} times, first at {terms.place(fate.place)}"
        to.find("duplicate", fate.event, text, again)


def _judge_stranger(event: UUID, place: int, terms: Terms, to: Comparison) -> None:
    moment = moment_of(event)
    if moment is not None and not terms.covers(moment):
        to.counts["outside"] += 1
    elif moment is not None and terms.kept_since is not None and moment < terms.kept_since:
        to.counts["pruned"] += 1
    else:
        text = f"was recorded at {terms.place(place)}, and {terms.destination} has no row of it"
        to.find("phantom", event, text)


def _overtook(overtaking: Overtaking, terms: Terms) -> str:
    row, arrival, position, until = overtaking
    came = "was not recorded" if until is None else f"came at {terms.place(until)}"
    mine = f"position {row.position} of key {row.key!r} came at {terms.place(arrival)}"
    return f"{mine}, but position {position} before it {came}"


def moment_of(event: UUID) -> datetime | None:
    """When an event was emitted, by its id; None where the id does not say."""
    if event.version != 7:
        return None
    try:
        return datetime.fromtimestamp((event.int >> 80) / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None
