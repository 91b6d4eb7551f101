"""Decide how much to claim at once: what the sink takes in a tenth of a second, limited in rows and bytes.

A claim takes few rows of one key at first, and more while such runs are sent within a fifth of a second.
Otherwise rows of slow keys would wait behind each other and take the room of other keys.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from relaybox.core.event import Delivery
from relaybox.core.settings import Destination

LARGEST = 1000
BATCHES_IN_FLIGHT = 4
BYTES_IN_FLIGHT = 32 * 2**20
BYTES_A_CLAIM = BYTES_IN_FLIGHT // BATCHES_IN_FLIGHT
"""The database ends a claim at this size, even if its rows are larger than those before."""
DOUBTS = 50
"""Claims after which rows may be assumed to be light again."""
PARTS_OF_A_SECOND = 10
FAST, SLOW = 0.2, 1.0
"""Seconds. Runs get longer after a batch faster than ``FAST``, and shorter after one slower than ``SLOW``."""


class Sizing:
    """The size of the next claim."""

    def __init__(self, destination: Destination) -> None:
        self._smallest = destination.batch_size
        self._largest = max(destination.batch_size, LARGEST)
        if destination.rate_limit is not None:
            by_rate = max(1, int(destination.rate_limit / PARTS_OF_A_SECOND))
            self._smallest = self._largest = min(self._smallest, by_rate)
        self._rows = self._smallest
        self._learned_at = 0.0
        self._bytes_a_row = 0.0
        self._doubts = 0
        self._concurrency = destination.concurrency
        self._run = 1

    @property
    def rows(self) -> int:
        """Return how many rows to ask for."""
        # About as many as fit: some databases have to read a payload to measure it.
        if self._bytes_a_row * self._rows <= BYTES_A_CLAIM:
            return self._rows
        return max(1, int(BYTES_A_CLAIM / self._bytes_a_row))

    @property
    def light(self) -> bool:
        """True if the next claim most likely fits, even with the most rows."""
        return not self._doubts and self._bytes_a_row * self._largest <= BYTES_A_CLAIM / 2

    def doubt_light(self) -> None:
        """Record that rows assumed to be light did not fit: some rows may always be large."""
        self._doubts = DOUBTS

    @property
    def in_flight(self) -> int:
        """Return how many rows may be in flight."""
        return BATCHES_IN_FLIGHT * self.rows

    def has_room(self, more: int, rows: int, size: int) -> bool:
        """True if a claim of ``more`` rows fits beside the rows and bytes in flight."""
        return rows + more <= self.in_flight and size + BYTES_A_CLAIM <= BYTES_IN_FLIGHT

    @property
    def narrow(self) -> bool:
        """True if running sends alone can leave no room for a claim."""
        return self._concurrency > (BATCHES_IN_FLIGHT - 1) * self.rows

    @property
    def run(self) -> int:
        """Return how many rows of one key to ask for.

        Even at the smallest run, one run for each concurrent send leaves room for another claim.
        """
        return max(self._run, (BATCHES_IN_FLIGHT - 1) * self.rows // self._concurrency)

    def shorten_run(self) -> None:
        """Claim single rows of a key again: nothing was answered for long."""
        self._run = 1

    def learn_run(self, deliveries: Sequence[Delivery], seconds: float) -> None:
        """Adapt the run to a batch that took ``seconds`` and sent the deliveries of each key one by one."""
        if seconds > SLOW:
            self._run = 1
        elif seconds < FAST and longest_run(deliveries) >= self.run:
            self._run = min(4 * self.run, self._largest)

    def learn(self, rows: int, size: int, answered: int, now: float) -> None:
        """Learn from a claim's rows and bytes, and from how many were ``answered`` since the last claim."""
        if rows:
            self._bytes_a_row += (size / rows - self._bytes_a_row) / 2
            self._doubts = max(0, self._doubts - 1)
        seconds, self._learned_at = now - self._learned_at, now
        soon = answered / max(seconds, 0.001) / PARTS_OF_A_SECOND
        step = min(max(round(soon), self._rows // 2), 2 * self._rows)
        self._rows = min(max(step, self._smallest), self._largest)


def longest_run(deliveries: Sequence[Delivery]) -> int:
    """Return the largest number of deliveries with the same key."""
    keys = Counter([delivery.ordering_key for delivery in deliveries])
    del keys[None]
    return max(keys.values(), default=0)
