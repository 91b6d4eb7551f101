"""Heartbeats and the election, for ``relay/upkeep/membership.py``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Steps, ask
from relaybox.stores.sql.store import Topic, driven
from relaybox.stores.upkeep import Beat, Member

FORGOTTEN = timedelta(days=1)
"""How long after its last heartbeat a member is forgotten."""


class SqlMembers(Topic):
    """The relays that are alive, and the one that leads."""

    async def beat(self, member: Member, live: float, *, joins: bool = True) -> Beat:
        """Record a heartbeat, and return the members seen within ``live`` seconds.

        ``joins`` commits the heartbeat first. Members not seen for a day are forgotten.
        """
        words = {"me": member.name, "host": member.host, "pid": member.pid, "version": member.version}
        be_seen = [self.sql("be_seen", **words)]
        if joins:
            await self.run(partial(ask, be_seen))
            be_seen = []
        return await self._see(timedelta(seconds=live), be_seen)

    @driven
    def _see(self, live: timedelta, first: Sequence[Query]) -> Steps[Beat]:
        # The time comes first: a member seen between two round trips must not count as too old.
        *_, [[moment]], rows = yield [*first, self.sql("now"), self.sql("members")]
        now = self.dialect.from_time(moment)
        ages = {name: now - self.dialect.from_time(seen_at) for name, seen_at in rows}
        gone = [name for name, age in ages.items() if age > FORGOTTEN]
        if gone:
            yield [self.sql("forget_members", names=gone, seconds=-FORGOTTEN.total_seconds())]
        return Beat(tuple(sorted(name for name, age in ages.items() if age < live)), now)

    @driven
    def leave(self, name: str) -> Steps[None]:
        """Leave the members."""
        yield [self.sql("leave", me=name)]

    @driven
    def lead(self, name: str, seconds: float) -> Steps[int | None]:
        """Lead, or keep leading, for ``seconds``; return the term, or None while another member leads."""
        names = ("open_election", "lead", "show_leader", "leading")
        *_, rows = yield [self.sql(statement, me=name, seconds=seconds) for statement in names]
        return rows[0][0] if rows else None

    @driven
    def resign(self, name: str) -> Steps[None]:
        """Stop leading, if this member leads."""
        yield [self.sql("resign", me=name), self.sql("hide_leader", me=name)]
