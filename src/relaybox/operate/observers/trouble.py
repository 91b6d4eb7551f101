"""A spell of trouble: told when it begins or becomes another, and once when it is over."""

from __future__ import annotations

import logging
import math

QUIET = 3.0
"""Seconds without trouble after which a success ends the spell."""
TEXTS = 20
"""So many kinds of trouble are told of one spell."""


class Spell:
    """Trouble with one thing; the same is told ``again`` so many seconds later, or in the next spell."""

    def __init__(self, log: logging.Logger, again: float = math.inf) -> None:
        self._log = log
        self._again = again
        self._began: float | None = None
        self._last = 0.0
        self._told: dict[str, float] = {}

    def trouble(self, text: str, now: float, said: str, error: BaseException | None = None) -> None:
        """It went wrong so; ``error`` is shown with its traceback."""
        if self._began is None:
            self._began = now
        self._last = now
        self._told = {told: at for told, at in self._told.items() if now - at < self._again}
        if text in self._told or len(self._told) >= TEXTS:
            return
        self._told[text] = now
        self._log.warning("%s", said, exc_info=error, extra={"relay": {"event": "trouble"}})

    def over(self, now: float) -> float | None:
        """It went well; how long the spell lasted, if that ends one."""
        if self._began is None or now - self._last < QUIET:
            return None
        lasted, self._began = self._last - self._began, None
        self._told.clear()
        return lasted
