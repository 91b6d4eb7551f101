"""Compare what the database committed with what a destination acknowledged, with pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from relaybox.demo.workspace import Change, Receipt


@dataclass(frozen=True, slots=True)
class Outage:
    """The time from a failure until everything flowed again."""

    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """The fate of the committed changes at one destination, or at all together.

    ``calm`` and ``disturbed`` are seconds from commit to first acknowledgement, outside and in an outage.
    """

    committed: int = 0
    delivered: int = 0
    lost: int = 0
    phantom: int = 0
    out_of_order: int = 0
    duplicates: int = 0
    calm: tuple[float, ...] = field(default=(), repr=False)
    disturbed: tuple[float, ...] = field(default=(), repr=False)

    @property
    def good(self) -> bool:
        """True if nothing was lost, phantom or out of order. Duplicates are allowed."""
        return not (self.lost or self.phantom or self.out_of_order)

    def __add__(self, other: Verdict) -> Verdict:
        names = [each.name for each in fields(self)]
        return Verdict(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def summary(self) -> dict[str, int | float | None]:
        """Return the values for the line of JSON."""
        latencies = (*self.calm, *self.disturbed)
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        counts = {name: value for name, value in values.items() if isinstance(value, int)}
        return {**counts, "p50_ms": milliseconds(latencies, 0.5), "p99_ms": milliseconds(latencies, 0.99)}


def compare(
    committed: Iterable[Change],
    receipts: Sequence[Receipt],
    times: Mapping[str, float],
    outages: Sequence[Outage] = (),
) -> Verdict:
    """Return the verdict on one destination; ``receipts`` are in the order of their arrival.

    One that does not match a committed change exactly is a phantom.
    """
    real = set(committed)
    first: dict[Change, float] = {}
    for receipt in receipts:
        if receipt.change in real:
            first.setdefault(receipt.change, receipt.at)
    phantoms = sum(receipt.change not in real for receipt in receipts)
    calm, disturbed = _latencies(first, times, outages)
    return Verdict(
        committed=len(real),
        delivered=len(first),
        lost=len(real) - len(first),
        phantom=phantoms,
        out_of_order=_out_of_order(first),
        duplicates=len(receipts) - phantoms - len(first),
        calm=calm,
        disturbed=disturbed,
    )


def _out_of_order(arrivals: Iterable[Change]) -> int:
    """Count first arrivals after a later change of the same order."""
    latest: dict[int, int] = {}
    late = 0
    for change in arrivals:
        late += change.number < latest.get(change.order, 0)
        latest[change.order] = max(change.number, latest.get(change.order, 0))
    return late


def _latencies(
    first: Mapping[Change, float], times: Mapping[str, float], outages: Sequence[Outage]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    parts: tuple[list[float], list[float]] = ([], [])
    for change, arrived in first.items():
        # The receiver may be faster than the shop, which reads the clock after its commit. A shop that was
        # stopped early may have recorded no time.
        committed = min(times.get(change.ref, arrived), arrived)
        touched = any(committed < outage.end and arrived > outage.begin for outage in outages)
        parts[touched].append(arrived - committed)
    return tuple(parts[False]), tuple(parts[True])


def milliseconds(latencies: Sequence[float], part: float) -> float | None:
    """Return the percentile in milliseconds, or None without latencies."""
    if not latencies:
        return None
    return round(1000 * sorted(latencies)[math.ceil(part * len(latencies)) - 1], 1)
