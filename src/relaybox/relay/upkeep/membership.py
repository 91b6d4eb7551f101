"""Know which relays are alive, which one leads, and this relay's share of a destination's concurrency.

The shares in use never add up to more than the whole, even if heartbeats fail, or relays join or stall. "How
relays share concurrency" in ``docs/explanation/upkeep.md`` has the rules, and why they suffice. A member that
is known to have died, because it ran on this host, is removed at once.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from relaybox.core.clock import Clock
from relaybox.stores.sql.upkeep.membership import SqlMembers
from relaybox.stores.upkeep import Beat, Member

INTERVAL = 2.0
"""Seconds between heartbeats."""
LIVE = 3
"""Intervals without a heartbeat after which a member no longer counts."""
LEASE = 15.0
"""Seconds for which a leader is elected. It renews three times in that time."""


def share(total: int, names: Sequence[str], me: str) -> int:
    """Return my share of ``total``; the remainder goes to the first by name."""
    if me not in names:
        return 0
    part, rest = divmod(total, len(names))
    return part + (sorted(names).index(me) < rest)


class Membership:
    """This relay's membership among the others; ``introduce`` is called before it joins."""

    def __init__(
        self,
        members: SqlMembers,
        member: Member,
        clock: Clock,
        *,
        interval: float = INTERVAL,
        died: Callable[[str], bool] = lambda _name: False,
        introduce: Callable[[], Awaitable[object]] | None = None,
        may_have: Callable[[str, str], bool] = lambda _name, _destination: True,
    ) -> None:
        self.alive: tuple[str, ...] = ()
        self.interval = interval
        self.live = LIVE * interval
        self._members = members
        self._member = member
        self._clock = clock
        self._died = died
        self._introduce = introduce
        self._may_have = may_have
        self._began = -math.inf
        self._starts = math.inf

    async def join(self) -> Beat:
        """Join as a new member."""
        self._began, self._starts = -math.inf, math.inf
        return await self.beat()

    async def beat(self) -> Beat:
        """Send a heartbeat and read who is alive; join if necessary. A failed heartbeat may be repeated."""
        joins = self._clock.now() - self._began >= self.live
        if joins and self._introduce is not None:
            await self._introduce()
        began = self._clock.now()
        beat = await self._bury(await self._members.beat(self._member, self.live, joins=joins))
        ended = self._clock.now()
        late = ended - self._began >= self.live
        if late and not joins:
            # The row may have been too old for a while before this heartbeat was committed.
            return await self.join()
        if self._member.name not in beat.alive:
            # The commit took so long that other relays did not see this heartbeat in time.
            began, self._starts = -math.inf, math.inf
        elif beat.alive == (self._member.name,):
            self._starts = min(self._starts, ended)
        elif late:
            # The row may have been too old for a while before this heartbeat was committed.
            self._starts = ended + self.live
        self._began, self.alive = began, beat.alive
        return beat

    async def _bury(self, beat: Beat) -> Beat:
        """Remove members that are known to have died; they no longer use a share."""
        dead = [name for name in beat.alive if self._died(name)]
        for name in dead:
            await self._members.leave(name)
        return replace(beat, alive=tuple(name for name in beat.alive if name not in dead))

    async def leave(self) -> None:
        """Leave. Call it when nothing is being sent any more."""
        self._began, self._starts = -math.inf, math.inf
        await self._members.leave(self._member.name)

    def share(self, destination: str, total: int) -> int:
        """Return this relay's share of ``total``; 0 before it may start, or if its heartbeat is late."""
        now = self._clock.now()
        if now < self._starts or now - self._began >= self.live:
            return 0
        me = self._member.name
        names = [name for name in self.alive if name == me or self._may_have(name, destination)]
        return share(total, names, me)


class Leadership:
    """This relay's leadership: a lease from the database. Its term number fences the leader's work."""

    def __init__(self, members: SqlMembers, name: str, clock: Clock, *, lease: float = LEASE) -> None:
        self._members = members
        self._name = name
        self._clock = clock
        self._lease = lease
        self._term: int | None = None
        self._until = -math.inf
        self.elected = asyncio.Event()
        """Set when a term begins."""

    @property
    def term(self) -> int | None:
        """Return the term in which this relay leads, or None if it does not, or is no longer sure."""
        return self._term if self._clock.now() < self._until else None

    async def renew(self) -> int | None:
        """Become or stay the leader if no other relay leads; return the term, or None."""
        began, before = self._clock.now(), self.term
        self._term = await self._members.lead(self._name, self._lease)
        self._until = began + self._lease
        if self.term not in (None, before):
            self.elected.set()
        return self.term

    def lost(self) -> None:
        """End the term, because the database said that it is over."""
        self._term = None

    async def resign(self) -> None:
        """End the term, so that another relay can lead at once."""
        self._term = None
        await self._members.resign(self._name)
