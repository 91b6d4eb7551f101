"""Failed deliveries by what went wrong: one group for each kind of error at each destination."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from relaybox.core.fingerprint import Fingerprint, fingerprint
from relaybox.stores.journal import FailedRows, Failure

LOOKED_AT = 10_000
"""Failed rows that one answer is made of, the newest."""

AT_ONCE = 1_000
"""Rows that are grouped while everything else waits; more of them are left to a thread."""

TYPES = 10
"""Event types that a group names."""


@dataclass(frozen=True, slots=True)
class FailureGroup:
    """Failed rows of one fingerprint; ``message`` is what their errors have in common."""

    fingerprint: str
    destination: str
    error_class: str
    message: str
    count: int
    first_at: datetime
    last_at: datetime
    example: UUID
    """A delivery, the newest."""
    error: str
    """What went wrong with that one, as it was told (its beginning)."""
    event_types: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failures:
    """The groups, the largest first; ``capped``: only the newest ``looked_at`` rows are in them."""

    groups: tuple[FailureGroup, ...]
    looked_at: int
    capped: bool


def group_failures(rows: FailedRows, limit: int) -> Failures:
    """The largest groups, ``limit`` of them."""
    groups: dict[str, tuple[Fingerprint, list[Failure]]] = {}
    for failure in rows.failures:
        found = fingerprint(failure.destination, failure.error)
        groups.setdefault(found.hash, (found, []))[1].append(failure)
    made = sorted((_group(*parts) for parts in groups.values()), key=_rank)
    return Failures(tuple(made[:limit]), sum(one.count for one in rows.failures), rows.capped)


def _group(found: Fingerprint, failures: Sequence[Failure]) -> FailureGroup:
    newest = max(failures, key=lambda failure: failure.example)
    types: dict[str, int] = {}
    for failure in failures:
        types[failure.event_type] = types.get(failure.event_type, 0) + failure.count
    return FailureGroup(
        fingerprint=found.hash,
        destination=failures[0].destination,
        error_class=found.error_class,
        message=found.message,
        count=sum(types.values()),
        first_at=min(failure.first_at for failure in failures),
        last_at=max(failure.last_at for failure in failures),
        example=newest.example,
        error=newest.error,
        event_types=tuple(sorted(types, key=lambda name: (-types[name], name))[:TYPES]),
    )


def _rank(group: FailureGroup) -> tuple[int, float, str]:
    return -group.count, -group.last_at.timestamp(), group.fingerprint
