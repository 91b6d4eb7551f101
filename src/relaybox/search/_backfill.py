"""Backfill: an event of every document that there is, to one destination, beside the live ones.

Each page is one transaction: its rows are read and locked, their events written, and how far it is. A process
that dies leaves whole pages behind, and the next one goes on after the last.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from relaybox.core.event_loop import run
from relaybox.core.settings import Destination
from relaybox.database.dialects import Dialect
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.emit.row import Call, RowBuilder
from relaybox.errors import ConfigError, EmitError, NoTables, PayloadError, StoreError
from relaybox.operate.pace import LOOK, Pace, never
from relaybox.search.change import INDEX_HEADER, check_target, rereads
from relaybox.search.checkpoint import MARK, Cancelled, Checkpoint, Lost, Position
from relaybox.search.dry_run import rehearse
from relaybox.search.results import Backfilled, Progress, Refused
from relaybox.search.rows import Item, Rows, name_of, open_rows
from relaybox.search.source import Source, as_source
from relaybox.search.workspace import destination_of
from relaybox.stores.journal import OperationState
from relaybox.stores.open import open_store

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

BEAT = 1.0
"""Seconds between two signs of life."""

TRIES = 6
PAUSE = 0.5
"""Seconds after the first of several failures of the database, and twice as many after each other."""

LISTED = 20
"""Documents that were refused and are named."""

STOPPED = "it was interrupted; start it again, and it goes on where it was"

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
    """Emit an event of every document of the source, to this destination alone.

    - ``rate``: no more than so many a second. ``batch``: so many in one transaction.
    - ``max_pending``: wait while more deliveries than that wait at the destination; None: never.
    - ``index``: for a search destination, the one index that is written to.
    - ``resume``: go on with one that was interrupted; False begins anew.
    - ``stop`` is asked between two pages; ``progress`` is told after each.

    A document that cannot be an event is passed over, and named in what comes back. Raises ``ConfigError``
    where the source or the destination is wrong, or another process is at the same backfill.
    """
    source, target = as_source(source), destination_of(outbox, destination)
    if batch < 1:
        raise ConfigError(f"batch = {batch}: use 1 or more")
    pace = Pace(rate, stop)
    async with open_rows(outbox, source) as rows:
        check_target(target, rows.event_type)
        store = open_store(outbox.settings.database, outbox.tables)
        try:
            checkpoint = Checkpoint(store, destination, name_of(source, rows), index, actor)
            if dry_run:
                make = partial(call_of, rows, destination=destination, headers=_headers(index))
                earlier = await checkpoint.earlier()
                return await rehearse(outbox, rows, target, make, earlier if resume else None, batch)
            _warn(rows, source, target)
            total = await _count(rows)
            position = await checkpoint.take(total, resume=resume)
            builder, notify = RowBuilder(outbox.settings), progress or _ignore
            work = _Work(builder, rows, checkpoint, position, target, _headers(index), total, notify)
            return await work.run(pace, batch, max_pending)
        finally:
            await store.close()


def backfill(outbox: Outbox, destination: str, source: Source, **options: Any) -> Backfilled:
    """``abackfill``, from synchronous code."""
    return run(abackfill(outbox, destination, source, **options))


@dataclass
class _Work:
    """A backfill that is under way."""

    builder: RowBuilder
    rows: Rows
    checkpoint: Checkpoint
    position: Position
    target: Destination
    headers: dict[str, str]
    total: int | None
    progress: Callable[[Progress], None]
    page: Sequence[Item] = ()
    dialect: Dialect | None = None
    bad: dict[str, str] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    refusals: int = 0
    lost: Lost | None = None

    def __post_init__(self) -> None:
        self.began_at = self.position.key
        self.next = self.position

    async def run(self, pace: Pace, batch: int, max_pending: int | None) -> Backfilled:
        """Go through all pages, and put on record how it ended."""
        if self.position.resumed:
            log.info("goes on after %r, with %s done", self.position.key, self.position.done)
        if self.position.resumed and self.position.key and not self.rows.guarded:
            log.warning(
                "passes over the first %s documents, which were emitted before: right only if the iterable"
                " gives the same ones in the same order; --restart (resume=False) begins anew",
                f"{self.position.key:,}",
            )
        try:
            async with self._alive():
                stopped = await self._pages(pace, batch, max_pending)
        except Cancelled:
            stopped = True
        except Lost:
            raise
        except asyncio.CancelledError:
            # The first of its class ends what is awaited; this may still take a moment.
            await asyncio.shield(self._end("cancelled", STOPPED))
            raise
        except BaseException as error:
            await self._end("failed", str(error) or type(error).__name__)
            raise
        await self._end(*(("cancelled", STOPPED) if stopped else ("done", None)))
        return self._result(stopped)

    async def _pages(self, pace: Pace, batch: int, max_pending: int | None) -> bool:
        """Until there are no more, or it is to stop: which of the two."""
        size = pace.size(batch)
        while await pace.turn(size):
            if not await self._room(pace, max_pending):
                return True
            if not await self._emit(size):
                return False
            self._tell()
        return True

    async def _emit(self, size: int) -> bool:
        """One page; whether there was one. After an error it is the database that says how far it is."""
        for attempt in range(TRIES):
            if self.lost is not None:
                raise self.lost
            try:
                if attempt:
                    self.position = await self.checkpoint.look(self.position)
                return await self._try(size)
            except StoreError as error:
                if attempt == TRIES - 1:
                    raise
                log.warning("the database refused, and is asked again: %s", error)
                await asyncio.sleep(PAUSE * 2**attempt)
        raise AssertionError("unreachable")

    async def _try(self, size: int) -> bool:
        while True:
            try:
                page = await self.rows.emit_after(self.position.key, size, self._calls, self._also)
                break
            except EmitError:
                # Nothing of the page was written.
                if not self._find_bad():
                    raise
        if page:
            self.position = self.next
            self._note_refused(page)
        return bool(page)

    def _also(self, statements: Statements, items: Sequence[Item]) -> Steps[Sequence[Item]]:
        """In the page's transaction: which of its documents get events, and how far it is then."""
        self.dialect = statements.dialect
        kept = [item for item in items if item.id not in self.bad]
        if not self.rows.guarded and kept:
            ids = [item.id for item in kept]
            changed = yield from self.checkpoint.changed(
                statements, self.position, self.rows.aggregate_type, ids
            )
            kept = [item for item in kept if item.id not in changed]
        position = self.position
        self.next = replace(
            position,
            details={**position.details, "key": items[-1].key},
            done=position.done + len(kept),
            skipped=position.skipped + len(items) - len(kept),
        )
        yield from self.checkpoint.advance(statements, self.next)
        return kept

    def _calls(self, items: Sequence[Item]) -> Sequence[Call]:
        self.page = items
        return [call_of(self.rows, item, self.target.name, self.headers) for item in items]

    def _find_bad(self) -> bool:
        """Look which documents of the page are refused; whether any is that was not known to be."""
        if self.dialect is None:
            # The first page could not even be read.
            return False
        found = False
        for item in self.page:
            try:
                self.builder.build(call_of(self.rows, item, self.target.name, self.headers), self.dialect)
            except PayloadError as error:
                self.bad[item.id] = str(error)
                found = True
        return found

    def _note_refused(self, page: Sequence[Item]) -> None:
        for item in page:
            if (reason := self.bad.pop(item.id, None)) is not None:
                self.refusals += 1
                if len(self.refused) < LISTED:
                    self.refused.append(Refused(item.id, reason))
        self.bad.clear()

    async def _room(self, pace: Pace, max_pending: int | None) -> bool:
        """Wait until few enough deliveries wait at the destination; whether to go on."""
        if max_pending is None:
            return True
        while (waiting := await self._waiting(max_pending + 1)) > max_pending:
            self._tell(waiting)
            await asyncio.sleep(LOOK)
            if self.lost is not None:
                raise self.lost
            if not await pace.turn(0):
                return False
        return True

    async def _waiting(self, limit: int) -> int:
        try:
            return await self.checkpoint.pending(self.target.name, limit)
        except StoreError as error:
            log.warning("the database does not say how much is pending: %s", error)
            return 0

    def _tell(self, waiting: int | None = None) -> None:
        self.progress(Progress(self.position.done, self.position.skipped, self.total, waiting))

    @asynccontextmanager
    async def _alive(self) -> AsyncIterator[None]:
        """Give signs of life, and learn whether somebody cancelled it."""
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            with suppress(asyncio.CancelledError):
                await beating

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT)
            try:
                await self.checkpoint.look(self.position)
            except Lost as lost:
                self.lost = lost
                return
            except StoreError as error:
                log.warning("the backfill cannot give a sign of life: %s", error)

    async def _end(self, state: OperationState, error: str | None) -> None:
        try:
            await self.checkpoint.end(self.position, state, error)
        except StoreError as trouble:
            # It will show as stalled, and can be gone on with all the same.
            log.warning("the backfill cannot say how it ended: %s", trouble)

    def _result(self, stopped: bool) -> Backfilled:
        position = self.position
        return Backfilled(
            position.done,
            self.total,
            position.skipped,
            self.began_at,
            stopped,
            position.id,
            tuple(self.refused),
            self.refusals,
            by_id=self.rows.guarded,
        )


def call_of(rows: Rows, item: Item, destination: str, headers: dict[str, str]) -> Call:
    """The event of a document."""
    return Call(
        rows.aggregate_type,
        item.id,
        rows.event_type,
        item.payload,
        headers=headers,
        destinations=[destination],
    )


async def _count(rows: Rows) -> int | None:
    """How many documents there are, for those who watch: a table may be too large to be counted in time."""
    try:
        return await rows.count()
    except NoTables:
        raise
    except StoreError as error:
        log.warning("the documents cannot be counted: %s", error)
        return None


def _headers(index: str | None) -> dict[str, str]:
    return {MARK: "true"} if index is None else {MARK: "true", INDEX_HEADER: index}


def _warn(rows: Rows, source: Source, target: Destination) -> None:
    if not rows.guarded and not rereads(target):
        log.warning(
            "%s is an iterable, whose rows cannot be locked: documents that the application changes meanwhile"
            " may be overwritten with older ones; give a select or a QuerySet, or let the destination reread",
            source.told,
        )


def _ignore(progress: Progress) -> None:
    """For callers that do not ask."""
