"""A test's view of an outbox: inspect what was emitted, deliver it, and make destinations fail."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeAlias, Unpack

import sqlalchemy as sa

from relaybox.core.event import Delivery, Event
from relaybox.core.event_loop import in_loop, run
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination, Settings
from relaybox.database.schema import Tables, now
from relaybox.errors import ConfigError, PayloadError, StoreError, shorten
from relaybox.operate.observers.count import Counter
from relaybox.outbox import Outbox
from relaybox.sinks.http.status import classify, phrase_of
from relaybox.sinks.memory import MemorySink
from relaybox.sinks.open import Handlers, OpenSink, open_sink
from relaybox.sinks.sink import OneByOne, Sink, describe
from relaybox.stores.store import Claim
from relaybox.testing.emitted import (
    EmittedEvent,
    Expectation,
    Reader,
    Wanted,
    check_lasting,
    found_instead,
    not_found,
    note_if_locked,
)
from relaybox.wire.envelope import event_of

Trouble: TypeAlias = int | BaseException | type[BaseException]
"""An HTTP status, or an exception that a handler may raise."""

_NOTHING_DUE = (
    "nothing committed was due; a relay has a connection of its own and does not see what an open"
    " transaction emitted: commit it first"
)
_UNSEEN = (
    "another connection does not see what an open transaction emitted: commit it, or pass session=, a session"
    " or connection to look through"
)


class OutboxProbe:
    """An outbox during one test. All but functions and ``real`` destinations (None: all) are captured."""

    def __init__(
        self,
        outbox: Outbox,
        real: Collection[str] | None = (),
        *,
        reader: Reader | None = None,
        settings: Callable[[], Settings] | None = None,
    ) -> None:
        self._outbox = outbox
        self._stages = Stages(settings or (lambda: outbox.settings), real)
        self._reader = reader or Reader(outbox)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make every relay of the outbox send as this test says, while the block runs."""
        before, self._outbox._sink_of = self._outbox._sink_of, self._stages.open_sink
        try:
            yield
        finally:
            self._outbox._sink_of = before

    def assert_emitted(
        self,
        event_type: str = "*",
        *,
        session: Any = None,
        count: int | None = None,
        **wanted: Unpack[Wanted],
    ) -> list[EmittedEvent]:
        """Return this test's matching events, oldest first; fail if there is none, or not ``count``.

        ``event_type`` is a pattern, as in a route. ``session`` is a session or connection to look through,
        and is flushed; without one, only committed events are seen. See ``Wanted`` for the rest.
        """
        __tracebackhide__ = True
        expected, events = self._expect(event_type, wanted), self._reader.read(session)
        return _found(expected, events, count, self._hints(events, session))

    async def aassert_emitted(
        self,
        event_type: str = "*",
        *,
        session: Any = None,
        count: int | None = None,
        **wanted: Unpack[Wanted],
    ) -> list[EmittedEvent]:
        """Do what ``assert_emitted`` does, through an asynchronous ``session``."""
        __tracebackhide__ = True
        expected, events = self._expect(event_type, wanted), await self._reader.aread(session)
        return _found(expected, events, count, self._hints(events, session))

    def refute_emitted(self, event_type: str = "*", *, session: Any = None, **wanted: Unpack[Wanted]) -> None:
        """Fail if an event of this test matches; without arguments, if there is any."""
        __tracebackhide__ = True
        _refute(self._expect(event_type, wanted), self._reader.read(session))

    async def arefute_emitted(
        self, event_type: str = "*", *, session: Any = None, **wanted: Unpack[Wanted]
    ) -> None:
        """Do what ``refute_emitted`` does, through an asynchronous ``session``."""
        __tracebackhide__ = True
        _refute(self._expect(event_type, wanted), await self._reader.aread(session))

    async def adrain(self, *, ignore_backoff: bool = False) -> Drained:
        """Deliver what is committed and due. Return what was done, without asserting anything.

        ``ignore_backoff``: also deliver what waits for its next attempt or behind an open circuit.
        """
        check_lasting(self._outbox.settings.database)
        if ignore_backoff:
            await asyncio.to_thread(self._reader.execute, *no_backoff(self._outbox.tables))
        tally = Tally()
        try:
            await self._outbox.relay(observers=[tally]).drain()
        except (StoreError, ExceptionGroup) as raised:
            if (error := _store_error(raised)) is None:
                raise
            note_if_locked(error)
            raise error from None
        return tally.drained

    def drain(self, *, ignore_backoff: bool = False) -> Drained:
        """Run ``adrain`` from synchronous code."""
        if in_loop():
            raise ConfigError("drain() inside a running event loop: write `await outbox.adrain()`")
        return run(self.adrain(ignore_backoff=ignore_backoff))

    def fail_next(self, destination: str, trouble: Trouble, *, times: int = 1) -> None:
        """Make the next ``times`` deliveries fail, after failures that are already queued.

        ``trouble`` is an HTTP status, as it is understood for webhooks, or any exception, class or instance.
        """
        if times < 1:
            raise ConfigError(f"fail_next: times={times}: give 1 or more")
        self._stages.named(destination).failures.extend([failure(trouble)] * times)

    def capture(self, destination: str) -> MemorySink:
        """Keep deliveries to a destination in memory from now on, even if it is a function."""
        stage = self._stages.named(destination)
        if stage.captured is None:
            stage.captured = MemorySink()
        return stage.captured

    def sent(self, destination: str) -> list[Event]:
        """Return the events delivered to a destination in this test, with any sink."""
        return list(self._stages.named(destination).sent)

    def clear(self) -> None:
        """Delete every committed row of this outbox's tables, including circuits and pauses."""
        tables = self._outbox.tables
        names = (each.name for each in fields(tables) if each.name != "migration")
        self._reader.execute(*(sa.delete(getattr(tables, name)) for name in names))

    async def aclear(self) -> None:
        """Run ``clear`` without blocking the event loop."""
        await asyncio.to_thread(self.clear)

    def _expect(self, event_type: str, wanted: Wanted) -> Expectation:
        if "destination" in wanted:
            # An unknown name would make every refute_emitted pass.
            self._stages.named(wanted["destination"])
        return Expectation(event_type, **wanted)

    def _hints(self, events: Sequence[EmittedEvent], session: Any) -> Iterator[str]:
        if not events:
            where = "committed" if session is None else "in sight of the session"
            yield f"nothing is {where} that was emitted since the test began"
        if session is None:
            yield f"hint: {_UNSEEN}"
        yield from self._stages.hints()


