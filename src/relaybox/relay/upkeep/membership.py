"""Which relays are alive, which of them leads, and what part of a destination's limit is this one's.

At no moment may the parts in use sum to more than the whole, whatever beats fail, whoever joins or stalls:

- A member works on the list of its last beat for no longer than ``live`` seconds after that beat began. By
  then at the latest the others no longer count it, and it has to join again.
- To join is to write the row, commit, and then read who is alive. Whoever reads later finds the newcomer.
  Whoever read earlier works on that list for ``live`` seconds at most: so long the newcomer waits. Where it
  finds itself alone, there is nobody to wait for.
- A member goes on in one transaction. Whoever joins before that is committed still finds its last row, unless
  it has taken so long that the row was too old; then it has to join.
- A member that is known to have died, because it ran on this host, is taken off the list at once.
- So the list of a member at work names every member at work. A list that names more of them than there are
  gives a part that is smaller, never larger.
- Of the list only those count who ``may_have`` the destination. One that has said what it has, before it
  joined, and did not name the destination, sends nothing there. Any other counts.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from relaybox.core.clock import Clock
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.upkeep import Beat, Member

INTERVAL = 2.0
"""Seconds between heartbeats."""
LIVE = 3
"""Heartbeats that may fail before a member no longer counts."""
LEASE = 15.0
"""Seconds for which a leader is elected; it renews three times as often."""


def share(total: int, names: Sequence[str], me: str) -> int:
    """The part of ``total`` that is mine; what does not divide goes to the first by name."""
    if me not in names:
        return 0
    part, rest = divmod(total, len(names))
    return part + (sorted(names).index(me) < rest)


class Membership:
    """This relay among the others; it will ``introduce`` itself before it joins."""

    def __init__(
        self,
        upkeep: SqlUpkeep,
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
        self._upkeep = upkeep
        self._member = member
        self._clock = clock
        self._died = died
        self._introduce = introduce
        self._may_have = may_have
        self._began = -math.inf
        self._starts = math.inf

    async def join(self) -> Beat:
        """Become a member, as if this one had never been one."""
        self._began, self._starts = -math.inf, math.inf
        return await self.beat()

    async def beat(self) -> Beat:
        """Be seen and see the others; joins where that is due. A beat that raised may be tried again."""
        joins = self._clock.now() - self._began >= self.live
        if joins and self._introduce is not None:
            await self._introduce()
        began = self._clock.now()
        beat = await self._bury(await self._upkeep.beat(self._member, self.live, joins=joins))
        ended = self._clock.now()
        late = ended - self._began >= self.live
        if late and not joins:
            # The row may have been too old for a while before this beat was committed.
            return await self.join()
        if self._member.name not in beat.alive:
            # The commit took so long that this was no sign of life for anybody.
            began, self._starts = -math.inf, math.inf
        elif beat.alive == (self._member.name,):
            self._starts = min(self._starts, ended)
        elif late:
            # The row may have been too old for a while before this beat was committed.
            self._starts = ended + self.live
        self._began, self.alive = began, beat.alive
        return beat

    async def _bury(self, beat: Beat) -> Beat:
        """Without the members that are known to have died: they use nothing any more."""
        dead = [name for name in beat.alive if self._died(name)]
        for name in dead:
            await self._upkeep.leave(name)
        return replace(beat, alive=tuple(name for name in beat.alive if name not in dead))

    async def leave(self) -> None:
        """Be no longer a member; call it when nothing is sent any more."""
        self._began, self._starts = -math.inf, math.inf
        await self._upkeep.leave(self._member.name)

    def share(self, destination: str, total: int) -> int:
        """The part of ``total`` that this relay may use there: none before it may start, or out of touch."""
        now = self._clock.now()
        if now < self._starts or now - self._began >= self.live:
            return 0
        me = self._member.name
        names = [name for name in self.alive if name == me or self._may_have(name, destination)]
        return share(total, names, me)


class Leadership:
    """This relay's claim to lead: a lease from the database, whose term fences what is done under it."""

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
