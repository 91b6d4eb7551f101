"""How far a drain has come, on one line of a terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any
from uuid import UUID

from relaybox.observers.count import Counter
from relaybox.store import Settlement

EVERY = 0.1
_CLEAR = "\r\x1b[K"


class Progress(Counter):
    """Counts, and shows the count where standard error is a terminal."""

    def __init__(self) -> None:
        super().__init__()
        self._shows = sys.stderr.isatty()
        self._shown = 0.0
        self._began = time.monotonic()

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count, and show it from time to time."""
        super().settled(destination, settlements, lost)
        now = time.monotonic()
        if not self._shows or now - self._shown < EVERY:
            return
        self._shown = now
        total = self.total
        rate = total.delivered / max(now - self._began, EVERY)
        text = f"delivered {total.delivered:,} ({rate:,.0f}/s)"
        if total.retried or total.failed:
            text += f", retried {total.retried:,}, failed {total.failed:,}"
        self._write(f"{_CLEAR}{text}")

    def stopped(self) -> None:
        """Leave nothing behind."""
        self.make_room()

    def make_room(self, _: Any = None) -> bool:
        """Take the line away; always true, so that it can be the filter of a log."""
        if self._shows:
            self._write(_CLEAR)
        return True

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()
