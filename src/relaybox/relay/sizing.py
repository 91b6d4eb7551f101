"""How much to claim at once: what the sink takes in a tenth of a second, bounded in rows and in bytes."""

from __future__ import annotations

from relaybox.config import Destination

LARGEST = 1000
BATCHES_IN_FLIGHT = 4
BYTES_IN_FLIGHT = 32 * 2**20
BYTES_A_CLAIM = BYTES_IN_FLIGHT // BATCHES_IN_FLIGHT
"""The database ends a claim there, also of rows that are larger than those before."""
PARTS_OF_A_SECOND = 10


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

    @property
    def rows(self) -> int:
        """How many rows to ask for."""
        # About as many as fit: some databases have to read a payload to tell how large it is.
        if self._bytes_a_row * self._rows <= BYTES_A_CLAIM:
            return self._rows
        return max(1, int(BYTES_A_CLAIM / self._bytes_a_row))

    @property
    def in_flight(self) -> int:
        """How many rows may be in flight."""
        return BATCHES_IN_FLIGHT * self.rows

    def has_room(self, rows: int, size: int) -> bool:
        """Whether so much is in flight that a whole claim still fits."""
        return rows + self.rows <= self.in_flight and size + BYTES_A_CLAIM <= BYTES_IN_FLIGHT

    def learn(self, rows: int, size: int, answered: int, now: float) -> None:
        """A claim got so many rows and bytes, and so many were ``answered`` since the last one."""
        if rows:
            self._bytes_a_row += (size / rows - self._bytes_a_row) / 2
        seconds, self._learned_at = now - self._learned_at, now
        soon = answered / max(seconds, 0.001) / PARTS_OF_A_SECOND
        step = min(max(round(soon), self._rows // 2), 2 * self._rows)
        self._rows = min(max(step, self._smallest), self._largest)