def _found(
    expected: Expectation, events: Sequence[EmittedEvent], count: int | None, hints: Iterator[str]
) -> list[EmittedEvent]:
    __tracebackhide__ = True
    found = [event for event in events if not expected.differences(event)]
    if len(found) == count or (found and count is None):
        return found
    raise AssertionError("\n".join([not_found(expected, events, found, count), *hints]))


def _refute(expected: Expectation, events: Sequence[EmittedEvent]) -> None:
    __tracebackhide__ = True
    found = [event for event in events if not expected.differences(event)]
    if found:
        raise AssertionError(found_instead(expected, found))


def no_backoff(tables: Tables) -> list[sa.Update]:
    """Return statements that make due what waits for its next attempt or behind an open circuit."""
    event, destination = tables.event, tables.destination
    waits = (event.c.status == "pending") & event.c.last_attempt_at.is_not(None)
    return [
        sa.update(event).where(waits, event.c.next_attempt_at > now()).values(next_attempt_at=now()),
        sa.update(destination).where(destination.c.circuit == "open").values(circuit_until=now()),
    ]


def _store_error(raised: StoreError | ExceptionGroup[Exception]) -> StoreError | None:
    """Return the database's error, if that is what ended the lanes."""
    if isinstance(raised, StoreError):
        return raised
    found = (
        _store_error(each) for each in raised.exceptions if isinstance(each, StoreError | ExceptionGroup)
    )
    return next(filter(None, found), None)


@dataclass
class Stage:
    """What a test prescribes for one destination, and what arrived there."""

    captured: MemorySink | None
    failures: deque[Retry | Reject | Unavailable] = field(default_factory=deque)
    sent: list[Event] = field(default_factory=list)


