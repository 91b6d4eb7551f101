"""One destination's lane: claim → prepare → send → decide → settle, each step overlapping the others.

The next batch is claimed while earlier ones are being sent; each answer is decided on as it comes, and
settled with all that gathered since the last settle. A delivery that must not begin any more (its lease is
nearly over or was lost, the circuit opened, the relay stops) is given back untried.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Collection, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID

from relaybox.core.circuit import THRESHOLD, Circuit
from relaybox.core.event import Delivery
from relaybox.core.ordering import together
from relaybox.core.outcome import Delivered, Interrupted, Outcome, Released, Retry
from relaybox.core.settings import Destination
from relaybox.core.shadow import MARK, is_shadow
from relaybox.errors import RowsLocked, StoreError
from relaybox.relay.batch import Batch, InFlight, size
from relaybox.relay.breaker import Breaker, choose, probe_is_due
from relaybox.relay.crashpoint import reached
from relaybox.relay.decide import Opening, Policy
from relaybox.relay.extend import Extender
from relaybox.relay.sending import Sending, TimedSending, Times
from relaybox.relay.settle import Settler
from relaybox.relay.shared import Shared, Turn
from relaybox.relay.sizing import BYTES_A_CLAIM, Sizing, longest_run
from relaybox.sinks.sink import Answer, Sink, being_cancelled, describe
from relaybox.stores.store import Claim, DeadLetter, Held, Settlement, Want, used_up

SHORTEST_POLL = 0.01
SHORTEST_POLL_WITH_WAKE = 0.25
"""Where a wake tells of most events, polling only finds those that nobody told of."""
LEASE_LEFT_TO_BEGIN = 0.1
"""The part of its lease that a delivery must have left when its send begins."""
LONG_RUN = 10
"""Rows of one key that are claimed together where there are many keys: each key costs a claim something."""
LOOK_AT_ALL = 0.5
"""Seconds after which a claim also looks where claims before it have found all they could get."""
LATE_COMMITS = timedelta(seconds=10)
"""Events that are committed no longer after they were emitted are found at once."""
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
"""A row that was edited by hand may be older than can be reckoned with."""
PATIENCE_FOR_ROOM = 0.25
"""Seconds that rows may wait behind one of their key that is being sent, where no claim has room."""
PATIENCE_FOR_A_SETTLE = 1.0
"""Seconds that a lane waits for the outcome of one batch to be written."""
PROBE_MARGIN = 10.0
"""Seconds that a probe may take beyond the destination's timeout before another relay makes one."""

PATIENCE_TO_SETTLE = 10.0
"""Seconds that a relay which stops waits for the database to take its last outcomes."""


