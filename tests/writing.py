"""Threads that write to a database during a test."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from tests.waiting import PATIENCE

PASSING = ("deadlock", "lock wait", "locked")


@contextmanager
def writing(
    threads: int, write: Callable[[random.Random, int], object], end: Callable[[], object] = lambda: None
) -> Iterator[None]:
    """Call ``write`` in threads until the end of the block, with a source of chance and a new number.

    Each thread calls ``end`` when it is done. Raise what ``write`` raised, unless it may be tried again.
    """
    begun, ending = threading.Barrier(threads + 1), threading.Event()

    def work(seed: int) -> None:
        chance, numbers = random.Random(seed), itertools.count(seed * 100_000)
        begun.wait(PATIENCE)
        try:
            # SQLite lets no other writer in if several come back at once.
            while not ending.wait(0.005):
                try:
                    write(chance, next(numbers))
                except Exception as error:
                    if not any(word in str(error).lower() for word in PASSING):
                        raise
        finally:
            end()

    with ThreadPoolExecutor(threads) as pool:
        working = [pool.submit(work, seed) for seed in range(1, threads + 1)]
        begun.wait(PATIENCE)
        try:
            yield
        finally:
            ending.set()
        for one in working:
            one.result()
