"""Search indexes: each event changes a document, and a document's last change in a batch is the one written.

What an engine answers of one document is that document's; where the last change of several is refused, those
before it are tried without it, so that no event fails by the fault of another.

A unit is a run of deliveries for one document: only the last of them is written, for it holds what the others
would have left. Units of one key or of one document follow one another; all others may go side by side.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import DecodeError, Struct, json

from relaybox.core.event import TEST_TYPE, Delivery
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.search.change import BUILDING, INDEX_HEADER, Changes, index_of, search_address
from relaybox.search.engine import Change, Engine, open_engine
from relaybox.search.indexes import Indexes, Spoilt, is_last
from relaybox.sinks.sink import (
    DELIVERED,
    REGARDLESS,
    RELEASED,
    Answer,
    Places,
    Progress,
    Workers,
    answer_of,
    being_cancelled,
    describe,
    run_workers,
)

REQUESTS = 4
"""At once: an engine writes one after the other anyway."""


def open_sink(destination: Destination) -> SearchSink:
    """Open the engine of a search destination, and the sink around it."""
    return SearchSink(destination, open_engine(destination))


class SearchSink:
    """Writes to the indexes of an engine what the events of a destination say.

    Raises ``ConfigError`` where an option is wrong.
    """

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
        """From now on have no more than so many requests and calls under way at once."""
        self._requests.limit(min(concurrency, REQUESTS))
        self._calls.limit(concurrency)

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """One answer for each delivery, in the same order."""
        answers: list[Answer] = [RELEASED] * len(deliveries)
        units = units_of(deliveries, self._target_of)
        written = await self._indexes.look({unit.target.index for unit in units if unit.target is not None})
        ready = deque(unit for unit in units if not unit.waits_for)

        def take() -> list[Unit]:
            """Units that are ready and of one index, as many as a request may hold."""
            batch: list[Unit] = []
            for _ in range(len(ready)):
                unit = ready.popleft()
                if len(batch) < self._engine.most and _alike(unit, batch):
                    if _begin(unit, deliveries, progress):
                        batch.append(unit)
                else:
                    ready.append(unit)
            return batch

        async def work(workers: Workers) -> None:
            async with self._requests:
                while batch := take():
                    if ready:
                        workers.add()
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
                    if self._requests.crowded and ready:
                        workers.add()
                        return

        await run_workers(work)
        return answers

    async def check(self) -> None:
        """Reach the engine with its key, and see the index; raises ``Unavailable`` with the reason."""
        await self._engine.check()
        if self._index.fixed is not None:
            await self._indexes.check(self._index.fixed)

    @property
    def overdue(self) -> int:
        """The number of document functions that are over their time and still running."""
        return self._changes.overdue

    async def close(self) -> None:
        """Give up connections and threads."""
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
        """Nothing is written of what is refused or ignored; what only proves the path finds it open."""
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
        """Write the last of each unit; of those that are refused, the one before, and so on."""
        if not isinstance(written, tuple):
            for unit in units:
                unit.fail(written, alone=False)
            return
        if not written:
            # It is gone, and whatever was meant for it alone is of no interest.
            for unit in units:
                unit.succeed()
            return
        while units:
            answers = await self._answers([deliveries[unit.writes[-1]] for unit in units], written)
            for unit, answer in zip(units, answers, strict=True):
                self._note(unit, answer, deliveries)
            units = [unit for unit in units if unit.failure is not None and unit.writes]

    async def _answers(self, deliveries: Sequence[Delivery], written: tuple[str, ...]) -> Sequence[Answer]:
        """What becomes of these, no two of one document."""
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
            # No event is to blame, so none may fail by it.
            last = is_last(deliveries[unit.writes[0]])
            unit.fail(RELEASED if last else answer, alone=False)
        elif isinstance(answer, Retry | Reject | Unavailable):
            # What is read again is the same for all of them.
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
    """Whether it can be in one request with these."""
    if not batch or unit.target is None or batch[0].target is None:
        return not batch or unit.target is batch[0].target
    return unit.target.index == batch[0].target.index


def _begin(unit: Unit, deliveries: Sequence[Delivery], progress: Progress) -> bool:
    """Whether anything of it may be sent: what comes after one that may not, may not either."""
    for at in unit.members:
        if not progress.begin(deliveries[at]):
            unit.cut(at)
            break
    return bool(unit.members)


def _next(unit: Unit) -> list[Unit]:
    """The units that waited for this one, and for no other any more."""
    if unit.failure is not None:
        return []
    for follower in unit.followers:
        follower.waits_for -= 1
    return [follower for follower in unit.followers if not follower.waits_for]


class _Named(Struct, gc=False, rename={"index": INDEX_HEADER}):
    index: str | None = None


_decode = json.Decoder(_Named).decode
_QUOTED = f'"{INDEX_HEADER}"'


def _named_index(delivery: Delivery) -> str | None:
    """The index that the event is for alone, by its header."""
    if _QUOTED not in delivery.headers:
        return None
    try:
        return _decode(delivery.headers).index
    except DecodeError:
        return None


@dataclass(frozen=True, slots=True)
class DocumentId:
    """Where a delivery is written: a document of an index."""

    index: str
    id: str

    @property
    def document(self) -> tuple[str, str]:
        """The document, whether it is written to its index or to the one that is being built for it."""
        return self.index.removesuffix(BUILDING), self.id


@dataclass(eq=False)
class Unit:
    """Deliveries by their places in the batch. Without a target they are ignored, or the one is refused."""

    target: DocumentId | None
    refused: Reject | None = None
    members: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    """Those of the members that are not ignored."""
    waits_for: int = 0
    """How many units have to arrive before this one."""
    followers: list[Unit] = field(default_factory=list)
    failure: tuple[int, Answer] | None = None
    """The first member that did not arrive, and its answer: those after it are released."""
    refusals: int = 0
    passed_over: list[int] = field(default_factory=list)
    """Between what is written and what was refused after it."""

    def cut(self, at: int) -> None:
        """Leave out this member and all after it, and whatever follows."""
        self.members = [member for member in self.members if member < at]
        self.writes = [member for member in self.writes if member < at]
        self.followers = []

    def succeed(self) -> None:
        """What was written, the last, arrived; those that were passed over wait for another time."""
        if self.passed_over:
            self.failure = self.passed_over[0], RELEASED
        self.writes = []

    def fail(self, answer: Answer, *, alone: bool) -> None:
        """What was written, the last, was refused; ``alone``: those before it may still be written.

        Each time twice as many are passed over: of a long run of bad ones few are tried.
        """
        self.failure = self.writes[-1 if alone else 0], answer
        last = len(self.writes) - 1
        left = max(last + 1 - 2**self.refusals, min(last, 1)) if alone else 0
        self.writes, self.passed_over = self.writes[:left], self.writes[left:last]
        self.refusals += 1

    def answers(self) -> list[tuple[int, Answer]]:
        """An answer for each member, once nothing is left to be written."""
        if self.failure is None:
            return [(at, DELIVERED) for at in self.members]
        failed, answer = self.failure
        return [
            (at, DELIVERED if at < failed else answer if at == failed else RELEASED) for at in self.members
        ]


Targets = Callable[[Delivery], DocumentId | None]
"""Where a delivery goes, None where it is ignored; raises ``Reject``."""


def units_of(deliveries: Sequence[Delivery], target_of: Targets) -> list[Unit]:
    """The units of a batch, in the order in which they begin."""
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
    """The unit that a delivery can be one of: it is the latest of its key, and of its document."""
    if refused is not None:
        return None
    if target is None:
        return before if before is not None and before.refused is None else None
    if same is None or same.target != target or before not in (None, same):
        return None
    return same
