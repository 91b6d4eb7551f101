"""The steps of a reindex: build an index beside the one that serves, and let it take its place.

While ``NAME__building`` exists every sink writes to both, from ``LOOK`` seconds after its creation on. What
was sent before then was committed before the database is read. So the new index is complete when the events
of the backfill have arrived: what changes in the meantime arrives at both. It is compared with the database
all the same, and only one without a difference takes the place of the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from relaybox.core.commands import command
from relaybox.core.settings import Destination
from relaybox.errors import RelayboxError, StoreError
from relaybox.operate.admin import Named, no_progress
from relaybox.operate.pace import Pace, never
from relaybox.search._backfill import abackfill
from relaybox.search.build_watch import NAMED, POLL, BuildWatch, Tell
from relaybox.search.change import BUILDING, INDEX_HEADER
from relaybox.search.comparison import Comparison, Repairs
from relaybox.search.engine import TROUBLE, Engine
from relaybox.search.indexes import LOOK
from relaybox.search.reindex_operation import BEAT, ReindexFailed, Running, beat, guarded
from relaybox.search.results import Difference, Progress, Reconciled
from relaybox.search.source import Source
from relaybox.search.workspace import OutboxRecords, Workspace

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

ROUNDS = 5
"""How often differences are repaired before it is given up."""

CLEANING = 30.0
"""Seconds for which it is tried to clear away what a build leaves behind."""

DISCARDED = 500
"""Events that are discarded at a time."""

SENDING = 30.0
"""Seconds beyond the destination's timeout for which events that are being sent are waited for."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class How:
    """How a build is done: by whom, documents a second and at a time, and seconds without progress.

    ``like`` is the index whose settings the new one gets, where it is not the old one.
    """

    actor: str
    rate: float | None
    batch: int
    patience: float
    like: str | None = None


