"""Emit an event for every existing document to one destination, next to the live events.

Each page is one transaction: it locks and reads rows, writes their events, and writes the position. A process
that dies leaves whole pages, and the next one resumes after the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from relaybox.core.event_loop import run
from relaybox.core.outcome import Unavailable
from relaybox.core.settings import Destination
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.emit.row import Call, RowBuilder
from relaybox.errors import ConfigError, EmitError, NoTables, PayloadError, StoreError
from relaybox.operate.pace import LOOK, Pace, never
from relaybox.operate.runner import Runner
from relaybox.search.change import INDEX_HEADER, Changes, changes_of, check_target, rereads
from relaybox.search.checkpoint import MARK, PAUSE, Cancelled, Checkpoint, Lost, Position
from relaybox.search.results import Backfilled, Progress, Refused
from relaybox.search.source import Item, Rows, Source, as_source, name_of
from relaybox.search.workspace import open_records, open_rows, wanted
from relaybox.stores.journal import OperationState

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

TRIES = 6

LISTED = 20
"""Refused documents to name; a dry run looks for no more."""

STOPPED = "it was interrupted; start it again, and it goes on where it was"
UNLOCKED = (
    "%s is an iterable, whose rows cannot be locked: documents that the application changes meanwhile"
    " may be overwritten with older ones; give a select or a QuerySet, or let the destination reread"
)

log = logging.getLogger("relaybox.backfill")


async def abackfill(
    outbox: Outbox,
    destination: str,
    source: Source,
    *,
    rate: float | None = None,
    batch: int = 500,
    max_pending: int | None = 10_000,
    index: str | None = None,
    dry_run: bool = False,
    resume: bool = True,
    progress: Callable[[Progress], None] | None = None,
    stop: Callable[[], bool] = never,
    actor: str = "application",
) -> Backfilled:
    """Emit an event for every document of the source, to this destination only.

    - ``rate``: at most this many events a second. ``batch``: documents in one transaction.
    - ``max_pending``: wait while more deliveries are pending for the destination; None never waits.
    - ``index``: the only index to write, for a search destination.
    - ``dry_run``: write nothing; count the documents, and check the first page.
    - ``resume``: go on with an interrupted backfill; False starts from the beginning.
    - ``stop`` is asked between pages; ``progress`` is called after each page.

    Documents that cannot become events are skipped, and named in the result. Raise ``ConfigError`` if the
    source or the destination is wrong, or another process runs the same backfill.
    """
    source, target = as_source(source), outbox.settings.destination(destination)
    if batch < 1:
        raise ConfigError(f"batch = {batch}: use 1 or more")
    pace = Pace(rate, stop)
    headers = {MARK: "true"} if index is None else {MARK: "true", INDEX_HEADER: index}
    async with open_rows(outbox, source) as rows:
        check_target(target, rows.event_type)
        async with open_records(outbox, actor) as records:
            checkpoint = Checkpoint(records.store, destination, name_of(source, rows), index, actor)
            work = _Work(RowBuilder(outbox.settings), rows, checkpoint, target, headers, progress)
            if dry_run:
                earlier = await checkpoint.run(checkpoint.earlier, persist=True)
                return await work.rehearse(earlier if resume else None, batch)
            if not rows.guarded and not rereads(target):
                log.warning(UNLOCKED, source.label)
            work.total = await _count(rows)
            work.position = await checkpoint.run(checkpoint.take, work.total, resume, persist=True)
            return await work.run(pace, batch, max_pending)


def backfill(outbox: Outbox, destination: str, source: Source, **options: Any) -> Backfilled:
    """Run ``abackfill`` from synchronous code."""
    return run(abackfill(outbox, destination, source, **options))


async def _count(rows: Rows) -> int | None:
    """Return the number of documents, or None if counting fails: it is only for progress."""
    try:
        return await rows.count()
    except NoTables:
        raise
    except StoreError as error:
        log.warning("the documents cannot be counted: %s", error)
        return None


@dataclass
class _Work:
    builder: RowBuilder
    rows: Rows
    checkpoint: Checkpoint
    target: Destination
    headers: dict[str, str]
    progress: Callable[[Progress], None] | None
    total: int | None = None
    position: Position = field(init=False)
    next: Position = field(init=False)
    """The position after the page that is being written."""
    page: Sequence[Item] = ()
    bad: dict[str, str] = field(default_factory=dict)
    """Documents of that page that cannot become events, and why."""
    refused: list[Refused] = field(default_factory=list)
    refusals: int = 0
    runner: Runner = field(init=False)

    async def rehearse(self, earlier: Position | None, size: int) -> Backfilled:
        """Count the documents, and check the first page after the ``earlier`` position."""
        done, skipped, after = 0, 0, None
        if earlier is not None and earlier.key is not None:
            done, skipped, after = earlier.done, earlier.skipped, earlier.key
        total = await self.rows.count()
        first: Sequence[Item] = ()
        counted = done + skipped
        async for page in self.rows.read(size, after):
            first = first or page
            counted += len(page)
            if total is not None:
                break
        changes = changes_of(self.target)
        with nullcontext() if changes is None else closing(changes):
            for item in first:
                self.refused += await self._refusal(item, changes)
                if len(self.refused) == LISTED:
                    break
        self.refusals = len(self.refused)
        example = self._call(first[0]) if first else None
        rehearsed = Backfilled(done, counted if total is None else total, skipped, after, example=example)
        return self._with_refused(rehearsed)

    async def _refusal(self, item: Item, changes: Changes | None) -> Sequence[Refused]:
        """Return why the item cannot become an event, or a document of a search destination."""
        try:
            self.builder.build(self._call(item), self.checkpoint.dialect)
            if changes is None:
                return []
            made = await wanted(changes, self.rows, self.target, item.id, item.payload)
        except PayloadError as error:
            return [Refused(item.id, str(error))]
        except Unavailable as error:
            return [Refused(item.id, str(error), at_destination=True)]
        return [made] if isinstance(made, Refused) else []

    async def run(self, pace: Pace, batch: int, max_pending: int | None) -> Backfilled:
        began_at = self.position.key
        if self.position.resumed:
            log.info("goes on after %r, with %s done", began_at, self.position.done)
        if self.position.resumed and began_at and not self.rows.guarded:
            log.warning(
                "passes over the first %s documents, which were emitted before: right only if the iterable"
                " gives the same ones in the same order; --restart (resume=False) begins again",
                f"{began_at:,}",
            )
        async with Runner(self.position.id, self, STOPPED) as self.runner:
            try:
                stopped = await self._pages(pace, batch, max_pending)
            except Cancelled:
                stopped = True
            if stopped:
                self.runner.end_as("cancelled", STOPPED)
        end = self.position
        return self._with_refused(Backfilled(end.done, self.total, end.skipped, began_at, stopped, end.id))

    def _with_refused(self, result: Backfilled) -> Backfilled:
        return replace(result, refused=tuple(self.refused), refusals=self.refusals, by_id=self.rows.guarded)

    async def _pages(self, pace: Pace, batch: int, max_pending: int | None) -> bool:
        """Emit pages; return True if stopped before the last one."""
        size = pace.size(batch)
        while await pace.turn(size):
            if not await self._room(pace, max_pending):
                return True
            if not await self._emit(size):
                return False
            self._tell()
        return True

    async def _emit(self, size: int) -> bool:
        """Emit the next page, if there is one; after an error, read the position from the database first."""
        for attempt in range(TRIES):
            self.runner.check()
            try:
                if attempt:
                    self.position = await self._look()
                return await self._try(size)
            except StoreError as error:
                if attempt == TRIES - 1:
                    raise
                log.warning("the database refused, and is asked again: %s", error)
                await asyncio.sleep(PAUSE * 2**attempt)
        raise AssertionError("unreachable")

    async def _try(self, size: int) -> bool:
        try:
            page = await self.rows.emit_after(self.position.key, size, self._calls, self._also)
        except EmitError:
            # Nothing of the page was written.
            if not self._find_bad():
                raise
            return await self._try(size)
        if page:
            self.position = self.next
            ids = {item.id for item in page}
            refused = [Refused(id_, reason) for id_, reason in self.bad.items() if id_ in ids]
            self.refusals += len(refused)
            self.refused += refused[: LISTED - len(self.refused)]
            self.bad.clear()
        return bool(page)

    def _also(self, statements: Statements, items: Sequence[Item]) -> Steps[Sequence[Item]]:
        """Choose the documents that get events, and write the next position, in the page's transaction."""
        position = self.position
        kept = [item for item in items if item.id not in self.bad]
        if not self.rows.guarded and kept:
            ids = [item.id for item in kept]
            changed = yield from self.checkpoint.changed(statements, position, self.rows.aggregate_type, ids)
            kept = [item for item in kept if item.id not in changed]
        details = {**position.details, "key": items[-1].key}
        done, skipped = position.done + len(kept), position.skipped + len(items) - len(kept)
        self.next = replace(position, details=details, done=done, skipped=skipped)
        yield from self.checkpoint.advance(statements, self.next)
        return kept

    def _calls(self, items: Sequence[Item]) -> Sequence[Call]:
        self.page = items
        return [self._call(item) for item in items]

    def _call(self, item: Item) -> Call:
        types = self.rows.aggregate_type, item.id, self.rows.event_type
        return Call(*types, item.payload, headers=self.headers, destinations=[self.target.name])

    def _find_bad(self) -> bool:
        """Find documents of the page that cannot become events; return True if any is new."""
        known = len(self.bad)
        for item in self.page:
            try:
                self.builder.build(self._call(item), self.checkpoint.dialect)
            except PayloadError as error:
                self.bad[item.id] = str(error)
        return len(self.bad) > known

    async def _room(self, pace: Pace, max_pending: int | None) -> bool:
        """Wait until few enough deliveries are pending; return False if stopped."""
        while max_pending is not None:
            try:
                pending = self.checkpoint.pending
                waiting = await self.checkpoint.run(pending, self.target.name, max_pending + 1)
            except StoreError as error:
                log.warning("the database does not say how much is pending: %s", error)
                return True
            if waiting <= max_pending:
                return True
            self._tell(waiting)
            await asyncio.sleep(LOOK)
            self.runner.check()
            if not await pace.turn(0):
                return False
        return True

    def _tell(self, waiting: int | None = None) -> None:
        if self.progress is not None:
            self.progress(Progress(self.position.done, self.position.skipped, self.total, waiting))

    async def advance(self, id_: UUID, done: int, skipped: int) -> bool:
        """Write a heartbeat; the pages write the progress."""
        try:
            await self._look()
        except Lost as lost:
            self.runner.stop(lost)
        return True

    async def finish(
        self, id_: UUID, state: OperationState, done: int, skipped: int, error: str | None = None
    ) -> None:
        """Record the end, if this process still owns the backfill."""
        await self.checkpoint.run(self.checkpoint.end, self.position, state, error)

    async def _look(self) -> Position:
        return await self.checkpoint.run(self.checkpoint.look, self.position)
