"""What limits each figure: said from what was measured where that tells, else from how it comes about."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import NamedTuple

FULL = 0.85
"""Of what there is: nothing that is busier than that has much left."""

TEXTS = {
    "latency p50": "the commit's signal, a NOTIFY, one claim and one call; each is one turn of a process",
    "latency p99": "who else is on the cores at that moment: the emitters, PostgreSQL and its fsync",
    "1,000/s for": "what came during one round of claim, call and settle is what waits",
    "emit with wake-up": "one more INSERT in the transaction, and after it a NOTIFY that nobody waits for",
    "emit,": "the INSERT itself: its round trip and its indexes; the rest is to make the ids and the JSON",
    "idle relay": "the polls of each destination and the relay's sign of life, which do not get fewer",
    "claim, unordered": "the rows that are claimed: the index leads past whatever else there is",
    "claim, ordered": "the rows and the keys that are claimed: the index leads past whatever else there is",
    "ordered claim:": "the rows and the keys that are looked at: keys that have to wait are put away once",
    "store,": "Python: a row becomes a delivery, and what was delivered an array",
    "inbox,": "the INSERT itself: its round trip and its indexes",
    "Django: emit_event": "the round trip of the INSERT; the rest is to make the ids and the JSON",
    "Django: Celery drain": "one connection, which claims and settles in turns",
    "beside": "how long a statement may wait for a lock, and the cores, which all destinations share",
    "connections of a relay": "the bound of its pool: a statement that takes too long is cancelled first",
    "50 kills": "the rest of the lease of what the last one held, and the next look at the table",
    "Django: admin list": "the search, which looks at no more rows than it may",
}
"""By how the bar begins, where nothing was measured that tells."""


class Busy(NamedTuple):
    """Per cent of a core that the relays take, and that PostgreSQL takes."""

    relay: float
    server: float

    @classmethod
    def median(cls, every: Sequence[Busy]) -> Busy:
        """The middle of several."""
        return cls(*(statistics.median(values) for values in zip(*every, strict=True)))

    def limit(self) -> str:
        """What the rate is limited by."""
        cores = os.cpu_count() or 1
        takes = f"PostgreSQL takes {self.server:.0f} % of a core, the relay {self.relay:.0f} %"
        if self.relay + self.server >= FULL * 100 * cores:
            return f"the {cores} cores: {takes}"
        if self.relay >= FULL * 100:
            return f"Python: {takes}"
        return f"one waits for the other, and both for the disk: {takes}"


def text(bar: str) -> str:
    """What is said of a bar."""
    return next((text for begin, text in TEXTS.items() if bar.startswith(begin)), "")