class Build:
    """One build, for the index of ``target``."""

    def __init__(self, outbox: Outbox, source: Source, workspace: Workspace, how: How, tell: Tell) -> None:
        self._outbox = outbox
        self._source = source
        target = workspace.target
        self._records = workspace.records
        self._live = target.index
        self._target = replace(target, index=f"{target.index}{BUILDING}")
        self._workspace = workspace._replace(target=self._target)
        self._engine = target.engine
        self._how = how
        self._tell = tell
        self._identity: str | None = None
        self._creating = False
        self._leftovers = Leftovers(
            self._records, target.destination, target.engine, self._target.index, tell
        )

    async def run(self, running: Running) -> int:
        """Build and replace; how many documents the index has then. Raises ``ReindexFailed``."""
        try:
            await guarded(self._begin(), beat(self._records, running))
            assert self._identity is not None
            watch = BuildWatch(self._records, self._target, self._identity, self._how.patience, self._tell)
            return await self._build(running, watch)
        except BaseException:
            await self.clean_up()
            raise

    async def _build(self, running: Running, watch: BuildWatch) -> int:
        try:
            await guarded(self._fill(running, watch), beat(self._records, running), watch.run())
            return await self._swap(running, watch)
        except TROUBLE:
            # An index that was dropped this moment has a reason that says more.
            await watch.check_index()
            raise
        except ReindexFailed:
            raise
        except RelayboxError as error:
            raise ReindexFailed(str(error)) from error

    async def _begin(self) -> None:
        like = self._how.like or self._live
        await check_present(self._engine, self._live, like)
        await self._leftovers.clear()
        self._tell(f"creating {self._target.index}")
        self._creating = True
        await self._engine.create(self._target.index, like=like)
        self._identity = (await self._engine.present([self._target.index])).get(self._target.index)
        if self._identity is None:
            raise ReindexFailed(f"{self._target.index!r} was created, and is gone")

    async def _fill(self, running: Running, watch: BuildWatch) -> None:
        # Twice: from half of it on every send that begins writes to both.
        await asyncio.sleep(2 * LOOK)
        self._tell("reading the database")

        def progress(far: Progress) -> None:
            running.done = far.done
            watch.backlog = far.waiting

        filled = await abackfill(
            self._outbox,
            self._target.destination.name,
            self._source,
            rate=self._how.rate,
            batch=self._how.batch,
            index=self._target.index,
            resume=False,
            progress=progress,
            actor=self._how.actor,
        )
        running.done, watch.backlog = filled.done, None
        if filled.stopped:
            raise ReindexFailed("its backfill was cancelled")
        if filled.refusals:
            reasons = "; ".join(f"document {one.id}: {one.reason}" for one in filled.refused[:NAMED])
            raise ReindexFailed(f"{filled.refusals:,} of the documents cannot be events: {reasons}")
        self._tell(f"{filled.done:,} documents emitted")
        await self._arrive(watch)
        await self._settle_differences(running, watch)

    async def _arrive(self, watch: BuildWatch) -> None:
        """Wait until every event of the build has arrived."""
        told_at = time.monotonic()
        while pending := await self._pending(watch):
            if time.monotonic() - told_at > 5.0:
                self._tell(f"{pending:,} events on their way")
                told_at = time.monotonic()
            await asyncio.sleep(POLL)
        await watch.check_failed()

    async def _pending(self, watch: BuildWatch) -> int:
        """How many have not; a database that is away for long is the business of who gives signs of life."""
        while True:
            try:
                return await watch.pending()
            except StoreError as error:
                log.warning("the database does not say how much is pending: %s", error)
            await asyncio.sleep(POLL)

    async def _settle_differences(self, running: Running, watch: BuildWatch) -> None:
        """Compare, and have repaired what differs, until nothing does."""
        give_up = time.monotonic() + self._how.patience
        rounds = 0
        while True:
            self._tell(f"comparing {self._target.index} with the database")
            try:
                result = await self._compare()
            except (*TROUBLE, StoreError):
                # It may be back in a moment.
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(LOOK)
                continue
            if not result.differences:
                return
            rounds += 1
            running.repaired += result.repaired
            if rounds > ROUNDS or not result.repaired:
                examples = "; ".join(map(_told, result.examples[:NAMED]))
                raise ReindexFailed(f"{result.differences:,} documents differ still: {examples}")
            self._tell(f"{result.repaired:,} documents repaired")
            await self._arrive(watch)

    async def _compare(self) -> Reconciled:
        headers = {INDEX_HEADER: self._target.index}
        repairs = Repairs(self._workspace, Pace(self._how.rate, never), headers)
        return await Comparison(self._workspace, repairs, NAMED, no_progress, never).run()

    async def _swap(self, running: Running, watch: BuildWatch) -> int:
        built = await guarded(self._check(running, watch), beat(self._records, running))
        self._tell(f"{self._target.index} takes the place of {self._live}")
        replacing = asyncio.ensure_future(guarded(self._replace(), _beat_on(self._records, running)))
        try:
            await asyncio.shield(replacing)
        except asyncio.CancelledError:
            # Half of it is worse than none or all.
            await asyncio.wait([replacing])
            raise
        self._creating = False
        try:
            await guarded(self._leftovers.sweep(), _beat_on(self._records, running))
        except (*TROUBLE, StoreError) as error:
            self._warn(error)
        return built

    async def _check(self, running: Running, watch: BuildWatch) -> int:
        """Whether it may take the place of the other; how many documents it has."""
        built = await self._engine.count(self._target.index)
        if not built and await self._engine.count(self._live):
            raise ReindexFailed(f"the source has no documents, and {self._live!r} has: see its query")
        if not await self._records.admin.journal.advance(running.id, running.done, running.repaired):
            raise ReindexFailed("it was cancelled")
        await watch.check_index(strict=True)
        return built

    async def _replace(self) -> None:
        try:
            await self._engine.replace(self._live, self._target.index)
        except TROUBLE as error:
            # It may serve all the same, and only the old one be left.
            if (await self._engine.present([self._live])).get(self._live) != self._identity:
                raise
            log.warning("%r serves, but its engine is in trouble: %s", self._live, error)

    async def clean_up(self) -> None:
        """After a failure: drop what was built, unless it is not ours."""
        try:
            async with asyncio.timeout(CLEANING):
                if not self._creating or await self._drop_own():
                    await self._leftovers.discard()
        except Exception as error:
            self._warn(error)

    async def _drop_own(self) -> bool:
        """Drop it; not where another reindex has one of that name, and events for it, by now."""
        name = self._target.index
        identity = (await self._engine.present([name])).get(name)
        if identity is not None and self._identity not in (None, identity):
            return False
        if identity is not None:
            self._tell(f"dropping {name}; {self._live} goes on serving")
        # Also where it is not seen: its creation may be under way.
        await self._engine.drop(name)
        return True

    def _warn(self, error: Exception) -> None:
        fix = command(f"reindex --destination {self._target.destination.name} --abort")
        reason = str(error) or type(error).__name__
        log.warning("%r may be left behind (%s): %s clears it away", self._target.index, reason, fix)


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What builds leave behind that were not ended: the index ``index``, and its events."""

    records: OutboxRecords
    destination: Destination
    engine: Engine
    index: str
    tell: Tell

    async def look(self) -> None:
        """Tell what would be taken away."""
        if self.index in await self.engine.present([self.index]):
            self.tell(f"would drop {self.index}")
        rows = await self.records.undelivered.open_for(self.destination.name, self.index, DISCARDED + 1)
        if rows:
            many = f"{len(rows):,}" if len(rows) <= DISCARDED else f"more than {DISCARDED:,}"
            self.tell(f"would discard {many} events for {self.index}")

    async def clear(self) -> None:
        """Take all of it away. Whoever has seen the index may write to it once more, and so create it."""
        left = self.index in await self.engine.present([self.index])
        if left:
            self.tell(f"dropping {self.index}, which was left behind")
        # One that nobody is to write to may be there all the same.
        await self.engine.drop(self.index)
        if await self.discard() or left:
            await self.sweep()

    async def sweep(self) -> None:
        """Wait until nobody writes to an index that is no more, and drop what was created by that."""
        dropped_at = time.monotonic()
        await asyncio.sleep(2 * LOOK)
        give_up = dropped_at + 2 * LOOK + self.destination.timeout
        while time.monotonic() < give_up:
            ago = time.monotonic() - dropped_at - LOOK
            if not await self.records.undelivered.sent_before(self.destination.name, ago):
                break
            await asyncio.sleep(POLL)
        await self.engine.drop(self.index)

    async def discard(self) -> int:
        """Give up the events of a build; those that are being sent are waited for."""
        name, discarded = self.destination.name, 0
        give_up = time.monotonic() + SENDING + self.destination.timeout
        while rows := await self.records.undelivered.open_for(name, self.index, DISCARDED):
            done = await self.records.admin.discard(Named([row.id for row in rows], exact=True))
            discarded += done.affected
            if not done.affected:
                if time.monotonic() > give_up:
                    raise ReindexFailed(f"events of an earlier build of {self.index!r} are still being sent")
                await asyncio.sleep(POLL)
        return discarded


async def check_present(engine: Engine, live: str, like: str) -> None:
    """Raise ``ReindexFailed`` where there is no index to replace, or none whose settings are to be taken."""
    present = await engine.present([live, like])
    if like not in present and live in present:
        raise ReindexFailed(f"like = {like!r}: there is no such index on {engine.where}; create it")
    if live not in present:
        fix = f"create it, or fill it with {command('backfill')}"
        raise ReindexFailed(
            f"the index {live!r} does not exist on {engine.where}, so there is nothing to replace: {fix}"
        )


def _told(one: Difference) -> str:
    behind = f", behind a failed event: see {command(f'why {one.failed}')}" if one.blocked else ""
    return f"{one.id} is {one.kind}{': ' + one.refused if one.refused else ''}{behind}"


async def _beat_on(records: OutboxRecords, running: Running) -> None:
    """Signs of life, whatever anybody says: nothing can be given up any more."""
    while True:
        try:
            await beat(records, running)
        except ReindexFailed:
            await asyncio.sleep(BEAT)
