"""Compare a database with a search index, and repair differences through the outbox.

Read the database page by page and get those documents from the index. Then scan the ids of the index and ask
the database for them. Nothing is locked, so each difference is checked again: database, outbox, index,
database, in this order. If the outbox has nothing under way for a document, the index has everything
committed before. So the index is wrong if it differs from a row that was the same before and after.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from relaybox.core.event_loop import run
from relaybox.emit.row import Call, MarkedCall
from relaybox.errors import ConfigError
from relaybox.operate.admin import Progress, Stop, no_progress
from relaybox.operate.pace import Pace, never
from relaybox.search.change import INDEX_HEADER
from relaybox.search.engine import EngineFailed, pages, translated_errors
from relaybox.search.results import Difference, Kind, Reconciled, RefusedDocument
from relaybox.search.source import Item
from relaybox.search.workspace import Wanted, Workspace, open_workspace, wanted
from relaybox.stores.sql.undelivered import OfDocument

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

PAGE = 500
"""Documents to compare or repair at a time."""

MANY = 10_000
"""``PAGE`` for an iterable, which must be read as a whole to find any document."""

REPAIR = {"relaybox-repair": "reconcile"}

_EXACT = 2**53
"""Floats hold every integer below this; an engine that only knows floats rounds larger ones."""


async def areconcile(
    outbox: Outbox,
    destination: str,
    source: Any,
    *,
    index: str | None = None,
    repair: bool = False,
    allow_empty: bool = False,
    dry_run: bool = False,
    rate: float | None = None,
    examples: int = 20,
    actor: str = "application",
    progress: Progress = no_progress,
    stop: Stop = never,
) -> Reconciled:
    """Compare the documents of a source with the index of a destination.

    - ``repair``: emit an event with the current row for each difference, to this destination only.
    - ``rate``: at most this many events a second. ``dry_run``: as with ``repair``, but emit nothing.
    - ``index``: the index to compare, if the destination has several.
    - ``examples``: how many differences of each kind to list.
    - ``allow_empty``: allow a repair from a source without documents, which deletes the whole index. Without
      it such a repair raises ``ConfigError``.
    """
    pace = Pace(rate, stop)
    async with open_workspace(outbox, destination, source, index, actor) as workspace:
        emits = repair and not dry_run
        marks = {INDEX_HEADER: index} if index else {}
        comparison = Comparison(workspace, pace if emits else None, marks, examples, progress, stop)
        own, engine = workspace.index, workspace.engine
        with translated_errors(engine):
            if own not in await engine.present([own]):
                fix = "create it, or name another with --index"
                raise EngineFailed(f"the index {own!r} does not exist on {engine.where}: {fix}")
            result = await comparison.run(allow_empty=allow_empty or not repair)
        if emits:
            await workspace.records.admin.note("reconcile", result.figures())
    return result


def reconcile(outbox: Outbox, destination: str, source: Any, **options: Any) -> Reconciled:
    """Run ``areconcile`` from synchronous code."""
    return run(areconcile(outbox, destination, source, **options))


@dataclass(frozen=True, slots=True)
class _OutboxState:
    pending: bool = False
    failed: UUID | None = None
    blocked: bool = False


class Comparison:
    """One pass over a database and an index; with a ``pace`` it repairs by events with these ``marks``."""

    def __init__(
        self,
        workspace: Workspace,
        pace: Pace | None,
        marks: Mapping[str, str],
        examples: int,
        progress: Progress,
        stop: Stop,
    ) -> None:
        self._workspace = workspace
        self._pace = pace
        self._marks = marks
        self._examples = examples
        self._progress = progress
        self._stop = stop
        self._ids = None if workspace.rows.guarded else HashedIds()
        self._enough = 1 if workspace.rows.guarded else MANY
        self._counts: Counter[str] = Counter()
        self._listed: list[Difference] = []
        self._doubtful: list[str] = []
        self._scanning = False

    async def run(self, *, allow_empty: bool = True) -> Reconciled:
        """Compare both. Raise ``ConfigError`` if the source is empty and that is not allowed."""
        engine, index = self._workspace.engine, self._workspace.index
        await engine.refresh(index)
        read = await self._read()
        # A wrong query returns nothing, as if all rows were deleted.
        if read == 0 and not allow_empty and (count := await engine.count(index)):
            effect = f"to repair would delete all {count:,} of the index {index!r}"
            fix = "see its query, or say --yes (allow_empty=True) if that is meant"
            raise ConfigError(f"the source has no documents: {effect}; {fix}")
        stopped = read is None or not await self._scan()
        counts: dict[str, Any] = dict(self._counts)
        about = self._workspace.destination.name, index
        return Reconciled(*about, **counts, stopped=stopped, examples=tuple(self._listed))

    async def _read(self) -> int | None:
        """Read the database page by page; return the number of documents, or None if stopped."""
        read = 0
        async for page in self._workspace.rows.read(PAGE):
            if self._stop():
                return None
            read += len(page)
            payloads = {item.id: item.payload for item in page}
            if self._ids is not None:
                self._ids.update(payloads)
            await self._compare(payloads)
            self._progress(self._counts["documents"])
        await self._look_again(1)
        return read

    async def _compare(self, payloads: Mapping[str, Mapping[str, Any]]) -> None:
        documents = await self._wanted(payloads)
        found = await self._workspace.engine.get(self._workspace.index, list(documents))
        for id_, document in documents.items():
            if not _same(document, found.get(id_)):
                self._doubtful.append(id_)
            elif document is not None:
                self._counts.update(documents=1, matched=1)
        await self._look_again(self._enough)

    async def _scan(self) -> bool:
        """Read the ids of the index page by page; return False if stopped."""
        self._scanning = True
        async for page in self._workspace.engine.scan(self._workspace.index):
            if self._stop():
                return False
            for ids in pages(page, PAGE):
                known = await self._workspace.rows.existing(ids) if self._ids is None else self._ids
                self._doubtful += [id_ for id_ in ids if id_ not in known]
                await self._look_again(self._enough)
        await self._look_again(1)
        return True

    async def _look_again(self, enough: int) -> None:
        """Read doubtful documents again on both sides and judge them, once there are ``enough``."""
        if len(self._doubtful) < enough:
            return
        # An engine may return an id twice while others write to it.
        ids, self._doubtful = list(dict.fromkeys(self._doubtful)), []
        rows = self._workspace.rows
        before = await self._wanted(await rows.existing(ids))
        in_outbox = await self._outbox_states(ids)
        found = await self._found(ids)
        after = await self._wanted(await rows.existing(ids))
        states = [(id_, before.get(id_), after.get(id_), found.get(id_), in_outbox[id_]) for id_ in ids]
        differences = [one for state in states if (one := self._judge(*state)) is not None]
        for one in differences:
            self._counts[one.kind] += 1
            self._counts["blocked"] += one.blocked
            if self._counts[one.kind] <= self._examples:
                self._listed.append(one)
        if self._pace is not None:
            # An event of a refused document would fail, and one behind a failed event would wait.
            real = [one.id for one in differences if one.refused is None and not one.blocked]
            self._counts["repaired"] += await self._repair(real, self._pace)

    def _judge(
        self, id_: str, before: Wanted, after: Wanted, found: Mapping[str, Any] | None, state: _OutboxState
    ) -> Difference | None:
        """Return how the document differs; count it if the database is being read."""
        counted = after is not None and not self._scanning
        self._counts["documents"] += counted
        if _same(after, found) or _same(before, found):
            self._counts["matched"] += counted
            return None
        if state.pending or not _same(before, after):
            self._counts["in_flight"] += 1
            return None
        kind: Kind = "orphaned" if after is None else "missing" if found is None else "stale"
        fields = differing(after, found) if isinstance(after, Mapping) and found is not None else ()
        refused = after.reason if isinstance(after, RefusedDocument) else None
        return Difference(kind, id_, fields, state.failed, refused, state.blocked)

    async def _wanted(self, payloads: Mapping[str, Mapping[str, Any]]) -> dict[str, Wanted]:
        own = self._workspace.changes, self._workspace.rows, self._workspace.destination
        return {id_: await wanted(*own, id_, payload) for id_, payload in payloads.items()}

    async def _found(self, ids: Sequence[str]) -> dict[str, Mapping[str, Any]]:
        engine, index = self._workspace.engine, self._workspace.index
        await engine.refresh(index)
        found: dict[str, Mapping[str, Any]] = {}
        for part in pages(ids, PAGE):
            found.update(await engine.get(index, part))
        return found

    async def _outbox_states(self, ids: Sequence[str]) -> Mapping[str, _OutboxState]:
        of_documents = self._workspace.records.undelivered.of_documents
        name, aggregate_type = self._workspace.destination.name, self._workspace.rows.aggregate_type
        rows = defaultdict[str, list[OfDocument]](list)
        for part in pages(ids, PAGE):
            for row in await of_documents(name, aggregate_type, part):
                rows[row.document].append(row)
        return {id_: self._outbox_state(rows[id_]) for id_ in ids}

    def _outbox_state(self, rows: Sequence[OfDocument]) -> _OutboxState:
        """Ignore events for another index only, unless they block their key."""
        destination = self._workspace.destination
        if destination.ordered and destination.on_failed == "block":
            blocking = max((row.id for row in rows if row.failed), default=None)
            if blocking is not None:
                return _OutboxState(False, blocking, blocked=True)
        own = [row for row in rows if row.only_for in (None, self._workspace.index)]
        failed = max((row.id for row in own if row.failed), default=None)
        return _OutboxState(any(not row.failed for row in own), failed)

    async def _repair(self, ids: Sequence[str], pace: Pace) -> int:
        """Emit an event with each document's current state; return how many were emitted before a stop."""
        rows, emitted = self._workspace.rows, 0
        for part in pages(ids, pace.size(PAGE if rows.guarded else MANY)):
            if not await pace.turn(len(part)):
                break
            emitted += await rows.emit_ids(part, self._calls)
        return emitted

    def _calls(self, found: Sequence[Item], missing: Sequence[str]) -> list[Call]:
        workspace, rows = self._workspace, self._workspace.rows
        if missing:
            workspace.check_deletes()
        there = [(item.id, rows.event_type, item.payload) for item in found]
        gone = [(id_, workspace.deleted_type, {"id": id_}) for id_ in missing]
        marks, to = {**REPAIR, **self._marks}, (workspace.destination.name,)
        return [
            MarkedCall(rows.aggregate_type, *one, marks=marks, destinations=to) for one in (*there, *gone)
        ]


