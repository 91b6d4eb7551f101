"""Run upkeep beside the lanes: each relay sends heartbeats and writes counts; the leader does the rest."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple

from relaybox.core.clock import Clock
from relaybox.core.settings import Destination
from relaybox.errors import StoreError
from relaybox.receive.mark import WINDOW
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.canary import LOOK, Canary
from relaybox.relay.upkeep.membership import Leadership, Membership
from relaybox.relay.upkeep.prune import IDEMPOTENCY_WINDOW, Prune
from relaybox.relay.upkeep.round import Round
from relaybox.relay.upkeep.route import Reroute, Wake
from relaybox.relay.upkeep.sample import Sampling
from relaybox.relay.upkeep.sweep import Sweep
from relaybox.relay.upkeep.tally import Tally
from relaybox.stores.sql.samples import SqlSamples
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.upkeep import Member, Router

RENEW, PRUNE, SWEEP, FLUSH, ROUTE, SAMPLE = 5.0, 60.0, 30.0, 10.0, 2.0, 5.0
"""Seconds between two runs of a job. Routing and sampling then check an interval of their own."""

TURNS = 10
"""The most turns of the leader for one of another relay: with every sweep a relay reports its settings."""

AGAIN = 1.0
"""Seconds after which a failed heartbeat or sweep is repeated: something may wait for it."""

log = logging.getLogger(__name__)

Job = Callable[[], Awaitable[Any]]


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
        self._upkeep = upkeep
        self.canary = canary
        self._clock = clock
        self.tally = tally
        self._agreement = Agreement(upkeep, destinations, member.name)
        introduce = partial(self._try, "say what destinations it has", self._agreement.introduce)
        self.membership = Membership(
            upkeep, member, clock, died=died, introduce=introduce, may_have=self._agreement.may_have
        )
        self.leadership = Leadership(upkeep, member.name, clock)
        self._prune = Prune(upkeep, self._agreement, clock, self._rest, inbox_window, idempotency_window)
        self._sweep = Sweep(upkeep, self._agreement, clock, self._rest)
        self._reroute = None if router is None else Reroute(upkeep, router, wake, clock, self._rest)
        self._sampling = (
            None if samples is None else Sampling(samples, destinations, tally.time, clock, self._rest)
        )
        self._stopping = asyncio.Event()
        self._elected = asyncio.Event()
        self._troubled: set[str] = set()
        self._meeting: asyncio.Task[bool] | None = None

    async def run(self) -> None:
        """Run every job on its schedule until stopped; then write the last counts, resign and leave."""
        self._agreement.runs = True
        await self._try("beat", self._beat)
        await self._try("lead", self._lead)
        async with asyncio.TaskGroup() as jobs:
            beat = partial(self._beat_and_meet, jobs)
            jobs.create_task(self._every(self.membership.interval, "beat", beat, again=AGAIN))
            jobs.create_task(self._every(RENEW, "lead", self._lead))
            jobs.create_task(self._every(PRUNE, "prune", self._led(self._prune)))
            jobs.create_task(self._sweep_in_turn())
            if self._reroute:
                jobs.create_task(self._every(ROUTE, "route", partial(self._route_in_turn, self._reroute)))
            if self._sampling:
                jobs.create_task(self._every(SAMPLE, "sample", self._led(self._sampling)))
            jobs.create_task(self._every(FLUSH, "write statistics", self.flush))
            if self.canary:
                jobs.create_task(self._every(LOOK, "send a test event", partial(self._prove, self.canary)))
        await self._try("write statistics", self.flush)
        await self._try("resign", self.leadership.resign)
        await self._try("fall silent", self._agreement.leave)
        await self._try("leave", self.membership.leave)

    def stop(self) -> None:
        """Let ``run`` end after the running jobs. Call it when the lanes have stopped."""
        self._stopping.set()

    async def once(self, *, prune: bool = True, sweep: bool = True) -> Chores:
        """Sweep, write counts, and run one round of each of the leader's jobs unless another relay leads.

        ``prune`` and ``sweep`` select the jobs; unrouted events are routed with ``sweep``.
        """
        swept = await self._sweep() if sweep else None
        await self.flush()
        term = await self.leadership.renew()
        if term is None:
            return Chores(swept=swept)
        renewing = asyncio.create_task(self._every(RENEW, "lead", self.leadership.renew))
        try:
            return Chores(
                pruned=await self._prune(term) if prune else None,
                swept=swept,
                routed=await self._reroute.round(term) if sweep and self._reroute else None,
            )
        finally:
            renewing.cancel()
            await asyncio.wait([renewing])
            await self._try("resign", self.leadership.resign)

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
            self._meeting = jobs.create_task(self._try("learn what destinations others have", meet))

    async def _prove(self, canary: Canary) -> None:
        if self.leadership.term is None:
            canary.rest()
        else:
            await canary.look()

    async def _lead(self) -> None:
        before = self.leadership.term
        if await self.leadership.renew() not in (None, before):
            self._elected.set()

    async def _sweep_in_turn(self) -> None:
        """Sweep when the relay starts, and when it begins to lead.

        After that the leader sweeps regularly, and the others in turn: the leader may have an older version.
        """
        pause = 0.0
        while await self._rest(pause, self._elected):
            self._elected.clear()
            began = self._clock.now()
            swept = await self._try("sweep", self._sweep)
            # While a lock makes sweeps fail, at most half of the time goes into them.
            pause = self._turns() * SWEEP if swept else max(AGAIN, self._clock.now() - began)

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

    async def _every(self, seconds: float, doing: str, job: Job, *, again: float = math.inf) -> None:
        """Run a job every ``seconds``; after a failure run it ``again`` seconds later, if that is sooner."""
        pause = seconds
        while await self._rest(pause):
            pause = seconds if await self._try(doing, job) else min(seconds, again)

    async def _try(self, doing: str, job: Job) -> bool:
        """Run a job; return True if it succeeded. Log a failure only once until the job succeeds again."""
        try:
            await job()
        except Exception as error:
            if doing not in self._troubled:
                self._troubled.add(doing)
                known = isinstance(error, StoreError)
                log.warning("upkeep cannot %s: %s; it is tried again", doing, error, exc_info=not known)
            return False
        if doing in self._troubled:
            self._troubled.discard(doing)
            log.info("upkeep can %s again", doing)
        return True

    async def _rest(self, seconds: float, *events: asyncio.Event) -> bool:
        """Wait for the time, one of the events, or the stop; return True unless stopped."""
        ends = [event.wait() for event in (self._stopping, *events)]
        waits = [asyncio.ensure_future(wait) for wait in (self._clock.sleep(seconds), *ends)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        return not self._stopping.is_set()
