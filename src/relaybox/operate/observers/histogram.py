"""Counting many durations at once into the buckets of a histogram."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence


class Histogram:
    """How many durations were no longer than each bound. One thread adds, another may read."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * len(bounds)
        self._all = 0
        self._sum = 0.0

    def add(self, durations: list[float]) -> None:
        """Count these; the list is sorted on the way, so that a bound costs a look and not a pass.

        What two clocks make negative counts as nothing.
        """
        durations.sort()
        # From the largest down: whoever reads in between, upwards, finds no bucket below a smaller one.
        self._all += len(durations)
        for at in reversed(range(len(self._bounds))):
            self._counts[at] += bisect_right(durations, self._bounds[at])
        self._sum += sum(durations[bisect_right(durations, 0.0) :])

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """The bounds with their counts, the last without a bound; and the sum of all durations."""
        counts = [
            (repr(bound), float(count)) for bound, count in zip(self._bounds, self._counts, strict=True)
        ]
        return [*counts, ("+Inf", float(self._all))], self._sum