class Stages:
    """The stage of each destination; all but functions and ``real`` destinations (None: all) are captured."""

    def __init__(self, settings: Callable[[], Settings], real: Collection[str] | None) -> None:
        self._settings = settings
        self._real = real
        self._stages: dict[str, Stage] = {}
        for name in real or ():
            self.named(name)

    def named(self, name: str) -> Stage:
        """Return the stage of a destination; raise ``ConfigError`` if there is no such destination."""
        return self.of(self._settings().destination(name))

    def of(self, destination: Destination) -> Stage:
        """Return the stage of a destination."""
        name = destination.name
        if name not in self._stages:
            real = destination.scheme == "handler" or self._real is None or name in self._real
            self._stages[name] = Stage(None if real else MemorySink(destination))
        return self._stages[name]

    def open_sink(self, destination: Destination, handlers: Handlers, own: OpenSink = open_sink) -> Sink:
        """Return a sink that does what the stage prescribes."""
        stage = self.of(destination)
        return StagedSink(destination, stage, stage.captured or own(destination, handlers))

    def hints(self) -> Iterator[str]:
        """Yield why the events of some destinations may be gone."""
        for name in (each.name for each in self._settings().destinations if each.retention == 0):
            if self.named(name).sent:
                what = "has retention = 0, so that its rows are deleted when they are delivered"
                yield f"hint: {name} {what}: look before drain(), or at outbox.sent({name!r})"


class StagedSink(OneByOne):
    """Sends through another sink, one at a time, unless the test makes a delivery fail."""

    def __init__(self, destination: Destination, stage: Stage, inner: Sink) -> None:
        super().__init__(destination.concurrency)
        self._stage = stage
        self._inner = inner

    async def deliver(self, delivery: Delivery) -> None:
        """Fail as prescribed, or send it and keep its event."""
        event = event_of(delivery)
        if self._stage.failures:
            raise self._stage.failures.popleft()
        [answer] = await self._inner.send([delivery])
        if isinstance(answer, Exception):
            raise answer
        self._stage.sent.append(event)

    async def close(self) -> None:
        """Close the other sink."""
        await self._inner.close()


def failure(trouble: Trouble) -> Retry | Reject | Unavailable:
    """Return the answer that a destination's own sink would give in this case."""
    if isinstance(trouble, int):
        if isinstance(trouble, bool) or not 100 <= trouble <= 599 or trouble // 100 == 2:
            raise ConfigError(f"fail_next: {trouble} is not an HTTP status of a failure, such as 503")
        return classify(trouble, f"{trouble} {phrase_of(trouble)}".rstrip())
    error = trouble() if isinstance(trouble, type) and issubclass(trouble, BaseException) else trouble
    match error:
        case Retry() | Reject() | Unavailable():
            return error
        case PayloadError():
            return Reject(str(error))
        case BaseException():
            return Retry(describe(error))
    raise ConfigError(f"fail_next: {shorten(trouble)} is neither an HTTP status nor an exception")


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did. ``held`` says why destinations are paused or their circuits open."""

    delivered: int = 0
    retried: int = 0
    failed: int = 0
    held: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


class Tally(Counter):
    """Counts what a relay does; ``note`` is the text if it found nothing to do."""

    def __init__(self, note: str = _NOTHING_DUE) -> None:
        super().__init__()
        self._note = note
        self._held: dict[str, str] = {}

    @property
    def drained(self) -> Drained:
        """Return the counts so far."""
        note = "" if self._held or self.total else self._note
        return Drained(**asdict(self.total), held=dict(self._held), note=note)

    def claimed(self, destination: str, claim: Claim) -> None:
        """Count deliveries that the claim failed, and record what holds the destination up."""
        super().claimed(destination, claim)
        if claim.held is not None:
            self._hold(destination, claim.held.why, claim.held.reason)

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """Record why a circuit opened, and forget it when it closes."""
        if state == "closed":
            self._held.pop(destination, None)
        elif state in ("open", "paused"):
            # The drain may end before another claim meets it.
            self._hold(destination, state, reason)

    def _hold(self, destination: str, state: str, reason: str | None) -> None:
        kind = "paused" if state == "paused" else "circuit open"
        self._held[destination] = f"{kind}: {reason or 'no reason given'}"
