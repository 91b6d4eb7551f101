"""Run upkeep beside the lanes: each relay sends heartbeats and writes counts; the leader does the rest."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import NamedTuple

from relaybox.core.clock import Clock
from relaybox.core.settings import Destination
from relaybox.receive.inbox import WINDOW
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.canary import LOOK, Canary
from relaybox.relay.upkeep.membership import Leadership, Membership
from relaybox.relay.upkeep.prune import IDEMPOTENCY_WINDOW, Prune
from relaybox.relay.upkeep.route import Reroute, Wake
from relaybox.relay.upkeep.sample import Sampling
from relaybox.relay.upkeep.schedule import Job, Round, Schedule
from relaybox.relay.upkeep.sweep import Sweep
from relaybox.relay.upkeep.tally import Tally
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.sql.upkeep.sample import SqlSamples
from relaybox.stores.upkeep import Member, Router

RENEW, PRUNE, SWEEP, FLUSH, ROUTE, SAMPLE = 5.0, 60.0, 30.0, 10.0, 2.0, 5.0
"""Seconds between two runs of a job. Routing and sampling then check an interval of their own."""

TURNS = 10
"""The most turns of the leader for one of another relay: with every sweep a relay reports its settings."""

AGAIN = 1.0
"""Seconds after which a failed heartbeat or sweep is repeated: something may wait for it."""


class Chores(NamedTuple):
    """The rounds of a single run; None if a job was left out, such as the leader's if another relay leads."""

    pruned: Round | None = None
    swept: Round | None = None
    routed: Round | None = None


