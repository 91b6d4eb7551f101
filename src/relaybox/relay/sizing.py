"""How much to claim at once: bounded in rows and in bytes, more while the sink is faster than the claims."""

from __future__ import annotations

from relaybox.config import Destination

LARGEST = 1000
BATCHES_IN_FLIGHT = 4
BYTES_IN_FLIGHT = 32 * 2**20
PARTS_OF_A_SECOND = 10
"""A batch of a destination with a rate limit is what may leave in a tenth of a second."""


class Sizing:
    """The size of the next claim."""

    def __init__(self, destination: Destination) -> None:
        self._smallest = destination.batch_size
        self._largest = max(destination.batch_size, LARGEST)
        if destination.rate_limit is not None:
            by_rate = max(1, int(destination.rate_limit / PARTS_OF_A_SECOND))
            self._smallest = self._largest = min(self._smallest, by_rate)
        self._rows = self._smallest
        self._bytes_a_row = 0.0

    @property
    def rows(self) -> int:
        """How many rows to ask for."""
        if self._bytes_a_row * self._rows * BATCHES_IN_FLIGHT <= BYTES_IN_FLIGHT:
            return self._rows
        return max(1, int(BYTES_IN_FLIGHT / BATCHES_IN_FLIGHT / self._bytes_a_row))

    @property
    def in_flight(self) -> int:
        """How many rows may be in flight."""
        return BATCHES_IN_FLIGHT * self.rows

    def learn(self, rows: int, size: int, *, idle: bool) -> None:
        """A claim got so many rows and bytes; ``idle``: nothing was left to send when it came."""
        if rows:
            self._bytes_a_row += (size / rows - self._bytes_a_row) / 2
        if idle and rows >= self.rows:
            self._rows = min(2 * self._rows, self._largest)
        else:
            self._rows = max(self._smallest, self._rows // 2)
