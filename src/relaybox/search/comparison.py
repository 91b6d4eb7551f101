"""One pass over a database and an index: what differs, what of that is only under way, and its repair.

Repairs are events that write again what differs, emitted through the outbox like all others.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any
from uuid import UUID

import msgspec

from relaybox.emit.row import Call
from relaybox.errors import ConfigError
from relaybox.operate.admin import Progress, Stop
from relaybox.operate.pace import Pace
from relaybox.search.results import Difference, Reconciled
from relaybox.search.rows import Item
from relaybox.search.workspace import Unwritable, Wanted, Workspace
from relaybox.stores.sql.undelivered import OfDocument

PAGE = 500
"""Documents that are compared, or repaired, at a time."""

MANY = 10_000
"""The same for an iterable: to ask it for some documents is to read all of them."""

REPAIR = {"relaybox-repair": "reconcile"}
"""The header by which an event that repairs is known."""

_EXACT = 2**53
"""Below it a float holds every whole number; an engine that knows only floats rounds larger ones."""

_ABSENT = object()


@dataclass(frozen=True, slots=True)
class _OutboxState:
    """What the outbox has of a document that was not delivered."""

    pending: bool = False
    failed: UUID | None = None
    blocked: bool = False


class Comparison:
    """Compares; see ``_reconcile.py`` for how it tells what is wrong from what is under way."""

    def __init__(
        self,
        workspace: Workspace,
        repairs: Repairs | None,
        examples: int,
        progress: Progress,
        stop: Stop,
    ) -> None:
        self._undelivered = workspace.records.undelivered
        self._rows = workspace.rows
        self._target = workspace.target
        self._repairs = repairs
        self._shown = examples
        self._progress = progress
        self._stop = stop
        self._counts: Counter[str] = Counter()
        self._examples: list[Difference] = []
        self._ids = None if self._rows.guarded else HashedIds()
        self._doubtful: list[str] = []
        self._any = False
        self._enough = 1 if self._rows.guarded else MANY

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
        in_outbox = await self._outbox_states(ids)
        found = await self._found(ids)
        after = await self._wanted(await self._rows.existing(ids))
        real: list[str] = []
        for id_ in ids:
            states = (before.get(id_), after.get(id_))
            if not scanned and states[1] is not None:
                self._counts["documents"] += 1
            difference = self._judge(id_, states, found.get(id_), in_outbox[id_], scanned=scanned)
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
        state: _OutboxState,
        *,
        scanned: bool,
    ) -> Difference | None:
        before, after = states
        if _same(after, found) or _same(before, found):
            if after is not None and not scanned:
                self._counts["matched"] += 1
            return None
        if state.pending or not _unchanged(before, after):
            self._counts["in_flight"] += 1
            return None
        if after is None:
            return Difference("orphaned", id_, failed=state.failed, blocked=state.blocked)
        refused = after.reason if isinstance(after, Unwritable) else None
        if found is None:
            return Difference("missing", id_, failed=state.failed, refused=refused, blocked=state.blocked)
        fields = () if isinstance(after, Unwritable) else differing(after, found)
        return Difference("stale", id_, fields, state.failed, refused, state.blocked)

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

    async def _outbox_states(self, ids: Sequence[str]) -> Mapping[str, _OutboxState]:
        target, rows = self._target, defaultdict[str, list[OfDocument]](list)
        for start in range(0, len(ids), PAGE):
            part = ids[start : start + PAGE]
            name = target.destination.name
            for row in await self._undelivered.of_documents(name, target.aggregate_type, part):
                rows[row.document].append(row)
        return {id_: self._outbox_state(rows[id_]) for id_ in ids}

    def _outbox_state(self, rows: Sequence[OfDocument]) -> _OutboxState:
        """What is for another index only neither helps this one nor harms it, unless it holds up its key."""
        destination = self._target.destination
        failed = max((row.id for row in rows if row.failed and self._is_for_us(row)), default=None)
        if destination.ordered and destination.on_failed == "block":
            blocking = max((row.id for row in rows if row.failed), default=None)
            if blocking is not None:
                return _OutboxState(False, blocking, blocked=True)
        return _OutboxState(any(not row.failed and self._is_for_us(row) for row in rows), failed)

    def _is_for_us(self, row: OfDocument) -> bool:
        return row.only_for in (None, self._target.index)


class Repairs:
    """Emits for one destination, at a pace; ``headers`` are on every event besides the one of repairs."""

    def __init__(self, workspace: Workspace, pace: Pace, headers: Mapping[str, str]) -> None:
        self._rows = workspace.rows
        self._target = workspace.target
        self._pace = pace
        self._headers = {**REPAIR, **headers}

    async def emit(self, ids: Sequence[str]) -> int:
        """An event for each, of what the database has of it then; how many were emitted before a stop."""
        size = self._pace.size(PAGE if self._rows.guarded else MANY)
        emitted = 0
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            if not await self._pace.turn(len(part)):
                break
            emitted += await self._rows.emit_ids(part, self._calls)
        return emitted

    def _calls(self, found: Sequence[Item], missing: Sequence[str]) -> list[Call]:
        if missing:
            self._target.check_deletes()
        there = [self._call(item.id, self._target.event_type, item.payload) for item in found]
        gone = [self._call(id_, self._target.deleted_type, {"id": id_}) for id_ in missing]
        return there + gone

    def _call(self, id_: str, event_type: str, payload: Mapping[str, object]) -> Call:
        target = self._target
        return Call(
            target.aggregate_type,
            id_,
            event_type,
            payload,
            headers=self._headers,
            destinations=(target.destination.name,),
        )


def _same(wanted: Wanted, found: Mapping[str, Any] | None) -> bool:
    if wanted is None or found is None:
        return wanted is None and found is None
    return not isinstance(wanted, Unwritable) and version_of(wanted) == version_of(found)


def _unchanged(before: Wanted, after: Wanted) -> bool:
    if isinstance(before, Unwritable) or isinstance(after, Unwritable):
        return before == after
    return _same(before, after)


def version_of(document: Mapping[str, Any]) -> bytes:
    """A hash of what it says: neither the order of its keys nor 1 or 1.0 makes a difference."""
    return blake2b(msgspec.json.encode(canonical(document), order="sorted"), digest_size=16).digest()


def canonical(value: Any) -> Any:
    """The value with every number in the one form that all engines agree on."""
    if isinstance(value, Mapping):
        return {str(name): canonical(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(one) for one in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT:
        return int(value)
    if isinstance(value, int) and abs(value) >= _EXACT:
        return _rounded(value)
    return value


def _rounded(value: int) -> float | str:
    try:
        return float(value)
    except OverflowError:
        return str(value)


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that are not the same in both, by name."""
    names = sorted(expected.keys() | found.keys())
    return tuple(name for name in names if _field(expected, name) != _field(found, name))


def _field(document: Mapping[str, Any], name: str) -> object:
    if name not in document:
        return _ABSENT
    return msgspec.json.encode(canonical(document[name]), order="sorted")


class HashedIds:
    """Which ids there are, in eight bytes each; one in 2**64 is taken for another."""

    def __init__(self, part: int = 65_536) -> None:
        self._part = part
        self._parts: list[array[int]] = []
        self._newest: set[int] = set()

    def add(self, id_: str) -> None:
        """Keep it."""
        self._newest.add(_hash(id_))
        if len(self._newest) >= self._part:
            self._parts.append(array("Q", sorted(self._newest)))
            self._newest = set()

    def __contains__(self, id_: str) -> bool:
        value = _hash(id_)
        return value in self._newest or any(_holds(part, value) for part in self._parts)


def _hash(id_: str) -> int:
    return int.from_bytes(blake2b(id_.encode("utf-8", "surrogatepass"), digest_size=8).digest())


def _holds(part: array[int], value: int) -> bool:
    at = bisect_left(part, value)
    return at < len(part) and part[at] == value
