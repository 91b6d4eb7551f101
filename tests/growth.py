"""See that a cost grows with the size of the input, not with its square."""

from __future__ import annotations

from collections.abc import Callable
from time import thread_time

SMALL, LARGE = 250, 4_000
TIMES = LARGE // SMALL


def is_linear(work: Callable[[int], object]) -> bool:
    """True if the work of the large size costs nearer to 16 than to 256 times that of the small one."""
    # The least of several: a busy machine only adds.
    small, large = (min(_cpu(work, size) for _ in range(5)) for size in (SMALL, LARGE))
    return large < TIMES**1.5 * small


def _cpu(work: Callable[[int], object], size: int) -> float:
    began = thread_time()
    work(size)
    return thread_time() - began
