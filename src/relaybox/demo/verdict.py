"""Compare what the database committed with what a destination acknowledged, with pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import TypeAlias
from uuid import UUID

from msgspec import json

from relaybox.demo.workspace import Change, Receipt
from relaybox.testing.checker import Committed, Received, check

Outage: TypeAlias = tuple[float, float]
"""When something failed, and when everything flowed again."""


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
    ids = {change: _id(change) for change in sorted(committed, key=lambda change: change.number)}
    first: dict[Change, float] = {}
    for receipt in receipts:
        if receipt.change in ids:
            first.setdefault(receipt.change, receipt.at)
    rows = [Committed("", id_, str(change.order), change.number) for change, id_ in ids.items()]
    arrived = [Received("", ids.get(receipt.change) or _id(receipt.change)) for receipt in receipts]
    # Any number of duplicates is allowed, and a change that was lost is not out of order as well.
    report = check(rows, arrived, in_flight=len(arrived), on_failed="skip")
    calm, disturbed = _latencies(first, times, outages)
    return Verdict(
        committed=report.events,
        delivered=len(first),
        lost=report.counts["lost"],
        phantom=report.counts["phantom"],
        out_of_order=report.counts["disorder"],
        duplicates=report.duplicates,
        calm=calm,
        disturbed=disturbed,
    )


def _id(change: Change) -> UUID:
    return UUID(bytes=blake2b(json.encode(change), digest_size=16).digest())


def _latencies(
    first: Mapping[Change, float], times: Mapping[str, float], outages: Sequence[Outage]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    parts: tuple[list[float], list[float]] = ([], [])
    for change, arrived in first.items():
        # The receiver may be faster than the shop, which reads the clock after its commit. A shop that was
        # stopped early may have recorded no time.
        committed = min(times.get(change.ref, arrived), arrived)
        touched = any(committed < end and arrived > begin for begin, end in outages)
        parts[touched].append(arrived - committed)
    return tuple(parts[False]), tuple(parts[True])


def milliseconds(latencies: Sequence[float], part: float) -> float | None:
    """Return the percentile in milliseconds, or None without latencies."""
    if not latencies:
        return None
    return round(1000 * sorted(latencies)[math.ceil(part * len(latencies)) - 1], 1)