class Caretaker:
    """Does the upkeep of one relay, and writes the counts of its ``tally``, one of its observers.

    - ``router``: routes unrouted events; ``wake`` is called with the destinations that got some.
    - ``inbox_window``: seconds for which inbox marks are kept.
    - ``idempotency_window``: seconds for which an idempotency key is kept after its event is final.
    - ``canary``: sends test events while this relay leads. ``samples``: stores samples for the charts.
    """

    def __init__(
        self,
        upkeep: SqlUpkeep,
        destinations: Sequence[Destination],
        member: Member,
        clock: Clock,
        tally: Tally,
        died: Callable[[str], bool] = lambda _name: False,
        router: Router | None = None,
        wake: Wake = lambda _destinations: None,
        *,
        inbox_window: float = WINDOW,
        idempotency_window: float = IDEMPOTENCY_WINDOW,
        canary: Canary | None = None,
        samples: SqlSamples | None = None,
    ) -> None:
        schedule = Schedule(clock)
        agreement = Agreement(upkeep.reports, destinations, member.name)
        introduce = partial(schedule.attempt, "say what destinations it has", agreement.introduce)
        self._upkeep = upkeep
        self.canary = canary
        self.tally = tally
        self._schedule = schedule
        self._agreement = agreement
        self.membership = Membership(
            upkeep.members, member, clock, died=died, introduce=introduce, may_have=agreement.may_have
        )
        self.leadership = Leadership(upkeep.members, member.name, clock)
        self._prune = Prune(upkeep.prune, agreement, clock, schedule.rest, inbox_window, idempotency_window)
        self._sweep = Sweep(upkeep.sweep, agreement, clock, schedule.rest)
        self._reroute = (
            None if router is None else Reroute(upkeep.unrouted, router, wake, clock, schedule.rest)
        )
        self._sampling = (
            None if samples is None else Sampling(samples, destinations, tally.time, clock, schedule.rest)
        )
        self._meeting: asyncio.Task[bool] | None = None

    async def run(self) -> None:
        """Run every job on its schedule until stopped; then write the last counts, resign and leave."""
        self._agreement.runs = True
        await self._schedule.attempt("beat", self._beat)
        await self._schedule.attempt("lead", self.leadership.renew)
        async with asyncio.TaskGroup() as jobs:
            beat = partial(self._beat_and_meet, jobs)
            jobs.create_task(self._schedule.every(self.membership.interval, "beat", beat, again=AGAIN))
            jobs.create_task(self._schedule.every(RENEW, "lead", self.leadership.renew))
            jobs.create_task(self._schedule.every(PRUNE, "prune", self._led(self._prune)))
            jobs.create_task(self._sweep_in_turn())
            if self._reroute:
                jobs.create_task(
                    self._schedule.every(ROUTE, "route", partial(self._route_in_turn, self._reroute))
                )
            if self._sampling:
                jobs.create_task(self._schedule.every(SAMPLE, "sample", self._led(self._sampling)))
            jobs.create_task(self._schedule.every(FLUSH, "write statistics", self.flush))
            if self.canary:
                jobs.create_task(
                    self._schedule.every(LOOK, "send a test event", partial(self._prove, self.canary))
                )
        await self._schedule.attempt("write statistics", self.flush)
        await self._schedule.attempt("resign", self.leadership.resign)
        await self._schedule.attempt("fall silent", self._agreement.leave)
        await self._schedule.attempt("leave", self.membership.leave)

    def stop(self) -> None:
        """Let ``run`` end after the running jobs. Call it when the lanes have stopped."""
        self._schedule.stop()

    async def once(self, *, prune: bool = True, sweep: bool = True) -> Chores:
        """Sweep, write counts, and run one round of each of the leader's jobs unless another relay leads.

        ``prune`` and ``sweep`` select the jobs; unrouted events are routed with ``sweep``.
        """
        swept = await self._sweep() if sweep else None
        await self.flush()
        term = await self.leadership.renew()
        if term is None:
            return Chores(swept=swept)
        renewing = asyncio.create_task(self._schedule.every(RENEW, "lead", self.leadership.renew))
        try:
            return Chores(
                pruned=await self._prune(term) if prune else None,
                swept=swept,
                routed=await self._reroute.round(term) if sweep and self._reroute else None,
            )
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            await self._schedule.attempt("resign", self.leadership.resign)

    def set_time(self, now: datetime) -> None:
        """Set the time that the database has just returned."""
        self.tally.time.set(now)

    async def flush(self) -> None:
        """Write the counts."""
        await self.tally.flush(self._upkeep)

    async def _beat(self) -> None:
        self.set_time((await self.membership.beat()).now)

    async def _beat_and_meet(self, jobs: asyncio.TaskGroup) -> None:
        await self._beat()
        alive = self.membership.alive
        if self._agreement.strange(alive) and (self._meeting is None or self._meeting.done()):
            # Use another task, so that no heartbeat waits for another table.
            meet = partial(self._agreement.meet, alive)
            self._meeting = jobs.create_task(
                self._schedule.attempt("learn what destinations others have", meet)
            )

    async def _prove(self, canary: Canary) -> None:
        if self.leadership.term is None:
            canary.rest()
        else:
            await canary.look()

    async def _sweep_in_turn(self) -> None:
        """Sweep when the relay starts, and when it begins to lead.

        After that the leader sweeps regularly, and the others in turn: the leader may have an older version.
        """
        pause = 0.0
        while await self._schedule.rest(pause, self.leadership.elected):
            self.leadership.elected.clear()
            began = self._schedule.clock.now()
            swept = await self._schedule.attempt("sweep", self._sweep)
            # While a lock makes sweeps fail, at most half of the time goes into them.
            pause = self._turns() * SWEEP if swept else max(AGAIN, self._schedule.clock.now() - began)

    async def _route_in_turn(self, reroute: Reroute) -> None:
        """Route in turn with the other relays: the leader may not have the route."""
        term = self.leadership.term
        round_ = await reroute(term, self._turns())
        if term is not None and not round_.led:
            self.leadership.lost()

    def _turns(self) -> int:
        """Return the number of the leader's turns for each turn of this relay."""
        return 1 if self.leadership.term is not None else min(max(1, len(self.membership.alive)), TURNS)

    def _led(self, job: Callable[[int], Awaitable[Round]]) -> Job:
        async def led() -> None:
            term = self.leadership.term
            if term is not None and not (await job(term)).led:
                self.leadership.lost()

        return led
