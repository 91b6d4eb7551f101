"""Emit an event for every existing document to one destination, next to the live events.

Each page is one transaction: it locks and reads rows, writes their events, and writes the position. A process
that dies leaves whole pages, and the next one resumes after the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import UUID

from relaybox.core.event_loop import run
from relaybox.core.outcome import Unavailable
from relaybox.core.settings import Destination
from relaybox.database.dialects import Dialect
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.emit.row import Call, MarkedCall, RowBuilder
from relaybox.errors import ConfigError, EmitError, NoTables, PayloadError, StoreError
from relaybox.operate.pace import LOOK, Pace, never
from relaybox.operate.runner import Runner
from relaybox.search.change import INDEX_HEADER, Changes, changes_of, check_target, rereads
from relaybox.search.checkpoint import MARK, PAUSE, Cancelled, Checkpoint, Lost, Position
from relaybox.search.results import Backfilled, Progress, RefusedDocument
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
    marks = {MARK: "true"} if index is None else {MARK: "true", INDEX_HEADER: index}
    async with open_rows(outbox, source) as rows:
        check_target(target, rows.event_type)
        async with open_records(outbox, actor) as records:
            checkpoint = Checkpoint(records.store, destination, name_of(source, rows), index, actor)
            events = _Events(outbox, rows, target, marks, checkpoint.dialect)
            if dry_run:
                earlier = await checkpoint.run(checkpoint.earlier, persist=True)
                return await _rehearse(events, earlier if resume else None, batch)
            if not rows.guarded and not rereads(target):
                log.warning(UNLOCKED, source.label)
            total = await _count(rows)
            position = await checkpoint.run(checkpoint.take, total, resume, persist=True)
            return await _Pages(events, checkpoint, position, total, progress).run(pace, batch, max_pending)


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


class _Events:
    """Makes the events of a source's documents for one destination."""

    def __init__(
        self, outbox: Outbox, rows: Rows, target: Destination, marks: Mapping[str, str], dialect: Dialect
    ) -> None:
        self.rows = rows
        self.target = target
        self._builder = RowBuilder(outbox.settings)
        self._marks = marks
        self._dialect = dialect

    def call(self, item: Item) -> Call:
        """Return the event of a document."""
        types = self.rows.aggregate_type, item.id, self.rows.event_type
        return MarkedCall(*types, item.payload, marks=self._marks, destinations=[self.target.name])

    def problem(self, item: Item) -> str | None:
        """Return why a document cannot become an event, or None."""
        try:
            self._builder.build(self.call(item), self._dialect)
        except PayloadError as error:
            return str(error)
        return None

    async def refusal(self, item: Item, changes: Changes | None) -> RefusedDocument | None:
        """Return why a document cannot become an event, or a document of a search destination."""
        if (problem := self.problem(item)) is not None:
            return RefusedDocument(item.id, problem)
        if changes is None:
            return None
        try:
            made = await wanted(changes, self.rows, self.target, item.id, item.payload)
        except Unavailable as error:
            return RefusedDocument(item.id, str(error), at_destination=True)
        return made if isinstance(made, RefusedDocument) else None


async def _rehearse(events: _Events, earlier: Position | None, size: int) -> Backfilled:
    """Count the documents, and check the first page after the ``earlier`` position."""
    rows, done, skipped, after = events.rows, 0, 0, None
    if earlier is not None and earlier.key is not None:
        done, skipped, after = earlier.done, earlier.skipped, earlier.key
    total = await rows.count()
    first: Sequence[Item] = ()
    counted = done + skipped
    async for page in rows.read(size, after):
        first = first or page
        counted += len(page)
        if total is not None:
            break
    refused: list[RefusedDocument] = []
    changes = changes_of(events.target)
    with nullcontext() if changes is None else closing(changes):
        for item in first:
            if (refusal := await events.refusal(item, changes)) is not None:
                refused.append(refusal)
            if len(refused) == LISTED:
                break
    return Backfilled(
        done,
        counted if total is None else total,
        skipped,
        after,
        refused=tuple(refused),
        refusals=len(refused),
        example=events.call(first[0]) if first else None,
        by_id=rows.guarded,
    )


