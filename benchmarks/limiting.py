"""Name the limit of each figure: by the measurements if they show it, else by how the figure comes about."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import NamedTuple

FULL = 0.85
"""Share of the available CPU: a process that is busier has little left."""

TEXTS = {
    "latency p50": "the commit's signal, a NOTIFY, one claim and one call; each is one turn of a process",
    "latency p99": "the other work on the cores at that moment: the emitters, PostgreSQL and its fsync",
    "1,000/s for": "the events that came during one round of claim, call and settle wait",
    "emit with wake-up": "one more INSERT in the transaction, and after it a NOTIFY without a wait",
    "emit,": "the INSERT itself: its round trip and its indexes; the rest is to make the ids and the JSON",
    "idle relay": "the polls of each destination and the relay's heartbeat, which do not get fewer",
    "claim, unordered": "the claimed rows: the index skips all others",
    "claim, ordered": "the claimed rows and keys: the index skips all others",
    "ordered claim:": "the rows and keys that it reads: keys that have to wait are parked once",
    "store,": "Python: a row becomes a delivery, and delivered rows an array",
    "inbox,": "the INSERT itself: its round trip and its indexes",
    "Django: emit_event": "the round trip of the INSERT; the rest is to make the ids and the JSON",
    "Django: Celery drain": "one connection, which claims and settles in turns",
    "beside": "how long a statement may wait for a lock, and the cores, which all destinations share",
    "connections of a relay": "the bound of its pool: a statement that takes too long is cancelled first",
    "50 kills": "the rest of the leases that the last one held, and the next look at the table",
    "Django: admin list": "the search, which reads a bounded number of rows",
}
"""Limits by the beginning of a bar's name, if no measurement shows them."""


class Busy(NamedTuple):
    """Per cent of a core that the relays take, and that PostgreSQL takes."""

    relay: float
    server: float

    @classmethod
    def median(cls, every: Sequence[Busy]) -> Busy:
        """Return the median of several."""
        return cls(*(statistics.median(values) for values in zip(*every, strict=True)))

    def limit(self) -> str:
        """Return what limits the rate."""
        cores = os.cpu_count() or 1
        takes = f"PostgreSQL takes {self.server:.0f} % of a core, the relay {self.relay:.0f} %"
        if self.relay + self.server >= FULL * 100 * cores:
            return f"the {cores} cores: {takes}"
        if self.relay >= FULL * 100:
            return f"Python: {takes}"
        return f"one waits for the other, and both for the disk: {takes}"


def text(bar: str) -> str:
    """Return the text for a bar."""
    return next((text for begin, text in TEXTS.items() if bar.startswith(begin)), "")