class Lane:
    """Moves one destination's deliveries, or ``only`` some of them, until it is stopped."""

    def __init__(
        self,
        destination: Destination,
        sink: Sink,
        shared: Shared,
        dead_letter: DeadLetter | None = None,
        only: tuple[UUID, ...] | None = None,
    ) -> None:
        self.name = destination.name
        self._destination = destination
        self._sink = sink
        self._shared = shared
        self._store = shared.store
        self._observer = shared.observer
        self._clock = shared.clock
        self._dead_letter = dead_letter
        self._only = only
        self._circuit = Circuit()
        self._breaker = Breaker(self.name, shared, self._circuit)
        self._policy = Policy(destination, self._circuit, shared.random)
        self._sizing = Sizing(destination)
        self._in_flight = InFlight(self._changed)
        self._pause = partial(shared.pause, destination.poll_interval)
        made_due = partial(shared.wake.wake, self.name)
        self._settler = Settler(destination, shared, dead_letter, self._settled, made_due)
        self._extender = Extender(destination, shared, self._in_flight)
        self._sends: set[asyncio.Task[None]] = set()
        self._times = Times()
        self._opening: Opening | None = None
        self._halted = asyncio.Event()
        self._turn = Turn(destination, shared, self._halted)
        self._room = asyncio.Event()
        self._looking = asyncio.Lock()
        """Held while the lane looks for suspects: a stop waits for the claim that is under way."""
        self._tasks: asyncio.TaskGroup
        self._closing_down: asyncio.Task[None] | None = None
        self._answered = 0
        self._least_lease = LEASE_LEFT_TO_BEGIN * destination.lease
        self._idle_for = SHORTEST_POLL
        self._longest_rest = destination.poll_interval
        self._expects = False
        """Whether the next claim will most likely get something."""
        self._since: datetime | None = None
        """From where on there is most likely something."""
        self._looked_at_all = -math.inf
        self._raises = False
        self._refused = False
        self._returning: frozenset[tuple[int, UUID]] = frozenset()
        """What is being given back because others have every place."""
        self._stop = asyncio.Event()

    @property
    def _stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Claim and begin nothing more; ``run`` returns when what is being sent is settled."""
        self._stop.set()
        self._halted.set()
        self._room.set()
        self._shared.wake.wake(self.name)

    async def run(self, patience: float) -> None:
        """Claim and deliver until stopped; then wait ``patience`` seconds for what is being sent."""
        while not self._stopping:
            try:
                async with self._beside(patience, self._examine_now_and_then(), self._keep_to_share()):
                    while not self._stopping:
                        if not await self._round():
                            await self._rest()
            except Exception as error:
                # A defect of ours, or of a sink: what was held runs out, and the others do not notice.
                self._observer.trouble(self.name, "run", error)
                self._in_flight.forget()
                self._resume()
                await self._clock.sleep(self._pause())

    async def drain(self, since: datetime, patience: float) -> bool:
        """Deliver what is due, then return; what was emitted after ``since`` does not keep it going.

        False: it was stopped before that; ``patience`` is what it then had for what was being sent.
        """
        self._raises = True
        # Beside the rest: a function that outlasts every drain would keep suspects waiting forever.
        async with self._beside(patience, self._look_once()):
            while not self._stopping:
                alone = not self._has_old(since)
                claim = await self._step()
                old = any(delivery.created_at <= since for delivery in claim.deliveries)
                if old or claim.failed or claim.parked:
                    continue
                if alone and not await self._look() and not self._has_old(since):
                    break
                if self._has_old(since):
                    await self._until_changed()
            await self._until_empty()
            return not self._stopping

    def _has_old(self, since: datetime) -> bool:
        """Whether something is in flight that was there before."""
        return any(
            delivery.created_at <= since for batch in self._in_flight for delivery in batch.unsettled.values()
        )

    async def once(self, patience: float) -> int:
        """One round: claim, send, settle; how many deliveries it was."""
        self._raises = True
        async with self._beside(patience):
            claim = await self._step()
            await self._until_empty()
            if not claim.deliveries:
                await self._look()
                await self._until_empty()
            return len(claim.deliveries)

    @asynccontextmanager
    async def _beside(self, patience: float, *others: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """What runs beside the claims. A lane that is cancelled leaves its leases to run out."""
        async with asyncio.TaskGroup() as self._tasks:
            settles = self._settler.run(), self._settler.run_locked()
            works = (self._end(patience), *settles, self._extender.run(), *others)
            ending, *beside = [self._tasks.create_task(work) for work in works]
            refused: StoreError | None = None
            try:
                try:
                    yield
                except StoreError as error:
                    if not self._raises:
                        raise
                    # What was sent is written first: the database may be there again.
                    refused = error
                    self.stop()
                if self._stopping:
                    await ending
                    await self._finish(patience)
            finally:
                for task in (ending, *beside, *self._sends):
                    task.cancel()
                self._tell_sent()
        if refused is not None:
            raise refused

    async def _round(self) -> bool:
        """One step; whether it is worth taking the next at once."""
        rows, run = self._sizing.rows, self._sizing.run
        claim = await self._step()
        if claim.deliveries or claim.failed or claim.parked:
            self._idle_for = SHORTEST_POLL
        full = len(claim.deliveries) >= rows or 2 * size(claim.deliveries) > BYTES_A_CLAIM
        if self._destination.ordered:
            # Where a run was cut off, its key may have filled the window.
            full = full or longest_run(claim.deliveries) >= run
        return full or bool(claim.failed or claim.parked)

    async def _step(self) -> Claim:
        """Claim once, when there is room, and begin to send."""
        await self._until_there_is_room()
        if self._closing_down is not None:
            await self._closing_down
        concurrency = self._shared.share(self.name, self._destination.concurrency)
        if self._stopping or not concurrency or self._settler.in_trouble:
            return Claim()
        self._sink.limit(concurrency)
        claim, until = await self._claim_next()
        if claim.held is not None and probe_is_due(claim.held):
            return await self._probe(claim.held)
        if claim.deliveries:
            batch = self._begin(claim.deliveries, until)
            if len(claim.deliveries) < self._sizing.rows:
                await self._let_it_begin()
            self._sizing.learn(len(claim.deliveries), batch.bytes, self._answered, self._clock.now())
            self._answered = 0
        return claim

    async def _claim_next(self) -> tuple[Claim, float]:
        """Lease what is due since about the last claim; again and again, whatever is due."""
        now, since = self._clock.now(), self._since
        if self._destination.ordered or now - self._looked_at_all > LOOK_AT_ALL:
            since = None
        explain = self._raises or not self._expects
        # What does not fit is found by the second claim.
        light = since is not None and self._sizing.light
        claim, until = await self._claim(
            self._sizing.rows, suspects=False, explain=explain, since=since, light=light
        )
        if since is not None and not claim.deliveries and not self._refused:
            since = None
            claim, until = await self._claim(self._sizing.rows, suspects=False)
            if light and claim.deliveries:
                self._sizing.doubt_light()
        if since is None:
            self._looked_at_all = now
        self._expects = bool(claim.deliveries)
        if claim.deliveries:
            self._since = max(claim.deliveries[0].created_at, EARLIEST) - LATE_COMMITS
        return claim, until

    async def _claim(
        self,
        limit: int,
        *,
        probe: bool = False,
        suspects: bool = True,
        explain: bool = True,
        since: datetime | None = None,
        light: bool = False,
    ) -> tuple[Claim, float]:
        """Lease rows; until when the leases hold for certain."""
        destination = self._destination
        want = Want(
            self.name,
            self._shared.owner,
            limit,
            destination.lease,
            ordered=destination.ordered,
            on_failed=destination.on_failed or "skip",
            dead_letter=self._dead_letter,
            probe=probe,
            suspects=suspects,
            only=self._only,
            # A probe is to find one that is beyond suspicion.
            spread=None if probe else max(limit // LONG_RUN, min(limit, destination.concurrency)),
            run=None if probe else self._sizing.run,
            explain=explain,
            since=since,
            light=light,
            bytes=BYTES_A_CLAIM,
        )
        until = self._clock.now() + destination.lease
        reached("claim")
        try:
            claim = await self._store.claim(want)
        except StoreError as error:
            if self._raises:
                raise
            self._observer.trouble(self.name, "claim", error)
            self._refused = True
            self._longest_rest = self._idle_for = self._pause()
            return Claim(), until
        reached("claimed")
        self._refused = False
        self._longest_rest = destination.poll_interval
        # A claim that passes the circuit tells nothing of it while there is nothing to try it with.
        if not probe or claim.deliveries or claim.failed:
            self._observer.claimed(self.name, claim)
        return claim, until

    def _begin(self, deliveries: Sequence[Delivery], until: float, *, probing: bool = False) -> Batch:
        """Send what was claimed, in a task of its own."""
        batch = Batch(deliveries, until, probing=probing)
        batch.began = self._clock.now()
        self._in_flight.add(batch)
        batch.sending = self._tasks.create_task(self._send(batch))
        self._sends.add(batch.sending)
        batch.sending.add_done_callback(self._sends.discard)
        return batch

    async def _let_it_begin(self) -> None:
        """Call the destination before the lane goes on: the send begins in one turn of the loop, its first
        delivery in the next. Not after a full claim: the next one goes first, for the database to work on.
        """
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    async def _send(self, batch: Batch) -> None:
        deliveries = self._without_known(batch, self._without_shadows(batch))
        if not deliveries:
            return
        await self._turn(len(deliveries))
        if batch.deliveries[0].suspect:
            await self._shared.quarantine.enter(batch)
        reached("send")
        began = self._clock.now()
        timed = self._observer.timed
        sending = TimedSending(self, batch, self._clock, self._times) if timed else Sending(self, batch)
        try:
            answers = await self._sink.send(deliveries, sending)
            pairs = list(zip(deliveries, answers, strict=True))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            self._observer.trouble(self.name, "send", error)
            pairs = [(delivery, Retry(describe(error))) for delivery in deliveries]
        for delivery, answer in pairs:
            if delivery.position not in batch.answered:
                sending.report(delivery, answer)
        if self._destination.ordered and not self._halted.is_set():
            self._sizing.learn_run(deliveries, self._clock.now() - began)

    def _without_shadows(self, batch: Batch) -> Sequence[Delivery]:
        """What is to be sent; what was emitted in shadow is delivered without, and tells nothing of the
        destination.
        """
        # No call for each delivery: nearly always there is none.
        if not [1 for delivery in batch.deliveries if MARK in delivery.headers]:
            return batch.deliveries
        left = []
        for delivery in batch.deliveries:
            if not is_shadow(delivery.headers):
                left.append(delivery)
                continue
            began = self.may_begin(batch, delivery)
            self._settle_unsent(batch, delivery, self._policy.shadowed(delivery) if began else Released())
        return left

    def _settle_unsent(self, batch: Batch, delivery: Delivery, outcome: Outcome) -> None:
        reached("answered")
        batch.answered.add(delivery.position)
        self._answered += 1
        if delivery.position in batch.unsettled:
            self._settler.add(Settlement(delivery, outcome))

    def _without_known(self, batch: Batch, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """What is to be sent; what else is only settled: its outcome is known."""
        if not self._settler.waits and not used_up(deliveries):
            return deliveries
        left = []
        for delivery in deliveries:
            outcome = self._settler.known(delivery)
            if outcome is None:
                left.append(delivery)
            else:
                self._settle_unsent(batch, delivery, outcome)
        return left

    def _settled(self, deliveries: Sequence[Delivery]) -> None:
        self._in_flight.drop(deliveries)
        self._tell_sent()

    def _tell_sent(self) -> None:
        if (sends := self._times.take()) is not None:
            self._observer.sent(self.name, sends)

    def may_begin(self, batch: Batch, delivery: Delivery) -> bool:
        """Whether a delivery may be sent now."""
        position = delivery.position
        # First: a sink may ask from another thread, while this one gives back what has not begun.
        batch.begun.add(position)
        if (
            not self._halted.is_set()
            and not (self._returning and (position, batch.token) in self._returning)
            and (batch.behind.get(position, batch.until) - self._clock.now()) > self._least_lease
            and position in batch.unsettled
            and position not in batch.answered
        ):
            return True
        batch.begun.discard(position)
        return False

    def answer(self, batch: Batch, delivery: Delivery, answer: Answer) -> None:
        """Decide what becomes of a delivery, and have it settled."""
        reached("answered")
        position = delivery.position
        if position in batch.answered:
            return
        batch.answered.add(position)
        self._answered += 1
        if delivery.ordering_key is not None and type(answer) is not Delivered:
            self._leave_rest(batch, delivery)
        if position not in batch.unsettled:
            return
        # A function that a stop interrupted says nothing of its destination.
        if not isinstance(answer, Released | Interrupted):
            batch.tried = True
        outcome, opening = self._policy.decide(answer, delivery, probing=batch.probing)
        self._settler.add(Settlement(delivery, outcome))
        if opening is None or self._opening is not None:
            return
        self._opening = opening
        self._halted.set()
        if not batch.probing:
            self._closing_down = self._tasks.create_task(self._close_down(opening))

    def _leave_rest(self, batch: Batch, delivery: Delivery) -> None:
        """Give back what is behind a delivery of its key that did not arrive: its batch may take long."""
        for other in batch.after(delivery):
            if (other.position, batch.token) in self._returning:
                continue
            # First: a sink may ask from another thread whether it may begin.
            batch.answered.add(other.position)
            if other.position in batch.begun:
                batch.answered.discard(other.position)
            else:
                self._settle_unsent(batch, other, Released())

    async def _close_down(self, opening: Opening) -> None:
        """Tell all relays that the circuit is open; go on when nothing is being sent any more.

        A function that is over its time is not waited for: it may run for many times as long.
        """
        await self._breaker.open(opening)
        await self._give_back_unbegun()
        if self._sends:
            await asyncio.wait(self._sends, timeout=self._destination.timeout)
        self._resume()

    def _resume(self) -> None:
        self._opening = self._closing_down = None
        if not self._stopping:
            self._halted.clear()

    async def _probe(self, held: Held) -> Claim:
        """Send one delivery through a circuit whose time is over; its answer closes or opens it.

        The delivery is not the one that failed last, if there is another. Of the others it is the one that
        failed least: what opened the circuit may be as many events, and these may be poison.
        """
        claim, until = await self._claim(THRESHOLD + 1, probe=True, suspects=False)
        if not claim.deliveries and not claim.parked:
            claim, until = await self._claim(1, probe=True)
        return await self._probe_with(claim, until, held)

    async def _probe_with(self, claim: Claim, until: float, held: Held) -> Claim:
        chosen = choose(claim.deliveries, self._circuit)
        if chosen is None:
            return claim
        if is_shadow(chosen.headers):
            return await self._deliver_shadows(claim.deliveries, until)
        mine = await self._breaker.may_probe(self._destination.timeout + PROBE_MARGIN)
        if not mine:
            await self._release(claim.deliveries)
            return Claim()
        await self._release([delivery for delivery in claim.deliveries if delivery is not chosen])
        await self._send_probe(chosen, until, held.reason or "")
        return Claim((chosen,))

    async def _deliver_shadows(self, deliveries: Sequence[Delivery], until: float) -> Claim:
        """They need no destination, and cannot tell whether it is back."""
        shadows = [delivery for delivery in deliveries if is_shadow(delivery.headers)]
        await self._release([delivery for delivery in deliveries if delivery not in shadows])
        await self._until_done(self._begin(shadows, until))
        return Claim(tuple(shadows))

    async def _send_probe(self, delivery: Delivery, until: float, reason: str) -> None:
        batch = self._begin([delivery], until, probing=True)
        await self._until_done(batch)
        # An answer that comes later is one like any other.
        batch.probing = False
        if not batch.tried:
            await self._breaker.put_back(reason)
        elif self._opening is None:
            await self._breaker.close()
        else:
            await self._breaker.open(self._opening, probed=True)
        self._resume()

    async def _keep_to_share(self) -> None:
        """As relays come and go, also while nothing is claimed."""
        while True:
            self._observer.overdue(self.name, getattr(self._sink, "overdue", 0))
            share = self._shared.share(self.name, self._destination.concurrency)
            self._sink.limit(share)
            if not share:
                await self._stand_back()
            await self._clock.sleep(1.0)

    async def _stand_back(self) -> None:
        """The others have every place: let them have what has not begun here, or it would wait for ever."""
        await self._give_back(self._in_flight.unbegun())

    async def _give_back(self, deliveries: Sequence[Delivery]) -> bool:
        marked = frozenset((d.position, d.lease_token) for d in deliveries) - self._returning
        self._returning |= marked
        try:
            # Looked at once more: one may have begun, in another thread, before it was marked.
            left = [d for d in self._in_flight.unbegun() if (d.position, d.lease_token) in marked]
            released = await self._release(left)
            self._in_flight.drop(released)
            self._settle_released(marked)
            return bool(released)
        finally:
            self._returning -= marked

    def _settle_released(self, marked: Collection[tuple[int, UUID]]) -> None:
        """Settle what could not be given back. It must not begin: perhaps only the answer was lost."""
        for batch in self._in_flight:
            for delivery in batch.unbegun():
                if (delivery.position, batch.token) in marked:
                    self._settle_unsent(batch, delivery, Released())

    async def _examine_now_and_then(self) -> None:
        """Look for suspects when the lane begins, and then often enough that none waits for long."""
        often = max(self._destination.poll_interval, self._destination.lease / 10)
        while True:
            await self._look()
            has_share = self._shared.share(self.name, self._destination.concurrency)
            await self._clock.sleep(often if has_share else SHORTEST_POLL_WITH_WAKE)

    async def _look_once(self) -> None:
        # The drain's own claim meets the same trouble, and raises.
        with suppress(StoreError):
            await self._look()

    async def _look(self) -> bool:
        # Another look may have moved rows after the caller's claim found none.
        other = self._looking.locked()
        async with self._looking:
            return await self._examine() or other

    async def _examine(self) -> bool:
        """Send the suspects that stand first in line, a group after the other, while other batches go on.

        Whether there was one, or may be another.
        """
        found, suspect = False, True
        while suspect:
            share = self._shared.share(self.name, self._destination.concurrency)
            if self._halted.is_set() or not share or self._settler.in_trouble:
                break
            group = min(together(0), self._sizing.rows)
            has_room = self._has_room(group)
            claim, until = await self._claim(group if has_room else 1)
            suspect = bool(claim.failed) or any(delivery.suspect for delivery in claim.deliveries)
            if not has_room and not suspect:
                await self._release(claim.deliveries)
            elif claim.deliveries:
                batch = self._begin(claim.deliveries, until)
                if suspect and not self._stopping:
                    await self._until_done(batch)
            found |= suspect or bool(claim.parked)
        return found

    async def _release(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Give back what was not tried, and return it; the leases of the rest run out."""
        if not deliveries:
            return ()
        reached("release")
        try:
            await self._store.release(deliveries, on_failed=self._destination.on_failed or "skip")
        except RowsLocked as error:
            self._observer.trouble(self.name, "release", error)
            return [delivery for delivery in deliveries if delivery.id not in error.rows]
        except StoreError as error:
            self._observer.trouble(self.name, "release", error)
            return ()
        reached("released")
        return deliveries

    async def _end(self, patience: float) -> None:
        """When asked to stop: the round that is under way may itself wait for what is being sent."""
        await self._stop.wait()
        await self._give_back_unbegun()
        await self._give_up(patience)

    async def _give_back_unbegun(self) -> None:
        """Nothing more is begun: another relay may have what was not."""
        left = self._in_flight.unbegun()
        self._in_flight.drop(left)
        await self._release(left)

    async def _give_up(self, patience: float) -> None:
        """Wait for what is being sent, and give the rest back."""
        if self._sends:
            # Whatever is still in a send without having begun waits for a place, and may do so for long.
            under_way = any(batch.unanswered() for batch in self._in_flight)
            _, late = await asyncio.wait(self._sends, timeout=patience if under_way else 0.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        left = [delivery for batch in self._in_flight for delivery in batch.unanswered()]
        await self._release(left)
        self._in_flight.drop(left)

    async def _finish(self, patience: float) -> None:
        """What the last round and the last look still began is given back; what was answered is settled."""
        async with self._looking:
            # Cancelled in the midst of a claim, it would leave rows leased to nobody.
            await self._give_up(patience)
        # A database that is away now is not waited for.
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_TO_SETTLE):
                while any(batch.answered & batch.unsettled.keys() for batch in self._in_flight):
                    await self._until_changed()

    async def _rest(self) -> None:
        """Sleep until woken, for longer each time that nothing is found."""
        seconds = self._idle_for
        if self._shared.wake.alive:
            seconds = max(seconds, SHORTEST_POLL_WITH_WAKE)
        seconds = min(seconds, self._longest_rest)
        self._idle_for = 2 * seconds
        if await self._shared.wake.wait(self.name, seconds):
            self._idle_for = SHORTEST_POLL
        else:
            self._expects = False

    async def _until_there_is_room(self) -> None:
        while not self._stopping and not self._has_room(self._sizing.rows):
            if not await self._make_room():
                with suppress(TimeoutError):
                    async with asyncio.timeout(PATIENCE_FOR_ROOM):
                        await self._until_changed()

    def _has_room(self, rows: int) -> bool:
        held, size = len(self._in_flight), self._in_flight.bytes
        if self._sizing.has_room(rows, held, size):
            return True
        if not self._sizing.narrow:
            return False
        # What is being sent has its place: where claims are small, it would take the room of all others.
        sending = min(self._in_flight.sending(), self._destination.concurrency)
        return self._sizing.has_room(rows, held - sending, size)

    async def _make_room(self) -> bool:
        """Give back what waits behind a slow event of its key; False: nothing was given back."""
        behind = self._in_flight.behind(self._clock.now() - PATIENCE_FOR_ROOM)
        if not behind:
            return False
        self._sizing.shorten_run()
        return await self._give_back(behind)

    def _changed(self) -> None:
        self._room.set()
        if self._refused:
            # The database, which refused, is there again.
            self._shared.wake.wake(self.name)

    async def _until_done(self, batch: Batch) -> None:
        """Wait until a batch is answered, and a moment for its settle.

        A function may not return, and another session may have locked a row: nothing else waits for those.
        """
        await asyncio.wait([batch.sending], timeout=self._destination.timeout + PROBE_MARGIN)
        if not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_FOR_A_SETTLE):
                    await batch.done.wait()

    async def _until_empty(self) -> None:
        """Until all is settled, or the lane is stopped."""
        while len(self._in_flight) and not self._stopping:
            await self._until_changed()

    async def _until_changed(self) -> None:
        await self._room.wait()
        self._room.clear()
