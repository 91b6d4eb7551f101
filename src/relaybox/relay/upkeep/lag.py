"""How long deliveries took, counted in buckets: each reaches √2 times as far as the one before it.

Bucket 0 ends at a millisecond, the last but one at twelve days. From the counts every percentile can be
read to within a bucket, and counts of several relays and minutes are simply added.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

LAST = 61
"""Takes whatever is longer."""
FIRST_ENDS = 0.001


def bucket(seconds: float) -> int:
    """The bucket of a lag."""
    if seconds <= FIRST_ENDS:
        return 0
    # Rounded, so that what ends a bucket exactly is still in it.
    return min(LAST, math.ceil(round(2 * math.log2(seconds / FIRST_ENDS), 9)))


def ends(index: int) -> float:
    """The longest lag of a bucket, in seconds."""
    return FIRST_ENDS * 2 ** (index / 2)


def percentile(counts: Mapping[int, int], part: float) -> float | None:
    """The lag that ``part`` of the deliveries did not exceed (0.99: all but one of a hundred)."""
    wanted = part * sum(counts.values())
    seen = 0
    for index in sorted(counts):
        seen += counts[index]
        if counts[index] and seen >= wanted:
            return ends(index)
    return None
