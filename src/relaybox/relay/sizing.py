"""How much to claim at once: what the sink takes in a tenth of a second, bounded in rows and in bytes.

Of one key, as many rows as every place may have, and more as long as such runs are sent in a fifth of a
second: rows of slow keys that wait behind each other would take the room of other keys while places are free.
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
"""The database ends a claim there, also of rows that are larger than those before."""
DOUBTS = 50
"""Claims after which rows may be taken to be light again."""
PARTS_OF_A_SECOND = 10
FAST, SLOW = 0.2, 1.0
"""Seconds in which a batch with a run is sent that may be longer, or must be shorter."""


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
        """How many rows to ask for."""
        # About as many as fit: some databases have to read a payload to tell how large it is.
        if self._bytes_a_row * self._rows <= BYTES_A_CLAIM:
            return self._rows
        return max(1, int(BYTES_A_CLAIM / self._bytes_a_row))

    @property
    def light(self) -> bool:
        """True if the rows of the next claim most likely fit, however many they are."""
        return not self._doubts and self._bytes_a_row * self._largest <= BYTES_A_CLAIM / 2

    def doubt_light(self) -> None:
        """Rows did not fit that were taken to be light: some of them may be large all the time."""
        self._doubts = DOUBTS

    @property
    def in_flight(self) -> int:
        """How many rows may be in flight."""
        return BATCHES_IN_FLIGHT * self.rows

    def has_room(self, more: int, rows: int, size: int) -> bool:
        """True if a claim of so many ``more`` rows fits beside the rows and bytes in flight."""
        return rows + more <= self.in_flight and size + BYTES_A_CLAIM <= BYTES_IN_FLIGHT

    @property
    def narrow(self) -> bool:
        """True if the destination can be sending so much that no claim fits beside it."""
        return self._concurrency > (BATCHES_IN_FLIGHT - 1) * self.rows

    @property
    def run(self) -> int:
        """How many rows of one key to ask for.

        However slow they are: with fewer keys than places in flight, there is room for a claim.
        """
        return max(self._run, (BATCHES_IN_FLIGHT - 1) * self.rows // self._concurrency)

    def shorten_run(self) -> None:
        """Nothing was answered for long."""
        self._run = 1

    def learn_run(self, deliveries: Sequence[Delivery], seconds: float) -> None:
        """A batch was answered in so many seconds, one key's deliveries one after the other."""
        if seconds > SLOW:
            self._run = 1
        elif seconds < FAST and longest_run(deliveries) >= self.run:
            self._run = min(4 * self.run, self._largest)

    def learn(self, rows: int, size: int, answered: int, now: float) -> None:
        """A claim got so many rows and bytes, and so many were ``answered`` since the last one."""
        if rows:
            self._bytes_a_row += (size / rows - self._bytes_a_row) / 2
            self._doubts = max(0, self._doubts - 1)
        seconds, self._learned_at = now - self._learned_at, now
        soon = answered / max(seconds, 0.001) / PARTS_OF_A_SECOND
        step = min(max(round(soon), self._rows // 2), 2 * self._rows)
        self._rows = min(max(step, self._smallest), self._largest)


def longest_run(deliveries: Sequence[Delivery]) -> int:
    """How many of them have the same key."""
    keys = Counter([delivery.ordering_key for delivery in deliveries])
    del keys[None]
    return max(keys.values(), default=0)
