"""Sinks for a test: they fail when they are told to, keep what they sent, and send nothing away unasked."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias
from uuid import UUID

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, PayloadError, UnknownDestination, shorten
from relaybox.operate.observers.count import Count
from relaybox.relay.observer import Observer
from relaybox.sinks.http.status import classify, phrase_of
from relaybox.sinks.memory import MemorySink
from relaybox.sinks.open import Handlers, OpenSink, open_sink
from relaybox.sinks.sink import OneByOne, Sink, describe
from relaybox.stores.store import Claim, Settlement
from relaybox.wire.envelope import event_of

Trouble: TypeAlias = int | BaseException | type[BaseException]
"""An HTTP status, or what a handler may raise."""

_NOTHING_DUE = (
    "nothing committed was due; a relay has a connection of its own and does not see what an open"
    " transaction emitted: commit it first"
)


@dataclass
class Stage:
    """What a test says of one destination, and what arrived there."""

    captured: MemorySink | None
    failures: deque[Retry | Reject | Unavailable] = field(default_factory=deque)
    sent: list[Event] = field(default_factory=list)


class Stages:
    """The destinations of an outbox while a test runs. Those in ``real`` keep their own sinks."""

    def __init__(self, real: Collection[str] | None) -> None:
        self._real = real
        self._stages: dict[str, Stage] = {}

    def of(self, name: str, destinations: Sequence[Destination]) -> Stage:
        """The stage of a destination; raises ``UnknownDestination``."""
        for destination in destinations:
            if destination.name == name:
                return self._stage(destination)
        raise UnknownDestination(name, [destination.name for destination in destinations])

    def sink_of(self, destination: Destination, handlers: Handlers, own: OpenSink = open_sink) -> Sink:
        """What a relay gets as the destination's sink; ``own`` opens the one it would have elsewhere."""
        stage = self._stage(destination)
        return StagedSink(destination, stage, stage.captured or own(destination, handlers))

    def _stage(self, destination: Destination) -> Stage:
        if destination.name not in self._stages:
            own = destination.sink.lower().startswith("handler:")
            real = own or self._real is None or destination.name in self._real
            self._stages[destination.name] = Stage(None if real else MemorySink(destination))
        return self._stages[destination.name]


class StagedSink(OneByOne):
    """Sends through another sink, one at a time, unless the test says that this one is to fail."""

    def __init__(self, destination: Destination, stage: Stage, inner: Sink) -> None:
        super().__init__(destination.concurrency)
        self._stage = stage
        self._inner = inner

    async def deliver(self, delivery: Delivery) -> None:
        """Fail as told, or send it and keep its event."""
        event = event_of(delivery)
        if self._stage.failures:
            raise self._stage.failures.popleft()
        [answer] = await self._inner.send([delivery])
        if isinstance(answer, Exception):
            raise answer
        self._stage.sent.append(event)

    async def close(self) -> None:
        """Give up what the other sink holds."""
        await self._inner.close()


def failure(trouble: Trouble) -> Retry | Reject | Unavailable:
    """The answer of a destination that is in this trouble, as its own sink would give it."""
    if isinstance(trouble, int):
        if isinstance(trouble, bool) or not 100 <= trouble <= 599 or trouble // 100 == 2:
            raise ConfigError(f"fail_next: {trouble} is no HTTP status of a failure, such as 503")
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
    """What a drain did. ``held`` says of destinations that are paused, or whose circuit is open, why."""

    delivered: int = 0
    retried: int = 0
    failed: int = 0
    held: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


class Tally(Observer):
    """Counts what a relay does; ``note`` is for one that found nothing to do."""

    def __init__(self, note: str = _NOTHING_DUE) -> None:
        self._note = note
        self._count = Count()
        self._held: dict[str, str] = {}

    @property
    def drained(self) -> Drained:
        """The counts so far."""
        count, note = self._count, "" if self._held or self._count else self._note
        return Drained(count.delivered, count.retried, count.failed, dict(self._held), note)

    def claimed(self, destination: str, claim: Claim) -> None:
        """What was failed on the spot counts too."""
        self._count.failed += len(claim.failed)
        if claim.held is not None:
            state = "paused" if claim.held.why == "paused" else "circuit open"
            self._held[destination] = f"{state}: {claim.held.reason or 'no reason given'}"

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count each outcome that was written."""
        self._count.add(settlements, lost)

    def circuit(self, destination: str, state: str, reason: str) -> None:
        """One that closed holds nothing up any more."""
        if state == "closed":
            self._held.pop(destination, None)
