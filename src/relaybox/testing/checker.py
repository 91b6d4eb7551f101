"""Check that consumers received what was committed: nothing lost, out of order or twice.

``check`` compares two independent histories: the committed events, and the deliveries that each destination's
consumers recorded. With ``status`` it also judges the final rows of the outbox. It finds:

- ``lost``: never received, although everything was to be delivered, or its row says delivered or was pruned.
  A pending row is stuck instead.
- ``phantom``: received, but not committed for that destination.
- ``disorder``: first received before an earlier event of its key. Under ``block`` only a discarded earlier
  event may be missing; under ``skip`` also a failed one.
- ``duplicate``: a delivery beyond the first (one more for each replay) that no fault excuses.
- ``stuck``: its row is still pending, although everything was to be delivered.
- ``altered``: other bytes arrived than were committed.
- ``unsigned``: its signature was not valid.
- ``untrue``: a row says failed, but its consumer recorded the delivery without a fault to excuse it. Also a
  row that was never committed, or has an unknown status.

Positions show the order only if the application serialises the transactions of a key before they emit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args
from uuid import UUID

Kind = Literal["lost", "phantom", "disorder", "duplicate", "stuck", "altered", "unsigned", "untrue"]

KINDS: tuple[Kind, ...] = get_args(Kind)
POLICIES = ("block", "skip")
STATUSES = frozenset(("pending", "delivered", "failed", "discarded"))
SHOWN = 20
"""Findings that a report prints in full."""


class Committed(NamedTuple):
    """A committed row of ``outbox_event``: an event for one destination."""

    destination: str
    event_id: UUID
    key: str | None
    position: int
    payload: bytes | None = None
    """Not compared if it is None."""


class Received(NamedTuple):
    """A delivery that a destination's consumer recorded."""

    destination: str
    event_id: UUID
    payload: bytes | None = None
    signed: bool | None = None
    """True if its signature was valid; None if unknown."""


class Finding(NamedTuple):
    """A broken promise, and where."""

    kind: Kind
    destination: str
    event_id: UUID | None
    text: str

    def __str__(self) -> str:
        return f"{self.kind:<9} {self.destination} {self.event_id or '(no event)'}: {self.text}"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of ``check``."""

    findings: tuple[Finding, ...]
    counts: Mapping[Kind, int]
    """The number of findings by kind, including zeros."""
    events: int
    received: int
    duplicates: int
    """Deliveries beyond the first of each event, excused or not."""

    @property
    def ok(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def __str__(self) -> str:
        figures = {"events": self.events, "received": self.received, "received again": self.duplicates}
        lines = [f"{name:<14} {number:>9,}" for name, number in (*figures.items(), *self.counts.items())]
        lines += map(str, self.findings[:SHOWN])
        rest = len(self.findings) - SHOWN
        return "\n".join([*lines, f"and {rest:,} more"] if rest > 0 else lines)


States: TypeAlias = Mapping[tuple[str, UUID], str]
Excuses: TypeAlias = int | Mapping[tuple[str, UUID], int]

# The UUID's integer: UUIDs are hashed and compared in Python, which takes most of the time.
_Event: TypeAlias = tuple[str, int]
_Known: TypeAlias = dict[_Event, Committed]

Fate: TypeAlias = tuple[Committed, int | None, str | None]
"""An event, its first arrival (None: never received) and its row's status (None: not known)."""

Overtaking: TypeAlias = tuple[Committed, int, int, int | None]
"""An event, its arrival, and the position and arrival (None: never) of the one that it came before."""

_NEVER = 2**63 - 1


def check(
    committed: Iterable[Committed],
    received: Iterable[Received],
    *,
    status: States | None = None,
    in_flight: Excuses = 0,
    on_failed: Literal["block", "skip"] = "block",
    drained: bool = True,
) -> Report:
    """Compare what was committed, in order of position, with what was received, in order of arrival.

    - ``status``: the row's status by (destination, event id); a missing row was delivered and pruned.
    - ``in_flight``: deliveries beyond the first that faults excuse, in total or by (destination, event id).
    - ``drained``: everything was to be delivered by now; otherwise pending rows are fine.
    """
    if on_failed not in POLICIES:
        raise ValueError(f"on_failed = {on_failed!r}; expected one of {', '.join(map(repr, POLICIES))}")
    rows, receipts = list(committed), list(received)
    _check_ids("committed", rows)
    _check_ids("received", receipts)
    _check_ids("status", status or ())
    _check_ids("in_flight", () if isinstance(in_flight, int) else in_flight)
    known = _known(rows)
    first, again = _arrivals(receipts)
    fates: list[Fate] = [
        (row, first.get(event), None if status is None else status.get(row[:2], "delivered"))
        for event, row in known.items()
    ]
    findings = (
        *_rows(fates, status, drained),
        *_phantoms(known, first, receipts),
        *_disorder(fates, on_failed),
        *_duplicates(known, again, _replays(rows, known), in_flight),
        *_contents(known, receipts),
        *_untrue(fates, known, status, in_flight),
    )
    counts = Counter(finding.kind for finding in findings)
    totals: dict[Kind, int] = {kind: counts[kind] for kind in KINDS}
    return Report(findings, totals, len(known), len(receipts), len(again))


def _check_ids(name: str, values: Iterable[Sequence[object]]) -> None:
    """Raise if an id is text, which never equals a UUID."""
    for value in values:
        if not isinstance(value[1], UUID):
            seen = f"{value[1]!r}, a {type(value[1]).__name__}"
            raise TypeError(f"{name}, {value[0]!r}: event_id = {seen}; expected a uuid.UUID: UUID(text)")


