"""Receivers of deliveries, each with its troubles, and the sinks by which nodes talk to them.

A request that has left its node arrives, whether the node is still alive or not. A receiver applies first and
answers then; the answer may say otherwise.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Throttled, Unavailable, Unreachable
from relaybox.sinks.sink import REGARDLESS, Answer, OneByOne, Places, Progress
from tests.simulation.world import Node, World

EVENT_TROUBLES = 1  # So often at most is an innocent event refused by itself: less than its attempts


class Applied(NamedTuple):
    event_id: UUID
    payload: str | None
    position: int
    token: str
    node: Node
    begun: float
    at: float


class Outage(NamedTuple):
    """The time of an outage, and how it looks to a client."""

    begins: float
    ends: float
    looks: Callable[[], Exception]


@dataclass
class Troubles:
    latency: float = 0.01
    slow: float = 0.0
    chances: list[tuple[float, bool, Callable[[], Any]]] = field(default_factory=list)
    """How likely it is, whether the delivery is applied all the same, and the answer."""
    outages: list[Outage] = field(default_factory=list)
    rejects: frozenset[int] = frozenset()
    never: frozenset[int] = frozenset()
    chokes: frozenset[int] = frozenset()
    """Numbers of events that it rejects, that it fails at, and at which it always times out."""
    kills: frozenset[int] = frozenset()  # Numbers of events that end the process that sends them
    crawls: float = 0.0
    """Seconds that every delivery takes, or those of the ``slow_keys``."""
    slow_keys: frozenset[str] = frozenset()

    def heal(self) -> None:
        """End the faults of the receiver; faults of events stay."""
        self.slow = 0.0
        self.chances = []
        self.outages = []


@dataclass
class Receiver:
    world: World
    name: str
    troubles: Troubles
    timeout: float
    number: Callable[[UUID], int] = lambda _: -1
    applied: list[Applied] = field(default_factory=list)
    rejected: dict[UUID, float] = field(default_factory=dict)
    """When each event was rejected."""
    misled: Counter[UUID] = field(default_factory=Counter)
    """How often each event was applied while its sender got another answer, or none."""
    charged: Counter[UUID] = field(default_factory=Counter)
    """How often each event was refused in a way that may count as its own failure."""
    met: Counter[str] = field(default_factory=Counter)
    on_request: Callable[[Node, Sequence[Delivery]], None] = lambda *_: None
    _refused_at: dict[UUID, float] = field(default_factory=dict)
    """When each event was last refused in an outage."""

    def request(self, node: Node, deliveries: Sequence[Delivery], answer: asyncio.Future[Any]) -> None:
        """Take deliveries in their order; the future gets an answer for each."""
        self.on_request(node, deliveries)
        random, troubles = self.world.random.random, self.troubles
        there = troubles.latency * (0.2 + random())
        if troubles.slow and random() < troubles.slow:
            there += random() * 1.5
        if not troubles.slow_keys or troubles.slow_keys & {d.ordering_key for d in deliveries}:
            there += troubles.crawls
        if deliveries[0].suspect:
            node.suspects.append((deliveries, answer))
        for delivery in deliveries:
            if troubles.kills and self.number(delivery.event_id) in troubles.kills:
                self.met["killed its sender"] += 1
                node.crash()
                return
        self.world.after(there, self._arrive, node, deliveries, answer, self.world.now)
        if there > self.timeout:
            self.met["too slow"] += 1
            for delivery in deliveries:
                self.charged[delivery.event_id] += 1
            self.world.after(self.timeout, _set, answer, [Unavailable(SILENT) for _ in deliveries])

    def _arrive(
        self, node: Node, deliveries: Sequence[Delivery], answer: asyncio.Future[Any], begun: float
    ) -> None:
        answers: list[Answer] = []
        stuck: set[str | None] = set()
        silent, late = False, self.world.now - begun > self.timeout
        for delivery in deliveries:
            if delivery.ordering_key is not None and delivery.ordering_key in stuck:
                answers.append(Released())
                continue
            applies, reply = self._take(delivery)
            if applies:
                event = delivery.event_id, delivery.payload, delivery.position
                token = delivery.lease_token.hex
                self.applied.append(Applied(*event, token, node, begun, self.world.now))
                if late or reply is not DELIVERED:
                    self.misled[delivery.event_id] += 1
            if reply is not DELIVERED:
                stuck.add(delivery.ordering_key)
                silent |= getattr(reply, "reason", "") == SILENT
            answers.append(reply)
        back = self.timeout if silent else self.troubles.latency * (0.2 + self.world.random.random())
        self.world.after(back, _set, answer, answers)

    def _refuse(self, event_id: UUID) -> None:
        """Charge an outage's refusal to an event only if others got through since its last one.

        The senders may have heard that they did as late as a timeout after they did.
        """
        before, self._refused_at[event_id] = self._refused_at.get(event_id), self.world.now
        if before is not None and self.applied and self.applied[-1].at > before - self.timeout:
            self.charged[event_id] += 1

    def _take(self, delivery: Delivery) -> tuple[bool, Answer]:
        troubles, random, event_id = self.troubles, self.world.random.random, delivery.event_id
        for outage in troubles.outages:
            if outage.begins <= self.world.now < outage.ends:
                self.met["outage"] += 1
                self._refuse(event_id)
                return False, outage.looks()  # type: ignore[return-value]
        number = self.number(event_id)
        if number in troubles.rejects:
            self.rejected[delivery.event_id] = self.world.now
            return False, Reject("422")
        if number in troubles.never:
            self.charged[event_id] += 1
            return False, Retry("500")
        if number in troubles.chokes:
            self.charged[event_id] += 1
            return False, Unavailable(SILENT)
        if troubles.chances and self.charged[event_id] < EVENT_TROUBLES:
            for chance, applies, reply in troubles.chances:
                if random() < chance:
                    self.charged[event_id] += 1
                    answer = reply()
                    self.met[("applied, then " if applies else "") + answer.reason] += 1
                    return applies, answer
        return True, DELIVERED


SILENT = "timed out"
DELIVERED = Delivered()
ANSWERS: dict[str, tuple[bool, Callable[[], Any]]] = {
    "500": (False, lambda: Retry("500")),
    "503": (False, lambda: Unavailable("503")),
    "429": (False, lambda: Throttled("429", after=0.3)),
    "silent": (False, lambda: Unavailable(SILENT)),
    "applied, then 500": (True, lambda: Retry("500")),
    "applied, then silent": (True, lambda: Unavailable(SILENT)),
}
OUTAGES: dict[str, Callable[[], Exception]] = {
    "refused": lambda: Unreachable("refused"),
    "503": lambda: Unavailable("503"),
    "503 with Retry-After": lambda: Unavailable("503", after=1.5),
    "429": lambda: Throttled("429", after=0.5),
    "429 with nonsense": lambda: Throttled("429", after=-5.0),
    "silent": lambda: Unavailable(SILENT),
}


class SimSink(OneByOne):
    def __init__(self, node: Node, receiver: Receiver, concurrency: int) -> None:
        super().__init__(concurrency)
        self._node = node
        self._receiver = receiver

    async def deliver(self, delivery: Delivery) -> None:
        answer: asyncio.Future[Any] = self._node.create_future()
        self._receiver.request(self._node, (delivery,), answer)
        [reply] = await answer
        if isinstance(reply, Exception):
            raise reply


class BulkSink:
    """Many deliveries a request, as a search index or a broker takes them."""

    keeps_order = True

    def __init__(self, node: Node, receiver: Receiver, concurrency: int) -> None:
        self._node = node
        self._receiver = receiver
        self._places = Places(concurrency)

    def limit(self, concurrency: int) -> None:
        self._places.limit(concurrency)

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        async with self._places:
            chosen, stuck = [], set()
            for delivery in deliveries:
                if delivery.ordering_key not in stuck and progress.begin(delivery):
                    chosen.append(delivery)
                elif delivery.ordering_key is not None:
                    # What is behind it in its key must not overtake it.
                    stuck.add(delivery.ordering_key)
            if not chosen:
                return [Released()] * len(deliveries)
            answer: asyncio.Future[Any] = self._node.create_future()
            self._receiver.request(self._node, chosen, answer)
            answers = dict(zip((delivery.position for delivery in chosen), await answer, strict=True))
        return [answers.get(delivery.position, Released()) for delivery in deliveries]

    async def close(self) -> None:
        """Do nothing: nothing is held."""


def _set(future: asyncio.Future[Any], value: Any) -> None:
    if not future.done():
        future.set_result(value)
