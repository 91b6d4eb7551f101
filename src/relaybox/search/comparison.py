"""One pass over a database and an index: what differs, and what of that is only under way."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from relaybox.errors import ConfigError
from relaybox.operate.admin import Progress, Stop
from relaybox.search.compare import HashedIds, differing, version_of
from relaybox.search.desk import Desk
from relaybox.search.reconciled import Difference, Reconciled
from relaybox.search.repairs import Repairs
from relaybox.search.rows import Rows
from relaybox.search.target import Refused, Target, Wanted
from relaybox.stores.sql.undelivered import OfDocument

PAGE = 500
"""Documents that are compared at a time."""

MANY = 10_000
"""Those in doubt that are looked for at once in an iterable."""


@dataclass(frozen=True, slots=True)
class _Way:
    """What the outbox has of a document that was not delivered."""

    pending: bool = False
    failed: UUID | None = None
    blocked: bool = False


class Comparison:
    """Compares; see ``reconcile.py`` for how it tells what is wrong from what is under way."""

    def __init__(
        self,
        desk: Desk,
        rows: Rows,
        target: Target,
        repairs: Repairs | None,
        examples: int,
        progress: Progress,
        stop: Stop,
    ) -> None:
        self._desk = desk
        self._rows = rows
        self._target = target
        self._repairs = repairs
        self._shown = examples
        self._progress = progress
        self._stop = stop
        self._counts: Counter[str] = Counter()
        self._examples: list[Difference] = []
        self._ids = None if rows.guarded else HashedIds()
        self._doubtful: list[str] = []
        self._any = False
        # To ask an iterable for some documents is to read all of them.
        self._enough = 1 if rows.guarded else MANY

    async def run(self, *, allow_empty: bool = True) -> Reconciled:
        """Go through both; raises ``ConfigError`` where the source has nothing and that is not allowed."""
        await self._target.engine.refresh(self._target.index)
        stopped = not await self._read()
        if not (stopped or allow_empty or self._any):
            await self._check_empty()
        stopped = stopped or not await self._scan()
        counts = {name: self._counts[name] for name in Reconciled.COUNTS}
        examples = tuple(self._examples)
        target = self._target
        return Reconciled(target.destination.name, target.index, **counts, stopped=stopped, examples=examples)

    async def _read(self) -> bool:
        """The database, page by page; whether it was read to its end."""
        async for page in self._rows.read(PAGE):
            if self._stop():
                return False
            self._any = True
            payloads = {item.id: item.payload for item in page}
            if self._ids is not None:
                for id_ in payloads:
                    self._ids.add(id_)
            await self._compare(payloads)
            self._progress(self._counts["documents"])
        await self._look_again(scanned=False, at_least=1)
        return True

    async def _check_empty(self) -> None:
        """A query that is wrong gives nothing, and looks as if everything had been deleted."""
        index = self._target.index
        if count := await self._target.engine.count(index):
            told = f"to repair would delete all {count:,} of the index {index!r}"
            fix = "see its query, or say --yes (allow_empty=True) if that is meant"
            raise ConfigError(f"the source has no documents: {told}; {fix}")

    async def _compare(self, payloads: Mapping[str, Mapping[str, Any]]) -> None:
        wanted = await self._wanted(payloads)
        found = await self._target.engine.get(self._target.index, list(wanted))
        for id_, document in wanted.items():
            if not _same(document, found.get(id_)):
                self._doubtful.append(id_)
            elif document is not None:
                self._counts.update(documents=1, matched=1)
        await self._look_again(scanned=False)

    async def _scan(self) -> bool:
        """The ids of the index, page by page; whether they were read to their end."""
        async for page in self._target.engine.scan(self._target.index):
            if self._stop():
                return False
            for start in range(0, len(page), PAGE):
                self._doubtful += await self._unknown(page[start : start + PAGE])
                await self._look_again(scanned=True)
        await self._look_again(scanned=True, at_least=1)
        return True

    async def _unknown(self, ids: Sequence[str]) -> list[str]:
        """Those that the database does not have."""
        if self._ids is not None:
            return [id_ for id_ in ids if id_ not in self._ids]
        existing = await self._rows.existing(ids)
        return [id_ for id_ in ids if id_ not in existing]

    async def _look_again(self, *, scanned: bool, at_least: int | None = None) -> None:
        """Judge what is in doubt after both sides are read anew, once there is enough of it."""
        if len(self._doubtful) < (self._enough if at_least is None else at_least):
            return
        # An engine may give an id twice while others write to it.
        ids, self._doubtful = list(dict.fromkeys(self._doubtful)), []
        before = await self._wanted(await self._rows.existing(ids))
        ways = await self._ways(ids)
        found = await self._found(ids)
        after = await self._wanted(await self._rows.existing(ids))
        real: list[str] = []
        for id_ in ids:
            states = (before.get(id_), after.get(id_))
            if not scanned and states[1] is not None:
                self._counts["documents"] += 1
            difference = self._judge(id_, states, found.get(id_), ways[id_], scanned=scanned)
            if difference is not None:
                self._keep(difference)
                # An event of what is refused would fail; one behind a failed event would wait with it.
                real += [id_] if difference.refused is None and not difference.blocked else []
        if self._repairs is not None and real:
            self._counts["repaired"] += await self._repairs.emit(real)

    def _judge(
        self,
        id_: str,
        states: tuple[Wanted, Wanted],
        found: Mapping[str, Any] | None,
        way: _Way,
        *,
        scanned: bool,
    ) -> Difference | None:
        before, after = states
        if _same(after, found) or _same(before, found):
            if after is not None and not scanned:
                self._counts["matched"] += 1
            return None
        if way.pending or not _unchanged(before, after):
            self._counts["in_flight"] += 1
            return None
        if after is None:
            return Difference("orphaned", id_, failed=way.failed, blocked=way.blocked)
        refused = after.reason if isinstance(after, Refused) else None
        if found is None:
            return Difference("missing", id_, failed=way.failed, refused=refused, blocked=way.blocked)
        fields = () if isinstance(after, Refused) else differing(after, found)
        return Difference("stale", id_, fields, way.failed, refused, way.blocked)

    def _keep(self, difference: Difference) -> None:
        self._counts[difference.kind] += 1
        self._counts["blocked"] += difference.blocked
        if self._counts[difference.kind] <= self._shown:
            self._examples.append(difference)

    async def _wanted(self, payloads: Mapping[str, Mapping[str, Any]]) -> dict[str, Wanted]:
        return {id_: await self._target.wanted(id_, payload) for id_, payload in payloads.items()}

    async def _found(self, ids: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        engine, index = self._target.engine, self._target.index
        await engine.refresh(index)
        found: dict[str, Mapping[str, Any]] = {}
        for start in range(0, len(ids), PAGE):
            found.update(await engine.get(index, ids[start : start + PAGE]))
        return found

    async def _ways(self, ids: Sequence[str]) -> Mapping[str, _Way]:
        target, rows = self._target, defaultdict[str, list[OfDocument]](list)
        for start in range(0, len(ids), PAGE):
            part = ids[start : start + PAGE]
            name = target.destination.name
            for row in await self._desk.undelivered.of_documents(name, target.aggregate_type, part):
                rows[row.document].append(row)
        return {id_: self._way(rows[id_]) for id_ in ids}

    def _way(self, rows: Sequence[OfDocument]) -> _Way:
        """What is for another index only neither helps this one nor harms it, unless it holds up its key."""
        destination = self._target.destination
        failed = max((row.id for row in rows if row.failed and self._is_for_us(row)), default=None)
        if destination.ordered and destination.on_failed == "block":
            blocking = max((row.id for row in rows if row.failed), default=None)
            if blocking is not None:
                return _Way(False, blocking, blocked=True)
        return _Way(any(not row.failed and self._is_for_us(row) for row in rows), failed)

    def _is_for_us(self, row: OfDocument) -> bool:
        return row.only_for in (None, self._target.index)


def _same(wanted: Wanted, found: Mapping[str, Any] | None) -> bool:
    if wanted is None or found is None:
        return wanted is None and found is None
    return not isinstance(wanted, Refused) and version_of(wanted) == version_of(found)


def _unchanged(before: Wanted, after: Wanted) -> bool:
    if isinstance(before, Refused) or isinstance(after, Refused):
        return before == after
    return _same(before, after)
