"""Run the relay on Django's own connection until nothing is due; synchronous handlers run in this thread."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import asdict, dataclass, replace
from typing import Any
from uuid import UUID

from django.db import Error, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.conf import get_configuration
from relaybox.contrib.django.databases import connection_of, get_tables
from relaybox.contrib.django.inbox import in_atomic
from relaybox.contrib.django.outbox import call, enter, is_busy, open_store
from relaybox.contrib.django.signals import SignalObserver
from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.emit.wakes.local import Bell, LocalWake
from relaybox.errors import PayloadError
from relaybox.operate.observers.count import Counter
from relaybox.operate.open_relay import new_tally, open_relay
from relaybox.relay.observer import Observer
from relaybox.relay.relay import Relay
from relaybox.relay.upkeep.caretaker import Chores
from relaybox.relay.upkeep.tally import Tally
from relaybox.sinks.handler import is_async
from relaybox.sinks.open import Handlers, handler_of, open_sink
from relaybox.sinks.sink import REGARDLESS, Answer, Limited, Progress, Sink, answer_of, describe, runs
from relaybox.wire.envelope import event_of
from relaybox.wire.tracing import attached, stored

log = logging.getLogger("relaybox.django")
handler_log = logging.getLogger("relaybox.handler")

PATIENCE = 5.0
"""Seconds that sends in progress get to finish after the time limit."""

PART = 500
"""The most rows to claim by id at once."""

SLICE = 0.02
"""Seconds to run handlers before the thread does other work, such as extending leases."""

LEFT_OPEN = "the handler left its transaction open, and what it wrote there was rolled back"


@dataclass(frozen=True, slots=True)
class Drained:
    """The counts of a drain; ``finished`` is True if nothing due is left."""

    delivered: int = 0
    retried: int = 0
    failed: int = 0
    finished: bool = True

    def __add__(self, other: Drained) -> Drained:
        return Drained(
            self.delivered + other.delivered,
            self.retried + other.retried,
            self.failed + other.failed,
            self.finished and other.finished,
        )


Rows = Mapping[str, Sequence[UUID]]
"""Row ids by destination."""

_waiting: ContextVar[deque[tuple[str, Rows | None]] | None] = ContextVar("relaybox_waiting", default=None)
"""The work left in the current drain, by alias; events emitted by its handlers are added here."""


def drain(
    using: str = "default",
    *,
    seconds: float = 30.0,
    patience: float = PATIENCE,
    sweep: bool = False,
    observers: Sequence[Observer] = (),
) -> Drained:
    """Deliver what is due for up to ``seconds``, plus ``patience`` for sends in progress.

    Do nothing inside ``atomic()`` or another drain. ``sweep`` also makes due what waits without a reason.
    """
    if _waiting.get() is not None or is_busy(connection_of(using)):
        return Drained(finished=False)
    return _drain_in_turn([(using, None)], seconds, patience, sweep, observers)


def drain_rows(using: str, rows: Rows, *, seconds: float, patience: float = PATIENCE) -> Drained:
    """Deliver only these rows and, within the same time, the rows that their handlers emit."""
    if is_busy(connection_of(using)):
        return Drained(finished=False)
    longest = max(map(len, rows.values()), default=0)
    parts = [
        (using, {name: ids[start : start + PART] for name, ids in rows.items() if len(ids) > start})
        for start in range(0, longest, PART)
    ]
    if (outer := _waiting.get()) is not None:
        outer.extend(parts)
        return Drained(finished=False)
    return _drain_in_turn(parts, seconds, patience)


def _drain_in_turn(
    parts: Iterable[tuple[str, Rows | None]],
    seconds: float,
    patience: float,
    sweep: bool = False,
    observers: Sequence[Observer] = (),
) -> Drained:
    end = time.monotonic() + seconds
    drained, waiting = Drained(), deque(parts)
    token = _waiting.set(waiting)
    try:
        while waiting:
            left = end - time.monotonic()
            if left <= 0:
                return replace(drained, finished=False)
            using, rows = waiting.popleft()
            drained += _drain(using, rows, left, patience, sweep and rows is None, observers)
        return drained
    finally:
        _waiting.reset(token)


def upkeep(using: str = "default") -> Chores:
    """Remove expired rows. Do nothing while a relay leads, because the leader removes them."""
    with _relay(using, PATIENCE) as relay:
        return enter(functools.partial(relay.upkeep, sweep=False))


def _drain(
    using: str, only: Rows | None, seconds: float, patience: float, sweep: bool, observers: Sequence[Observer]
) -> Drained:
    signals: set[asyncio.Task[None]] = set()

    def send(signal: Callable[[], None]) -> None:
        task = asyncio.create_task(call(signal))
        signals.add(task)
        task.add_done_callback(signals.discard)

    counter = Counter()
    with _relay(using, patience, only, [counter, SignalObserver(using, send), *observers]) as relay:

        async def work() -> bool:
            finished = await relay.drain(seconds, sweep=sweep)
            await asyncio.gather(*signals)
            return finished

        finished = enter(work)
    return Drained(**asdict(counter.total), finished=finished)


_tallies: defaultdict[tuple[int, str], list[Tally]] = defaultdict(list)


@contextmanager
def _relay(
    using: str, patience: float, only: Rows | None = None, observers: Sequence[Observer] = ()
) -> Iterator[Relay]:
    """Yield a relay with an idle tally or a new one, so that successive drains share rows of the charts."""
    idle = _tallies[os.getpid(), using]
    try:
        tally = idle.pop()
    except IndexError:
        # Checking first would race with another thread for the last one.
        tally = new_tally()
    left_out = functools.partial(log.error, "nothing is sent to %s from this process, only to others: %s")
    try:
        settings, handlers = in_atomic(using, *get_configuration()[:2])
        yield open_relay(
            settings,
            get_tables(),
            handlers,
            Bell(),
            patience=patience,
            observers=observers,
            sink_of=functools.partial(sink_of, using),
            store=open_store(using),
            wake=LocalWake(),
            only=only,
            tally=tally,
            left_out=left_out,
        )
    finally:
        idle.append(tally)


def own_sink(using: str, destination: Destination, handlers: Handlers) -> Sink:
    """Return a sink that calls synchronous functions and eager tasks in this thread, or the usual sink."""
    if destination.scheme == "handler":
        function = handler_of(destination, handlers)
        if not is_async(destination.name, function):
            return CallersThread(using, function)
    sink = open_sink(destination, handlers)
    publisher = getattr(sink, "publisher", None)
    if publisher is not None and publisher.eager:
        return CallersThread(using, publisher.publish, publisher.read)
    return sink


sink_of: Callable[[str, Destination, Handlers], Sink] = own_sink
"""The function that opens sinks; tests replace it."""


class CallersThread(Limited):
    """A sink that calls a function with one event at a time, in the thread that drains."""

    def __init__(
        self, using: str, handler: Callable[..., Any], given: Callable[[Delivery], Any] = event_of
    ) -> None:
        super().__init__(1)
        self._using = using
        self._handler = handler
        self._given = given

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """Return one answer for each delivery, in the same order."""
        answers: list[Answer] = [Released()] * len(deliveries)
        heads, following = runs(deliveries)
        # A stack of the next delivery of each key, with the first one on top.
        heads = heads[::-1]
        while heads:
            part = asyncio.ensure_future(call(self._slice, deliveries, heads, following, progress))
            try:
                await asyncio.shield(part)
            finally:
                # Also if cancelled: the thread goes on, and events that it handled must not be handled again.
                for index, answer in await part:
                    answers[index] = answer
                    progress.report(deliveries[index], answer)
        return answers

    def _slice(
        self, deliveries: Sequence[Delivery], heads: list[int], following: dict[int, int], progress: Progress
    ) -> list[tuple[int, Answer]]:
        """Handle the heads for ``SLICE`` seconds. If one fails, skip the rest of its key."""
        end = time.monotonic() + SLICE
        inside = connection_of(self._using).in_atomic_block
        done: list[tuple[int, Answer]] = []
        while heads and time.monotonic() < end:
            at = heads.pop()
            if not progress.begin(deliveries[at]):
                continue
            answer = self._handle(deliveries[at], inside)
            done.append((at, answer))
            if isinstance(answer, Delivered) and at in following:
                heads.append(following[at])
        return done

    def _handle(self, delivery: Delivery, inside: bool) -> Answer:
        try:
            # In a test's transaction, a savepoint keeps it usable after a handler's error.
            block = transaction.atomic(using=self._using) if inside else nullcontext()
            with attached(stored(delivery.headers)), block:
                self._handler(self._given(delivery))
        except (Retry, Reject, Unavailable, PayloadError) as error:
            return answer_of(error)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            handler_log.warning(
                "%s: the handler failed with %s", delivery.destination, describe(error), exc_info=error
            )
            return Retry(describe(error))
        finally:
            left_open = not inside and _roll_back(connection_of(self._using))
        return Retry(LEFT_OPEN) if left_open else Delivered()


def _roll_back(connection: BaseDatabaseWrapper) -> bool:
    """Roll back a transaction that a handler left open, so that later ones commit. True if there was one."""
    if not is_busy(connection):
        return False
    try:
        while connection.in_atomic_block:
            connection.atomic_blocks[-1].__exit__(Retry, Retry(LEFT_OPEN), None)
        if not connection.get_autocommit():
            connection.rollback()
            connection.set_autocommit(True)
    except Error:
        connection.close()
    return True