def _same(one: Wanted, other: Wanted) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return canonical_json(one) == canonical_json(other)
    return one == other


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields that differ."""
    one, other = ({name: canonical_json(side[name]) for name in side} for side in (expected, found))
    return tuple(sorted({name for name, _ in one.items() ^ other.items()}))


def canonical_json(value: Any) -> bytes:
    """Encode a value so that the order of keys, and 1 or 1.0, make no difference."""
    return msgspec.json.encode(_canonical(value), order="sorted")


def _canonical(value: Any) -> Any:
    """Return the value with numbers in the form that all engines agree on."""
    if isinstance(value, Mapping):
        return {str(name): _canonical(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, int) and abs(value) >= _EXACT:
        try:
            return float(value)
        except OverflowError:
            return str(value)
    return value


class HashedIds:
    """A set of ids that takes eight bytes for each; one in 2**64 is mistaken for another."""

    def __init__(self, part: int = 65_536) -> None:
        self._part = part
        self._parts: list[array[int]] = []
        self._newest: set[int] = set()

    def update(self, ids: Iterable[str]) -> None:
        """Add these ids."""
        self._newest.update(map(_hash, ids))
        if len(self._newest) >= self._part:
            self._parts.append(array("Q", sorted(self._newest)))
            self._newest = set()

    def __contains__(self, id_: str) -> bool:
        value = _hash(id_)
        places = ((part, bisect_left(part, value)) for part in self._parts)
        return value in self._newest or any(at < len(part) and part[at] == value for part, at in places)


def _hash(id_: str) -> int:
    return int.from_bytes(blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=8).digest())
