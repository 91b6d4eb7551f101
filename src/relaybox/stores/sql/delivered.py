"""What was delivered, as statements settle it: most often all rows of one lease together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered
from relaybox.stores.store import Settlement

LEASES_APART = 3
"""Of so few, each is settled by a statement of its own."""


class OfLease(NamedTuple):
    """What one statement settles, without the detour through JSON; most often all of one ``lease``."""

    keep: bool
    deliveries: Sequence[Delivery]
    lease: UUID | None = None

    def lost(self, rows: Sequence[Sequence[Any]]) -> frozenset[UUID]:
        """The statement answers with how many were ours, and with their ids if those are not all."""
        [[count, ids]] = rows
        if count == len(self.deliveries):
            return frozenset()
        ours = set((ids or "").split(","))
        return frozenset(delivery.id for delivery in self.deliveries if str(delivery.id) not in ours)


def by_lease(settlements: Sequence[Settlement]) -> list[OfLease]:
    """What was delivered: by lease if every id of one comes before every id of the next, as where each is of
    a long claim. Otherwise rows would not be locked in the order of their ids; then only by what is kept.
    """
    of: dict[tuple[bool, UUID], list[Delivery]] = {}
    for delivery, outcome in settlements:
        if type(outcome) is Delivered:
            of.setdefault((outcome.keep, delivery.lease_token), []).append(delivery)
    if len(of) <= LEASES_APART:
        leases = sorted((OfLease(keep, each, lease) for (keep, lease), each in of.items()), key=_first)
        if all(_last(one) < _first(following) for one, following in pairwise(leases)):
            return leases
    every = [
        (keep, [each for (kept, _), of_lease in of.items() if kept is keep for each in of_lease])
        for keep in (True, False)
    ]
    return [OfLease(keep, deliveries) for keep, deliveries in every if deliveries]


def _first(delivered: OfLease) -> int:
    return min(delivery.id.int for delivery in delivered.deliveries)


def _last(delivered: OfLease) -> int:
    return max(delivery.id.int for delivery in delivered.deliveries)
