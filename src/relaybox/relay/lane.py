"""One destination's lane: claim → prepare → send → decide → settle, each step overlapping the others.

The lane claims the next batch while it sends earlier ones. It decides on each answer at once, and settles it
together with all others since the last settle. A delivery that must not begin (its lease is nearly over or
lost, the circuit opened, the relay stops) is given back untried.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Coroutine, Sequence
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
"""Seconds. If wake-ups work, polling only has to find events without one."""
LEASE_LEFT_TO_BEGIN = 0.1
"""The part of the lease that must be left when a send begins."""
LONG_RUN = 10
"""Rows of one key that a claim takes together if there are many keys: each key adds to its cost."""
LOOK_AT_ALL = 0.5
"""Seconds between claims that look at all due rows, not only at those due since the last claim."""
LATE_COMMITS = timedelta(seconds=10)
"""A claim finds events at once if they are committed within this time after ``emit``."""
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)
"""Earlier times count as this one: a row edited by hand may have a time too early to subtract from."""
PATIENCE_FOR_ROOM = 0.25
"""Seconds that rows may wait behind a running send of their key while no claim has room."""
PATIENCE_FOR_A_SETTLE = 1.0
"""Seconds that a lane waits until the outcomes of one batch are written."""
PROBE_MARGIN = 10.0
"""Seconds that a probe may take beyond the destination's timeout before another relay makes one."""

PATIENCE_TO_SETTLE = 10.0
"""Seconds that a stopping relay waits until the database has taken its last outcomes."""


