"""Counting what a relay does, by destination."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import UUID

from relaybox.core.outcome import Delivered, Failed, Retried
from relaybox.relay.observer import Observer
from relaybox.stores.store import Claim, Held, Settlement


@dataclass(slots=True)
class Count:
    """How many deliveries came to what."""

    delivered: int = 0
    retried: int = 0
    failed: int = 0

    def add(self, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count what was settled; what was lost is another relay's to count."""
        kinds = [type(outcome) for delivery, outcome in settlements if not lost or delivery.id not in lost]
        self.delivered += kinds.count(Delivered)
        self.retried += kinds.count(Retried)
        self.failed += kinds.count(Failed)

    def __add__(self, other: Count) -> Count:
        return Count(
            self.delivered + other.delivered, self.retried + other.retried, self.failed + other.failed
        )

    def __bool__(self) -> bool:
        return bool(self.delivered or self.retried or self.failed)


class Counter(Observer):
    """Counts by destination, and remembers what holds one up."""

    def __init__(self) -> None:
        self.counts: defaultdict[str, Count] = defaultdict(Count)
        self.held: dict[str, Held] = {}

    @property
    def total(self) -> Count:
        """Of all destinations."""
        return sum(self.counts.values(), Count())

    def claimed(self, destination: str, claim: Claim) -> None:
        """What failed on the spot counts too."""
        self.counts[destination].failed += len(claim.failed)
        if claim.held is not None:
            self.held[destination] = claim.held
        elif claim.deliveries:
            self.held.pop(destination, None)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count."""
        self.counts[destination].add(settlements, lost)
