"""How many wrong credentials one client may show, and how many of them are written down."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from relaybox.web.problems import Problem

WINDOW = 60.0
"""Seconds in which wrong credentials are counted."""
MOST = 10
"""Wrong ones of a client in that time; after them it is not listened to."""
CLIENTS = 10_000
"""Clients that are remembered."""
AUDITED = 20
"""Refused logins that the audit names in that time; the others are only counted."""


class Attempts:
    """Wrong credentials of late, by client."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, list[float]] = OrderedDict()

    def check(self, client: str) -> None:
        """Raise where there were too many, whatever is shown now."""
        recent = self._recent(client)
        if len(recent) >= MOST:
            wait = math.ceil(max(1.0, recent[0] + WINDOW - self._clock()))
            detail = f"Too many wrong credentials; try again in {wait} seconds."
            raise Problem(429, detail, {"retry-after": str(wait)})

    def failed(self, client: str) -> None:
        """Count one more."""
        self._failed[client] = [*self._recent(client), self._clock()][-MOST:]
        self._failed.move_to_end(client)
        while len(self._failed) > CLIENTS:
            self._failed.popitem(last=False)

    def _recent(self, client: str) -> list[float]:
        since = self._clock() - WINDOW
        return [at for at in self._failed.get(client, ()) if at > since]


class Budget:
    """Lets through so many things in a window of time, and counts the rest."""

    def __init__(self, most: int = AUDITED, clock: Callable[[], float] = time.monotonic) -> None:
        self._most = most
        self._clock = clock
        self._began = -math.inf
        self._used = 0
        self.left_out = 0

    def take(self) -> int | None:
        """How many were left out since the last one, where this one may pass."""
        if self._clock() - self._began >= WINDOW:
            self._began, self._used = self._clock(), 0
        if self._used >= self._most:
            self.left_out += 1
            return None
        self._used += 1
        left_out, self.left_out = self.left_out, 0
        return left_out
