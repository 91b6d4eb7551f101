"""Write events to search indexes: each event changes a document.

A unit is a run of deliveries for one document. Only its last delivery is written, because it includes the
others. If the engine refuses that one, earlier ones are tried, so no event fails because of another. Units of
the same key or document run one after the other; all others may run in parallel.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from relaybox.core.event import TEST_TYPE, Delivery
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.search.change import BUILDING, INDEX_HEADER, Changes, index_of, search_address
from relaybox.search.engine import Change, Engine, open_engine
from relaybox.search.indexes import Indexes, Spoilt, is_last
from relaybox.sinks.broker import header_reader
from relaybox.sinks.sink import (
    DELIVERED,
    REGARDLESS,
    RELEASED,
    Answer,
    Places,
    Progress,
    answer_of,
    being_cancelled,
    describe,
    run_batches,
)

REQUESTS = 4
"""Requests at a time; an engine writes one after the other anyway."""


def open_sink(destination: Destination) -> SearchSink:
    """Open a search destination's engine and its sink."""
    return SearchSink(destination, open_engine(destination))


class SearchSink:
    """Writes a destination's events to an engine's indexes. Raises ``ConfigError`` for a wrong option."""

    keeps_order = True

    def __init__(self, destination: Destination, engine: Engine) -> None:
        options = search_address(destination).options
        self._engine = engine
        self._index = index_of(destination)
        self._changes = Changes(destination, options)
        self._indexes = Indexes(destination.name, engine, create=options.get("create_index", False))
        self._requests = Places(min(destination.concurrency, REQUESTS))
        self._calls = Places(destination.concurrency)

    def limit(self, concurrency: int) -> None:
        """Limit the requests and calls under way from now on."""
        self._requests.limit(min(concurrency, REQUESTS))
        self._calls.limit(concurrency)

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """Return one answer for each delivery, in the same order."""
        answers: list[Answer] = [RELEASED] * len(deliveries)
        units = units_of(deliveries, self._target_of)
        written = await self._indexes.look({unit.target.index for unit in units if unit.target is not None})
        ready = deque(unit for unit in units if not unit.waits_for)

        def take() -> list[Unit]:
            """Take ready units of one index, as many as fit into a request."""
            batch: list[Unit] = []
            for _ in range(len(ready)):
                unit = ready.popleft()
                if len(batch) < self._engine.most and _alike(unit, batch):
                    if _begin(unit, deliveries, progress):
                        batch.append(unit)
                else:
                    ready.append(unit)
            return batch

        async def write(batch: list[Unit]) -> None:
            target = batch[0].target
            if target is None:
                for unit in batch:
                    await self._unwritten(unit, deliveries)
            else:
                await self._write(batch, deliveries, written[target.index])
            for unit in batch:
                for at, answer in unit.answers():
                    answers[at] = answer
                    progress.report(deliveries[at], answer)
                ready.extend(_next(unit))

        await run_batches(self._requests, ready, take, write)
        return answers

    async def check(self) -> None:
        """Reach the engine with its key, and find the index. Raise ``Unavailable`` with the reason."""
        await self._engine.check()
        if self._index.fixed is not None:
            await self._indexes.check(self._index.fixed)

    @property
    def overdue(self) -> int:
        """Return the number of document functions that exceed their timeout and still run."""
        return self._changes.overdue

    async def close(self) -> None:
        """Close the connections and threads."""
        self._changes.close()
        await self._engine.close()

    def _target_of(self, delivery: Delivery) -> DocumentId | None:
        if delivery.event_type == TEST_TYPE or self._changes.action_of(delivery.event_type) == "ignore":
            return None
        named = _named_index(delivery)
        index = named or self._index(delivery)
        if not named and index.endswith(BUILDING):
            raise Reject(f"the index {index!r} would be one that is being rebuilt, by its name; change that")
        return DocumentId(index, delivery.aggregate_id)

    async def _unwritten(self, unit: Unit, deliveries: Sequence[Delivery]) -> None:
        """Settle a unit that writes nothing: refused, ignored, or a test event that only runs a check."""
        [first, *_] = unit.members
        if unit.refused is not None:
            unit.failure = first, unit.refused
        elif deliveries[first].event_type == TEST_TYPE:
            try:
                await self.check()
            except Exception as error:
                unit.failure = first, answer_of(error)

    async def _write(
        self, units: Sequence[Unit], deliveries: Sequence[Delivery], written: tuple[str, ...] | Answer
    ) -> None:
        """Write the last delivery of each unit; if it is refused, an earlier one, and so on."""
        if not isinstance(written, tuple):
            for unit in units:
                unit.fail(written, alone=False)
            return
        if not written:
            # The build index is gone, so events for it alone are obsolete.
            for unit in units:
                unit.succeed()
            return
        while units:
            answers = await self._answers([deliveries[unit.writes[-1]] for unit in units], written)
            for unit, answer in zip(units, answers, strict=True):
                self._note(unit, answer, deliveries)
            units = [unit for unit in units if unit.failure is not None and unit.writes]

    async def _answers(self, deliveries: Sequence[Delivery], written: tuple[str, ...]) -> Sequence[Answer]:
        made: Sequence[Change | Answer]
        if self._changes.waits:
            made = await asyncio.gather(*map(self._change_of, deliveries))
        else:
            made = [self._change_at_once(delivery) for delivery in deliveries]
        changes = [change for change in made if isinstance(change, Change)]
        answered = iter(await self._indexes.write(written, changes) if changes else ())
        answers = [next(answered) if isinstance(change, Change) else change for change in made]
        if written[-1].endswith(BUILDING):
            return await self._indexes.spare(written[-1], deliveries, answers)
        return answers

    def _note(self, unit: Unit, answer: Answer, deliveries: Sequence[Delivery]) -> None:
        if isinstance(answer, Spoilt):
            # The build index was at fault, so an event on its last attempt must not fail.
            last = is_last(deliveries[unit.writes[0]])
            unit.fail(RELEASED if last else answer, alone=False)
        elif isinstance(answer, Retry | Reject | Unavailable):
            # With reread, every delivery of the unit writes the same document.
            unit.fail(answer, alone=not isinstance(answer, Unavailable) and not self._changes.reread)
        else:
            unit.succeed()

    def _change_at_once(self, delivery: Delivery) -> Change | Answer:
        try:
            change = self._changes.change_at_once(delivery)
        except Exception as error:
            return answer_of(error)
        assert change is not None
        return change

    async def _change_of(self, delivery: Delivery) -> Change | Answer:
        try:
            async with self._calls:
                change = await self._changes.change_of(delivery)
        except Exception as error:
            return answer_of(error)
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            return Retry(describe(error))
        assert change is not None
        return change


