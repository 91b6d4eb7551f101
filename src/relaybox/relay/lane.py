"""One destination's lane: claim → prepare → send → decide → settle, each step overlapping the others.

The lane claims the next batch while it sends earlier ones. It decides on each answer at once, and settles it
together with all others since the last settle. A delivery that must not begin (its lease is nearly over or
lost, the circuit opened, the relay stops) is given back untried.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any
from uuid import UUID

from relaybox.core.circuit import Circuit
from relaybox.core.settings import Destination
from relaybox.errors import StoreError
from relaybox.relay.answer import Answers
from relaybox.relay.batch import InFlight, size
from relaybox.relay.breaker import Breaker, Outage
from relaybox.relay.decide import Policy
from relaybox.relay.gate import Gate
from relaybox.relay.prepare import Preparation
from relaybox.relay.probe import Probe, is_due
from relaybox.relay.rest import Rest
from relaybox.relay.room import Room, Share
from relaybox.relay.send import Sender
from relaybox.relay.shared import Shared
from relaybox.relay.shutdown import Shutdown
from relaybox.relay.sizing import BYTES_A_CLAIM, longest_run
from relaybox.relay.source import Source
from relaybox.relay.suspects import Suspects
from relaybox.sinks.sink import Sink
from relaybox.stores.store import Claim, DeadLetter


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
        self._destination = destination
        self._shared = shared
        self._in_flight = in_flight = InFlight(self._changed)
        self._gate = gate = Gate(destination, shared.clock, in_flight)
        self._rest = Rest(destination, shared)
        self._source = source = Source(destination, shared, in_flight, dead_letter, only, self._rest)
        circuit = Circuit()
        breaker = Breaker(destination.name, shared, circuit)
        outage = Outage(destination, breaker, gate, source)
        policy = Policy(destination, circuit, shared.random)
        answers = Answers(policy, source, outage)
        preparation = Preparation(destination, shared, policy, gate, source.settler)
        self._sender = sender = Sender(destination, sink, shared, source, gate, preparation, answers)
        self._probe = Probe(circuit, breaker, outage, source, sender)
        self._room = Room(destination, shared.clock, source, gate, outage)
        self._share = Share(destination, shared, sink, source)
        self._suspects = Suspects(destination, shared, source, sender, gate, self._room, self._share)
        self._shutdown = Shutdown(gate, source, outage, self._suspects.looking)

    def stop(self) -> None:
        """Claim and begin nothing more; ``run`` returns when the running sends are settled."""
        self._gate.stop()
        self._in_flight.notify()
        self._wake()

    async def run(self, patience: float) -> None:
        """Claim and deliver until stopped; then wait up to ``patience`` seconds for running sends."""
        while not self._gate.stopping:
            try:
                async with self._beside(patience, self._suspects.run(), self._share.run()):
                    while not self._gate.stopping:
                        if not await self._round() and not await self._rest.sleep():
                            self._source.claims.expects = False
            except Exception as error:
                # A bug here or in a sink: leave the deliveries to their leases. Other lanes go on.
                self._shared.observer.trouble(self._destination.name, "run", error)
                self._shutdown.abandon()
                await self._shared.clock.sleep(self._shared.pause(self._destination.poll_interval))

    async def drain(self, since: datetime, patience: float) -> bool:
        """Deliver what is due and return True. Events emitted after ``since`` do not keep it going.

        Return False if stopped before that; it then waits up to ``patience`` seconds for running sends.
        """
        in_flight = self._in_flight
        self._source.claims.raises = True
        # Run it beside the claims: a function that outlasts every drain would make suspects wait forever.
        async with self._beside(patience, self._suspects.look_once()):
            while not self._gate.stopping:
                alone = not in_flight.has_older(since)
                claim = await self._step()
                old = any(delivery.created_at <= since for delivery in claim.deliveries)
                if old or claim.failed or claim.parked:
                    continue
                if alone and not await self._suspects.look() and not in_flight.has_older(since):
                    break
                if in_flight.has_older(since):
                    await in_flight.until_changed()
            await self._until_empty()
            return not self._gate.stopping

    async def once(self, patience: float) -> int:
        """Run one round (claim, send, settle) and return the number of deliveries."""
        self._source.claims.raises = True
        async with self._beside(patience):
            claim = await self._step()
            await self._until_empty()
            if not claim.deliveries:
                await self._suspects.look()
                await self._until_empty()
            return len(claim.deliveries)

    @asynccontextmanager
    async def _beside(self, patience: float, *others: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Run the source's work and ``others`` beside the block; finish if stopped.

        If the lane is cancelled, its leases expire.
        """
        async with asyncio.TaskGroup() as tasks:
            self._in_flight.tasks = tasks
            works = (self._shutdown.run(patience), *self._source.works(), *others)
            ending, *beside = [tasks.create_task(work) for work in works]
            refused: StoreError | None = None
            try:
                try:
                    yield
                except StoreError as error:
                    if not self._source.claims.raises:
                        raise
                    # First write the outcomes of what was sent: the database may be back.
                    refused = error
                    self.stop()
                if self._gate.stopping:
                    await ending
                    await self._shutdown.finish(patience)
            finally:
                for task in (ending, *beside, *self._in_flight.sends):
                    task.cancel()
                self._sender.times.report()
        if refused is not None:
            raise refused

    async def _round(self) -> bool:
        """Take one step; return True if the next may follow at once."""
        sizing = self._source.claims.sizing
        rows, run = sizing.rows, sizing.run
        claim = await self._step()
        if claim.deliveries or claim.failed or claim.parked:
            self._rest.shorten()
        full = len(claim.deliveries) >= rows or 2 * size(claim.deliveries) > BYTES_A_CLAIM
        if self._destination.ordered:
            # If a run was cut off, its key may have filled the window.
            full = full or longest_run(claim.deliveries) >= run
        return full or bool(claim.failed or claim.parked)

    async def _step(self) -> Claim:
        """Wait for room, claim once, and begin to send."""
        await self._room.until_free()
        if self._gate.stopping or not self._share.apply() or self._source.settler.in_trouble:
            return Claim()
        claim, until = await self._source.claims.next()
        if claim.held is not None and is_due(claim.held):
            return await self._probe.run(claim.held)
        if claim.deliveries:
            sizing, in_flight = self._source.claims.sizing, self._in_flight
            batch = self._sender.start(claim.deliveries, until)
            if len(claim.deliveries) < sizing.rows:
                await _let_it_begin()
            sizing.learn(len(claim.deliveries), batch.bytes, in_flight.answered, self._shared.clock.now())
            in_flight.answered = 0
        return claim

    async def _until_empty(self) -> None:
        """Wait until all is settled, or the lane is stopped."""
        while len(self._in_flight) and not self._gate.stopping:
            await self._in_flight.until_changed()

    def _changed(self) -> None:
        """Report the sends of what left the lane, and claim again if the database is back."""
        self._sender.times.report()
        if self._source.claims.refused:
            self._wake()

    def _wake(self) -> None:
        self._shared.wake.wake(self._destination.name)


async def _let_it_begin() -> None:
    """Let a send call the destination before the lane claims again.

    The task starts in one turn of the loop, and its first delivery in the next. After a full claim the lane
    claims at once instead, so that the database works meanwhile.
    """
    await asyncio.sleep(0)
    await asyncio.sleep(0)
