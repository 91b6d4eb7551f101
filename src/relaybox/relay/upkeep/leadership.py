"""Whether this relay leads: a lease from the database, whose term fences what is done under it."""

from __future__ import annotations

import math

from relaybox.core.clock import Clock
from relaybox.stores.sql.upkeep import SqlUpkeep

LEASE = 15.0
"""Seconds for which a leader is elected; it renews three times as often."""


class Leadership:
    """This relay's claim to lead."""

    def __init__(self, upkeep: SqlUpkeep, name: str, clock: Clock, *, lease: float = LEASE) -> None:
        self._upkeep = upkeep
        self._name = name
        self._clock = clock
        self._lease = lease
        self._term: int | None = None
        self._until = -math.inf

    @property
    def term(self) -> int | None:
        """The term under which this relay leads; None: it does not, or cannot know it any more."""
        return self._term if self._clock.now() < self._until else None

    async def renew(self) -> int | None:
        """Lead, go on leading, or learn that another does; the term."""
        began = self._clock.now()
        self._term = await self._upkeep.lead(self._name, self._lease)
        self._until = began + self._lease
        return self.term

    def lost(self) -> None:
        """The database said that the term is over."""
        self._term = None

    async def resign(self) -> None:
        """Let another lead at once."""
        self._term = None
        await self._upkeep.resign(self._name)