def _alike(unit: Unit, batch: Sequence[Unit]) -> bool:
    if not batch or unit.target is None or batch[0].target is None:
        return not batch or unit.target is batch[0].target
    return unit.target.index == batch[0].target.index


def _begin(unit: Unit, deliveries: Sequence[Delivery], progress: Progress) -> bool:
    """Begin the unit's deliveries, and cut it at the first that may not begin. True if any is left."""
    for at in unit.members:
        if not progress.begin(deliveries[at]):
            unit.cut(at)
            break
    return bool(unit.members)


def _next(unit: Unit) -> list[Unit]:
    """Return the units that waited only for this one."""
    if unit.failure is not None:
        return []
    for follower in unit.followers:
        follower.waits_for -= 1
    return [follower for follower in unit.followers if not follower.waits_for]


_named_index = header_reader(INDEX_HEADER)


@dataclass(frozen=True, slots=True)
class DocumentId:
    """The document, in an index, that a delivery changes."""

    index: str
    id: str

    @property
    def document(self) -> tuple[str, str]:
        """Return the document; it is the same for an index and its build index."""
        return self.index.removesuffix(BUILDING), self.id


@dataclass(eq=False)
class Unit:
    """Deliveries by their places in the batch. Without a target they are ignored, or refused."""

    target: DocumentId | None
    refused: Reject | None = None
    members: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    """The members that are not ignored."""
    waits_for: int = 0
    """The number of units that must arrive before this one."""
    followers: list[Unit] = field(default_factory=list)
    failure: tuple[int, Answer] | None = None
    """The first member that did not arrive, and its answer; later members are released."""
    refusals: int = 0
    passed_over: list[int] = field(default_factory=list)
    """Members between the next one to write and the refused one."""

    def cut(self, at: int) -> None:
        """Leave out this member, all later ones, and the followers."""
        self.members = [member for member in self.members if member < at]
        self.writes = [member for member in self.writes if member < at]
        self.followers = []

    def succeed(self) -> None:
        """Record that the last write arrived; release the members that were passed over."""
        if self.passed_over:
            self.failure = self.passed_over[0], RELEASED
        self.writes = []

    def fail(self, answer: Answer, *, alone: bool) -> None:
        """Record that the last write was refused; if ``alone``, earlier members may still be written.

        Each refusal skips twice as many, so a long run of bad ones takes few requests.
        """
        self.failure = self.writes[-1 if alone else 0], answer
        last = len(self.writes) - 1
        left = max(last + 1 - 2**self.refusals, min(last, 1)) if alone else 0
        self.writes, self.passed_over = self.writes[:left], self.writes[left:last]
        self.refusals += 1

    def answers(self) -> list[tuple[int, Answer]]:
        """Return an answer for each member, once nothing is left to write."""
        if self.failure is None:
            return [(at, DELIVERED) for at in self.members]
        failed, answer = self.failure
        return [
            (at, DELIVERED if at < failed else answer if at == failed else RELEASED) for at in self.members
        ]


Targets = Callable[[Delivery], DocumentId | None]
"""Returns the document of a delivery, or None if it is ignored; raises ``Reject``."""


def units_of(deliveries: Sequence[Delivery], target_of: Targets) -> list[Unit]:
    """Return the units of a batch, in the order in which they begin."""
    units: list[Unit] = []
    of_key: dict[str, Unit] = {}
    of_document: dict[tuple[str, str], Unit] = {}
    for at, delivery in enumerate(deliveries):
        key = delivery.ordering_key
        before = None if key is None else of_key.get(key)
        try:
            target, refused = target_of(delivery), None
        except Reject as error:
            target, refused = None, error
        same = None if target is None else of_document.get(target.document)
        unit = _joined(before, same, target, refused)
        if unit is None:
            unit = Unit(target, refused)
            units.append(unit)
            for other in {earlier for earlier in (before, same) if earlier is not None}:
                other.followers.append(unit)
                unit.waits_for += 1
        unit.members.append(at)
        if target is not None:
            unit.writes.append(at)
            of_document[target.document] = unit
        if key is not None:
            of_key[key] = unit
    return units


def _joined(
    before: Unit | None, same: Unit | None, target: DocumentId | None, refused: Reject | None
) -> Unit | None:
    """Return the unit that the delivery can join, if that is the latest of its key and of its document."""
    if refused is not None:
        return None
    if target is None:
        return before if before is not None and before.refused is None else None
    if same is None or same.target != target or before not in (None, same):
        return None
    return same