def _known(rows: Iterable[Committed]) -> _Known:
    known: _Known = {}
    last: dict[str, int] = {}
    for row in rows:
        if row.position < last.get(row.destination, row.position):
            raise ValueError(
                f"committed, {row.destination!r}: position {row.position} stands after "
                f"{last[row.destination]}; give the rows in order of position"
            )
        last[row.destination] = row.position
        known.setdefault((row.destination, row.event_id.int), row)
    return known


def _arrivals(receipts: Iterable[Received]) -> tuple[dict[_Event, int], list[Received]]:
    first: dict[_Event, int] = {}
    again = []
    for arrival, receipt in enumerate(receipts):
        if first.setdefault((receipt.destination, receipt.event_id.int), arrival) != arrival:
            again.append(receipt)
    return first, again


def _rows(fates: Iterable[Fate], status: States | None, drained: bool) -> Iterator[Finding]:
    for row, arrival, state in fates:
        if drained and state == "pending":
            yield Finding("stuck", *row[:2], f"{_place(row)} is still pending")
        elif arrival is None and (state == "delivered" or (drained and state not in ("failed", "discarded"))):
            says = ""
            if status is not None:
                says = f"; its row says {state}" if row[:2] in status else "; no row of it is left"
            yield Finding("lost", *row[:2], f"{_place(row)} was never received{says}")


def _phantoms(known: _Known, first: Mapping[_Event, int], receipts: Sequence[Received]) -> Iterator[Finding]:
    strangers = [receipts[arrival] for event, arrival in first.items() if event not in known]
    if not strangers:
        return
    committed: dict[int, list[str]] = {}
    for destination, number in known:
        committed.setdefault(number, []).append(destination)
    for receipt in strangers:
        others = ", ".join(committed.get(receipt.event_id.int, []))
        text = f"was committed only for {others}" if others else "was never committed"
        yield Finding("phantom", *receipt[:2], f"was received, but {text}")


def _disorder(fates: Iterable[Fate], on_failed: str) -> Iterator[Finding]:
    for row, arrival, position, until in overtakings(fates, on_failed):
        fate = "never came" if until is None else f"came as number {until + 1}"
        text = f"{_place(row)} came as number {arrival + 1}, but position {position} before it {fate}"
        yield Finding("disorder", *row[:2], text)


def overtakings(fates: Iterable[Fate], on_failed: str) -> Iterator[Overtaking]:
    """Yield every event that came before one of its key that it had to follow."""
    latest: dict[tuple[str, str], tuple[int, int]] = {}
    for row, arrival, state in fates:
        if row.key is None:
            continue
        key = row.destination, row.key
        until, position = latest.get(key, (-1, 0))
        if arrival is not None and arrival < until:
            yield row, arrival, position, None if until == _NEVER else until
        came = _NEVER if arrival is None else arrival
        failed = state == "failed" or (state is None and arrival is None)
        # Later events of a key need not wait for one that was discarded, or failed and skipped.
        if came > until and state != "discarded" and not (failed and on_failed == "skip"):
            latest[key] = came, row.position


def _replays(rows: Sequence[Committed], known: _Known) -> Counter[_Event]:
    if len(rows) == len(known):
        return Counter()
    return Counter((row.destination, row.event_id.int) for row in rows) - Counter(known.keys())


def _duplicates(
    known: _Known, again: Iterable[Received], replays: Counter[_Event], in_flight: Excuses
) -> Iterator[Finding]:
    """Yield deliveries that came again, were not replayed, and exceed those in flight."""
    excused: Counter[object] = Counter()
    for receipt in again:
        destination, event_id, *_ = receipt
        event = destination, event_id.int
        if event not in known:
            continue
        if replays[event] > 0:
            replays[event] -= 1
            continue
        whose = None if isinstance(in_flight, int) else event
        excused[whose] += 1
        limit = _excuse(in_flight, destination, event_id)
        if excused[whose] > limit:
            text = f"was received again: {limit} {'for it' if whose else 'in all'} excused by faults"
            yield Finding("duplicate", destination, event_id, text)


def _contents(known: _Known, receipts: Iterable[Received]) -> Iterator[Finding]:
    for destination, event_id, payload, signed in receipts:
        if payload is not None:
            row = known.get((destination, event_id.int))
            if row is not None and row.payload is not None and row.payload != payload:
                text = f"{_place(row)} arrived with other bytes: {_difference(row.payload, payload)}"
                yield Finding("altered", destination, event_id, text)
        if signed is False:
            yield Finding("unsigned", destination, event_id, "its signature did not hold")


def _untrue(
    fates: Iterable[Fate], known: _Known, status: States | None, in_flight: Excuses
) -> Iterator[Finding]:
    if status is None:
        return
    for row, arrival, state in fates:
        if state not in STATUSES:
            yield Finding("untrue", *row[:2], f"{_place(row)} says {state!r}, which is not a status")
        elif state == "failed" and arrival is not None and not _excuse(in_flight, *row[:2]):
            text = f"{_place(row)} says failed, but was received without any fault"
            yield Finding("untrue", *row[:2], text)
    for (destination, event_id), state in status.items():
        if (destination, event_id.int) not in known:
            text = f"a row says {state}, but the event was never committed"
            yield Finding("untrue", destination, event_id, text)


def _excuse(in_flight: Excuses, destination: str, event_id: UUID) -> int:
    return in_flight if isinstance(in_flight, int) else in_flight.get((destination, event_id), 0)


def _place(row: Committed) -> str:
    return f"position {row.position}" + ("" if row.key is None else f" of key {row.key!r}")


def _difference(wanted: bytes, got: bytes) -> str:
    shorter = min(len(wanted), len(got))
    at = next((index for index in range(shorter) if wanted[index] != got[index]), shorter)
    return f"{len(got)} bytes instead of {len(wanted)}, different from byte {at + 1} on"
