"""Signals for delivered and failed events and paused destinations, sent after the outcome is stored.

The sender is ``OutboxEvent``. A process that dies loses its signals: put what must happen into a handler.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any
from uuid import UUID

from django.db import close_old_connections, connections
from django.dispatch import Signal

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Failed
from relaybox.relay.observer import Observer
from relaybox.stores.store import Claim, Settlement
from relaybox.wire.envelope import event_of

event_delivered = Signal()
"""Arguments: ``event`` (a ``relaybox.Event``), ``destination`` (its name), ``using``."""

event_failed = Signal()
"""An event failed for good. Arguments: ``event``, ``destination``, ``error`` (text), ``using``."""

destination_paused = Signal()
"""A relay paused a destination that answered "gone". Arguments: ``destination``, ``reason``, ``using``."""

log = logging.getLogger("relaybox.django")

MOST_WAITING = 10_000
"""Signals that may wait for the sending thread."""

Send = Callable[[Callable[[], None]], None]


class SignalObserver(Observer):
    """An observer that sends signals; ``send`` calls a function where the database may be used."""

    def __init__(self, using: str, send: Send) -> None:
        self._using = using
        self._send = send

    def claimed(self, destination: str, claim: Claim) -> None:
        """Signal the deliveries that the claim failed because their relay died too often."""
        for delivery in claim.failed:
            died = f"the relay died {delivery.crashes} times while it held this event"
            self._tell_of(delivery, event_failed, error=died)

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Signal what was delivered or failed."""
        for delivery, outcome in settlements:
            if delivery.id in lost:
                continue
            match outcome:
                case Delivered(shadow=False):
                    self._tell_of(delivery, event_delivered)
                case Failed(error):
                    self._tell_of(delivery, event_failed, error=error)

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """Signal a destination that was paused."""
        if state == "paused":
            self._tell(destination_paused, destination=destination, reason=reason)

    def _tell_of(self, delivery: Delivery, signal: Signal, **about: Any) -> None:
        if signal.receivers:
            self._tell(signal, event=event_of(delivery), destination=delivery.destination, **about)

    def _tell(self, signal: Signal, **about: Any) -> None:
        if signal.receivers:
            self._send(partial(_send_robust, signal, using=self._using, **about))


class ThreadedSignals(SignalObserver):
    """A ``SignalObserver`` with a thread, so that receivers do not block the relay; it drops the excess."""

    def __init__(self, using: str, patience: float) -> None:
        super().__init__(using, self._queue)
        self._waiting: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._patience = patience
        self._left_out = 0

    def stopped(self) -> None:
        """Send the waiting signals, for up to the relay's patience."""
        if self._thread is None:
            return
        with suppress(queue.Full):
            self._waiting.put(None, timeout=self._patience)
        self._thread.join(self._patience)
        self._thread = None

    def _queue(self, signal: Callable[[], None]) -> None:
        if self._thread is None:
            # A daemon, so that a receiver that hangs does not keep the process alive.
            self._thread = threading.Thread(target=self._run, name="relaybox-signals", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait(signal)
        except queue.Full:
            self._left_out += 1
            if self._left_out % MOST_WAITING == 1:
                log.warning("receivers of signals are slower than the relay: %d left out", self._left_out)

    def _run(self) -> None:
        while (signal := self._waiting.get()) is not None:
            close_old_connections()
            signal()
            close_old_connections()
        connections.close_all()


def _send_robust(signal: Signal, **about: Any) -> None:
    from relaybox.contrib.django.models import OutboxEvent

    for receiver, answer in signal.send_robust(OutboxEvent, **about):
        if isinstance(answer, Exception):
            log.error("the signal's receiver %r raised %r", receiver, answer, exc_info=answer)