class Lane:
    """Moves one destination's deliveries, or ``only`` those with some ids, until it is stopped."""

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
        """Held while the lane looks for suspects. A stop waits for it, and so cancels no running claim."""
        self._tasks: asyncio.TaskGroup
        self._closing_down: asyncio.Task[None] | None = None
        self._answered = 0
        self._least_lease = LEASE_LEFT_TO_BEGIN * destination.lease
        self._idle_for = SHORTEST_POLL
        self._longest_rest = destination.poll_interval
        self._expects = False
        """True if the next claim will most likely get something."""
        self._since: datetime | None = None
        """The time since which due rows are likely; None if unknown."""
        self._looked_at_all = -math.inf
        self._raises = False
        self._refused = False
        self._returning: frozenset[tuple[int, UUID]] = frozenset()
        """Position and token of deliveries that are being given back, and so must not begin."""
        self._stop = asyncio.Event()

    @property
    def _stopping(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Claim and begin nothing more; ``run`` returns when the running sends are settled."""
        self._stop.set()
        self._halted.set()
        self._room.set()
        self._shared.wake.wake(self.name)

    async def run(self, patience: float) -> None:
        """Claim and deliver until stopped; then wait up to ``patience`` seconds for running sends."""
        while not self._stopping:
            try:
                async with self._beside(patience, self._examine_now_and_then(), self._keep_to_share()):
                    while not self._stopping:
                        if not await self._round():
                            await self._rest()
            except Exception as error:
                # A bug here or in a sink: leave the deliveries to their leases. Other lanes go on.
                self._observer.trouble(self.name, "run", error)
                self._in_flight.forget()
                self._resume()
                await self._clock.sleep(self._pause())

    async def drain(self, since: datetime, patience: float) -> bool:
        """Deliver what is due and return True. Events emitted after ``since`` do not keep it going.

        Return False if stopped before that; it then waits up to ``patience`` seconds for running sends.
        """
        self._raises = True
        # Run it beside the claims: a function that outlasts every drain would make suspects wait forever.
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
        """True if a delivery emitted before ``since`` is in flight."""
        return any(
            delivery.created_at <= since for batch in self._in_flight for delivery in batch.unsettled.values()
        )

    async def once(self, patience: float) -> int:
        """Run one round (claim, send, settle) and return the number of deliveries."""
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
        """Run the settler, the extender and ``others`` beside the block; finish if stopped.

        If the lane is cancelled, its leases expire.
        """
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
                    # First write the outcomes of what was sent: the database may be back.
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
        """Take one step; return True if the next may follow at once."""
        rows, run = self._sizing.rows, self._sizing.run
        claim = await self._step()
        if claim.deliveries or claim.failed or claim.parked:
            self._idle_for = SHORTEST_POLL
        full = len(claim.deliveries) >= rows or 2 * size(claim.deliveries) > BYTES_A_CLAIM
        if self._destination.ordered:
            # If a run was cut off, its key may have filled the window.
            full = full or longest_run(claim.deliveries) >= run
        return full or bool(claim.failed or claim.parked)

    async def _step(self) -> Claim:
        """Wait for room, claim once, and begin to send."""
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
        """Lease rows due since about the last claim; if there are none, and now and then, any due rows."""
        now, since = self._clock.now(), self._since
        if self._destination.ordered or now - self._looked_at_all > LOOK_AT_ALL:
            since = None
        explain = self._raises or not self._expects
        # If the rows are too large for this claim, the second one finds them.
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
        """Lease rows; return the claim, and the time until which its leases hold for certain."""
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
            # A probe looks at as many events as possible, to find one that is unlikely to fail.
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
        # An empty claim for a probe does not show whether the circuit is still open: do not report it.
        if not probe or claim.deliveries or claim.failed:
            self._observer.claimed(self.name, claim)
        return claim, until

    def _begin(self, deliveries: Sequence[Delivery], until: float, *, probing: bool = False) -> Batch:
        """Start a task that sends the claimed deliveries."""
        batch = Batch(deliveries, until, probing=probing)
        batch.began = self._clock.now()
        self._in_flight.add(batch)
        batch.sending = self._tasks.create_task(self._send(batch))
        self._sends.add(batch.sending)
        batch.sending.add_done_callback(self._sends.discard)
        return batch

    async def _let_it_begin(self) -> None:
        """Let the send call the destination before the lane claims again.

        The task starts in one turn of the loop, and its first delivery in the next. After a full claim the
        lane claims at once instead, so that the database works meanwhile.
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
        """Return the deliveries to send; settle those in shadow unsent, without effect on the circuit."""
        # Avoid a call for each delivery: nearly always none is in shadow.
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
        """Return the deliveries to send; settle those with a known outcome."""
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
        """True if the delivery may be sent now."""
        position = delivery.position
        # Mark it first: a sink may ask in another thread, while this one gives back what has not begun.
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
        """Decide the outcome of an answered delivery, and queue it for the settle."""
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
        # An interrupted function says nothing about the destination.
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
        """Give back the deliveries behind a failed one of their key at once: the batch may take long."""
        for other in batch.after(delivery):
            if (other.position, batch.token) in self._returning:
                continue
            # Mark it first: a sink may ask in another thread whether it may begin.
            batch.answered.add(other.position)
            if other.position in batch.begun:
                batch.answered.discard(other.position)
            else:
                self._settle_unsent(batch, other, Released())

    async def _close_down(self, opening: Opening) -> None:
        """Open the circuit for all relays; go on after the running sends.

        Wait no longer than the timeout: a function may run for many times as long.
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
        """Send one delivery through a circuit after its pause; the answer closes or opens the circuit.

        Choose the delivery that failed least, and the one that failed last only if there is no other. The
        circuit may have been opened by several events, and these may be poison.
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
        """Deliver those in shadow. They are not sent, so they cannot show whether the destination is back."""
        shadows = [delivery for delivery in deliveries if is_shadow(delivery.headers)]
        await self._release([delivery for delivery in deliveries if delivery not in shadows])
        await self._until_done(self._begin(shadows, until))
        return Claim(tuple(shadows))

    async def _send_probe(self, delivery: Delivery, until: float, reason: str) -> None:
        batch = self._begin([delivery], until, probing=True)
        await self._until_done(batch)
        # An answer that comes later has no effect on the probe.
        batch.probing = False
        if not batch.tried:
            await self._breaker.put_back(reason)
        elif self._opening is None:
            await self._breaker.close()
        else:
            await self._breaker.open(self._opening, probed=True)
        self._resume()

    async def _keep_to_share(self) -> None:
        """Follow this relay's share as relays come and go, even while nothing is claimed."""
        while True:
            self._observer.overdue(self.name, getattr(self._sink, "overdue", 0))
            share = self._shared.share(self.name, self._destination.concurrency)
            self._sink.limit(share)
            if not share:
                await self._stand_back()
            await self._clock.sleep(1.0)

    async def _stand_back(self) -> None:
        """Give back what has not begun: without a share it would wait here forever."""
        await self._give_back(self._in_flight.unbegun())

    async def _give_back(self, deliveries: Sequence[Delivery]) -> bool:
        marked = frozenset((d.position, d.lease_token) for d in deliveries) - self._returning
        self._returning |= marked
        try:
            # Look again: one may have begun in another thread before it was marked.
            left = [d for d in self._in_flight.unbegun() if (d.position, d.lease_token) in marked]
            released = await self._release(left)
            self._in_flight.drop(released)
            self._settle_unreleased(left)
            return bool(released)
        finally:
            self._returning -= marked

    def _settle_unreleased(self, deliveries: Sequence[Delivery]) -> None:
        """Settle what could not be given back. It must not begin: the release may have been committed."""
        left = {(delivery.position, delivery.lease_token) for delivery in deliveries}
        for batch in self._in_flight:
            # Not ``unbegun``: a sink that asks from another thread shortly counts as begun.
            for delivery in batch.unanswered():
                if (delivery.position, batch.token) in left:
                    self._settle_unsent(batch, delivery, Released())

    async def _examine_now_and_then(self) -> None:
        """Look for suspects when the lane starts, and then so often that none waits for long."""
        often = max(self._destination.poll_interval, self._destination.lease / 10)
        while True:
            await self._look()
            has_share = self._shared.share(self.name, self._destination.concurrency)
            await self._clock.sleep(often if has_share else SHORTEST_POLL_WITH_WAKE)

    async def _look_once(self) -> None:
        # Ignore the error: the drain's own claim meets and raises it.
        with suppress(StoreError):
            await self._look()

    async def _look(self) -> bool:
        # True after a concurrent look too: it may have moved rows after the caller's claim found none.
        other = self._looking.locked()
        async with self._looking:
            return await self._examine() or other

    async def _examine(self) -> bool:
        """Send the suspects that are first in line, one group after another, while other batches go on.

        Return True if there was one, or if there may be more rows now.
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
        """Give back untried deliveries. Return those given back; the leases of the others expire."""
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
        """Wait for the stop, and give back what has not begun, even while a round waits for running sends."""
        await self._stop.wait()
        await self._give_back_unbegun()
        await self._give_up(patience)

    async def _give_back_unbegun(self) -> None:
        """Give back what has not begun, so that another relay can take it."""
        left = self._in_flight.unbegun()
        self._in_flight.drop(left)
        await self._release(left)

    async def _give_up(self, patience: float) -> None:
        """Wait for running sends, and give the rest back."""
        if self._sends:
            # A send in which nothing has begun waits for a free place, possibly for long.
            under_way = any(batch.unanswered() for batch in self._in_flight)
            _, late = await asyncio.wait(self._sends, timeout=patience if under_way else 0.0)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        left = [delivery for batch in self._in_flight for delivery in batch.unanswered()]
        await self._release(left)
        self._in_flight.drop(left)

    async def _finish(self, patience: float) -> None:
        """Give back what the last round and look began; settle what was answered."""
        async with self._looking:
            # The lock waits for a look to end: a claim that is cancelled would leave rows leased by no one.
            await self._give_up(patience)
        # Do not wait for a database that is away.
        with suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_TO_SETTLE):
                while any(batch.answered & batch.unsettled.keys() for batch in self._in_flight):
                    await self._until_changed()

    async def _rest(self) -> None:
        """Sleep until woken; sleep longer each time that nothing was found."""
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
        # Do not count running sends: if claims are small, the sends alone would fill the room.
        sending = min(self._in_flight.sending(), self._destination.concurrency)
        return self._sizing.has_room(rows, held - sending, size)

    async def _make_room(self) -> bool:
        """Give back what waits behind a slow event of its key; return False if nothing was given back."""
        behind = self._in_flight.behind(self._clock.now() - PATIENCE_FOR_ROOM)
        if not behind:
            return False
        self._sizing.shorten_run()
        return await self._give_back(behind)

    def _changed(self) -> None:
        self._room.set()
        if self._refused:
            # The database refused a claim but is back: claim again now.
            self._shared.wake.wake(self.name)

    async def _until_done(self, batch: Batch) -> None:
        """Wait until a batch is answered, and a moment for its settle.

        The waits are limited: a function may never return, and another session may have locked a row.
        """
        await asyncio.wait([batch.sending], timeout=self._destination.timeout + PROBE_MARGIN)
        if not self._stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_FOR_A_SETTLE):
                    await batch.done.wait()

    async def _until_empty(self) -> None:
        """Wait until all is settled, or the lane is stopped."""
        while len(self._in_flight) and not self._stopping:
            await self._until_changed()

    async def _until_changed(self) -> None:
        await self._room.wait()
        self._room.clear()
