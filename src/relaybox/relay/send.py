"""Send batches, each in a task of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

from relaybox.core.event import Delivery
from relaybox.core.outcome import Retry
from relaybox.core.settings import Destination
from relaybox.relay.answer import Answers, Sending, TimedSending, Times
from relaybox.relay.batch import Batch
from relaybox.relay.crashpoint import reached
from relaybox.relay.gate import Gate
from relaybox.relay.prepare import Preparation
from relaybox.relay.shared import Shared
from relaybox.relay.source import Source
from relaybox.sinks.sink import Sink, being_cancelled, describe

PATIENCE_FOR_A_SETTLE = 1.0
"""Seconds that a lane waits until the outcomes of one batch are written."""
PROBE_MARGIN = 10.0
"""Seconds that a probe may take beyond the destination's timeout before another relay makes one."""


class Sender:
    """Sends the batches of one lane to its sink."""

    def __init__(
        self,
        destination: Destination,
        sink: Sink,
        shared: Shared,
        source: Source,
        gate: Gate,
        preparation: Preparation,
        answers: Answers,
    ) -> None:
        self._destination = destination
        self._sink = sink
        self._shared = shared
        self._in_flight = source.in_flight
        self._sizing = source.claims.sizing
        self._gate = gate
        self._preparation = preparation
        self._answers = answers
        self.times = Times(destination.name, shared.observer)

    @property
    def longest(self) -> float:
        """Return how many seconds to wait for a probe or a group of suspects."""
        return self._destination.timeout + PROBE_MARGIN

    def start(self, deliveries: Sequence[Delivery], until: float, *, probing: bool = False) -> Batch:
        """Start a task that sends the claimed deliveries."""
        in_flight = self._in_flight
        batch = Batch(deliveries, until, self._shared.clock.now(), probing=probing)
        in_flight.add(batch)
        batch.sending = in_flight.tasks.create_task(self._send(batch))
        in_flight.sends.add(batch.sending)
        batch.sending.add_done_callback(in_flight.sends.discard)
        return batch

    async def until_done(self, batch: Batch) -> None:
        """Wait until a batch is answered, and a moment for its settle.

        The waits are limited: a function may never return, and another session may have locked a row.
        """
        await asyncio.wait([batch.sending], timeout=self.longest)
        if not self._gate.stopping:
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_FOR_A_SETTLE):
                    await batch.done.wait()

    async def _send(self, batch: Batch) -> None:
        deliveries = await self._preparation.prepare(batch)
        if not deliveries:
            return
        reached("send")
        began = self._shared.clock.now()
        sending = self._sending(batch)
        try:
            answers = await self._sink.send(deliveries, sending)
            pairs = list(zip(deliveries, answers, strict=True))
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and being_cancelled():
                raise
            self._shared.observer.trouble(self._destination.name, "send", error)
            pairs = [(delivery, Retry(describe(error))) for delivery in deliveries]
        for delivery, answer in pairs:
            if delivery.position not in batch.answered:
                sending.report(delivery, answer)
        if self._destination.ordered and not self._gate.halted.is_set():
            self._sizing.learn_run(deliveries, self._shared.clock.now() - began)

    def _sending(self, batch: Batch) -> Sending:
        if not self._shared.observer.timed:
            return Sending(self._gate, self._answers, batch)
        return TimedSending(self._gate, self._answers, batch, self._shared.clock, self.times)
