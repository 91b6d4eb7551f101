"""How many inputs are fed to what, and the loop that feeds and counts them.

RELAYBOX_INPUTS sets the number in all: 10,000 unless it is set, always the same ones. A run that sets it
draws new ones, by a seed that it prints and that RELAYBOX_SEED sets.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st

SHARES = {
    "emit": 35,
    "emit, delivered from SQLite": 10,
    "emit, delivered from PostgreSQL": 3,
    "emit, delivered from MariaDB": 3,
    "configuration": 17,
    "command line": 1,
    "HTTP answers": 8,
    "rows edited in SQLite": 3,
    "rows edited in PostgreSQL": 1,
    "rows edited in MariaDB": 1,
    "signatures and envelopes": 18,
}
"""The hundredths of all inputs that each area gets."""

SHORT = 10_000

T = TypeVar("T")
E = TypeVar("E", bound=Exception)
Batch: TypeAlias = Callable[[random.Random, int], None]
"""Feeds so many inputs, drawn with this."""


def asked() -> int:
    """Return how many inputs there are to be in all."""
    return int(os.environ.get("RELAYBOX_INPUTS") or SHORT)


def seed() -> int | None:
    """Return the seed of new inputs, or None to draw the same inputs every time."""
    given_ = os.environ.get("RELAYBOX_SEED")
    if given_:
        return int(given_)
    if not os.environ.get("RELAYBOX_INPUTS"):
        return None
    # One for all processes of a run that has several.
    return zlib.crc32(os.environ.get("PYTEST_XDIST_TESTRUNUID", _OWN).encode())


_OWN = str(random.SystemRandom().getrandbits(32))


def share(area: str) -> int:
    """Return how many of them are for this area."""
    return -(-asked() * SHARES[area] // 100)


def each(one: Callable[[random.Random], Any]) -> Batch:
    """Feeds one input after the other; an error says which one it was."""

    def batch(source: random.Random, size: int) -> None:
        for _ in range(size):
            number = source.getrandbits(64)
            try:
                one(random.Random(number))
            except BaseException as error:
                error.add_note(f"the input drawn by random.Random({number})")
                raise

    return batch


def attempt(work: Callable[[], T], *kinds: type[E]) -> tuple[T, None] | tuple[None, E]:
    """Return the result and None, or None and an error of these kinds; other errors are raised."""
    try:
        return work(), None
    except kinds as error:
        return None, error


def feed(area: str, batch: Batch, size: int) -> int:
    """Feed an area's share in batches of ``size``; return how many inputs that is."""
    fed = 0

    def run(number: int) -> None:
        nonlocal fed
        batch(random.Random(number), size)
        fed += size

    drawn_by = seed()
    examples = -(-share(area) // size)
    settings = hypothesis.settings(
        max_examples=examples,
        derandomize=drawn_by is None,
        # A smaller number does not make a simpler input.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    test = settings(given(st.integers(0, 2**64 - 1))(run))
    (test if drawn_by is None else hypothesis.seed(drawn_by)(test))()
    return fed