class _Pages:
    """Emits the pages of a source, from a position on."""

    def __init__(
        self,
        events: _Events,
        checkpoint: Checkpoint,
        position: Position,
        total: int | None,
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self._events = events
        self._rows = events.rows
        self._checkpoint = checkpoint
        self._position = position
        self._next = position
        """The position after the page that is being written."""
        self._total = total
        self._progress = progress
        self._page: Sequence[Item] = ()
        self._bad: dict[str, str] = {}
        """Documents of that page that cannot become events, and why."""
        self._refused: list[RefusedDocument] = []
        self._refusals = 0

    async def run(self, pace: Pace, batch: int, max_pending: int | None) -> Backfilled:
        began_at = self._position.key
        if self._position.resumed:
            log.info("goes on after %r, with %s done", began_at, self._position.done)
        if self._position.resumed and began_at and not self._rows.guarded:
            log.warning(
                "passes over the first %s documents, which were emitted before: right only if the iterable"
                " gives the same ones in the same order; --restart (resume=False) begins again",
                f"{began_at:,}",
            )
        async with Runner(self._position.id, self, STOPPED) as self._runner:
            try:
                stopped = await self._pages(pace, batch, max_pending)
            except Cancelled:
                stopped = True
            if stopped:
                self._runner.end_as("cancelled", STOPPED)
        end = self._position
        return Backfilled(
            end.done,
            self._total,
            end.skipped,
            began_at,
            stopped,
            end.id,
            refused=tuple(self._refused),
            refusals=self._refusals,
            by_id=self._rows.guarded,
        )

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
            self._runner.check()
            try:
                if attempt:
                    self._position = await self._look()
                return await self._try(size)
            except StoreError as error:
                if attempt == TRIES - 1:
                    raise
                log.warning("the database refused, and is asked again: %s", error)
                await asyncio.sleep(PAUSE * 2**attempt)
        raise AssertionError("unreachable")

    async def _try(self, size: int) -> bool:
        try:
            page = await self._rows.emit_after(self._position.key, size, self._calls, self._also)
        except EmitError:
            # Nothing of the page was written.
            if not self._find_bad():
                raise
            return await self._try(size)
        if page:
            self._position = self._next
            ids = {item.id for item in page}
            refused = [RefusedDocument(id_, reason) for id_, reason in self._bad.items() if id_ in ids]
            self._refusals += len(refused)
            self._refused += refused[: LISTED - len(self._refused)]
            self._bad.clear()
        return bool(page)

    def _also(self, statements: Statements, items: Sequence[Item]) -> Steps[Sequence[Item]]:
        """Choose the documents that get events, and write the next position, in the page's transaction."""
        position = self._position
        kept = [item for item in items if item.id not in self._bad]
        if not self._rows.guarded and kept:
            ids = [item.id for item in kept]
            changed = yield from self._checkpoint.changed(
                statements, position, self._rows.aggregate_type, ids
            )
            kept = [item for item in kept if item.id not in changed]
        details = {**position.details, "key": items[-1].key}
        done, skipped = position.done + len(kept), position.skipped + len(items) - len(kept)
        self._next = replace(position, details=details, done=done, skipped=skipped)
        yield from self._checkpoint.advance(statements, self._next)
        return kept

    def _calls(self, items: Sequence[Item]) -> Sequence[Call]:
        self._page = items
        return [self._events.call(item) for item in items]

    def _find_bad(self) -> bool:
        """Find documents of the page that cannot become events; return True if any is new."""
        known = len(self._bad)
        for item in self._page:
            if (problem := self._events.problem(item)) is not None:
                self._bad[item.id] = problem
        return len(self._bad) > known

    async def _room(self, pace: Pace, max_pending: int | None) -> bool:
        """Wait until few enough deliveries are pending; return False if stopped."""
        while max_pending is not None:
            try:
                pending = self._checkpoint.pending
                waiting = await self._checkpoint.run(pending, self._events.target.name, max_pending + 1)
            except StoreError as error:
                log.warning("the database does not say how much is pending: %s", error)
                return True
            if waiting <= max_pending:
                return True
            self._tell(waiting)
            await asyncio.sleep(LOOK)
            self._runner.check()
            if not await pace.turn(0):
                return False
        return True

    def _tell(self, waiting: int | None = None) -> None:
        if self._progress is not None:
            self._progress(Progress(self._position.done, self._position.skipped, self._total, waiting))

    async def advance(self, id_: UUID, done: int, skipped: int) -> bool:
        """Write a heartbeat; the pages write the progress."""
        try:
            await self._look()
        except Lost as lost:
            self._runner.stop(lost)
        return True

    async def finish(
        self, id_: UUID, state: OperationState, done: int, skipped: int, error: str | None = None
    ) -> None:
        """Record the end, if this process still owns the backfill."""
        await self._checkpoint.run(self._checkpoint.end, self._position, state, error)

    async def _look(self) -> Position:
        return await self._checkpoint.run(self._checkpoint.look, self._position)
