"""Search indexes: each event changes a document, and a document's last change in a batch is the one written.

What an engine answers of one document is that document's; where the last change of several is refused, those
before it are tried without it, so that no event fails by the fault of another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from msgspec import DecodeError, Struct, json

from relaybox.core.event import TEST_TYPE, Delivery
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.search.change import BUILDING, Changes, index_of, search_address
from relaybox.search.engine import Change, Engine
from relaybox.search.indexes import Indexes, Spoilt, is_last
from relaybox.search.units import Target, Unit, units_of
from relaybox.sinks.sink import (
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

    def _target_of(self, delivery: Delivery) -> Target | None:
        if delivery.event_type == TEST_TYPE or self._changes.action_of(delivery.event_type) == "ignore":
            return None
        named = _named_index(delivery)
        index = named or self._index(delivery)
        if not named and index.endswith(BUILDING):
            raise Reject(f"the index {index!r} would be one that is being rebuilt, by its name; change that")
        return Target(index, delivery.aggregate_id)

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
        made = await self._made(deliveries)
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

    async def _made(self, deliveries: Sequence[Delivery]) -> Sequence[Change | Answer]:
        if self._changes.waits:
            return await asyncio.gather(*map(self._change_of, deliveries))
        return [self._change_at_once(delivery) for delivery in deliveries]

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


class _Named(Struct, gc=False, rename={"index": "relaybox-index"}):
    index: str | None = None


_decode = json.Decoder(_Named).decode


def _named_index(delivery: Delivery) -> str | None:
    """The index that the event is for alone, by its header ``relaybox-index``."""
    if '"relaybox-index"' not in delivery.headers:
        return None
    try:
        return _decode(delivery.headers).index
    except DecodeError:
        return None
