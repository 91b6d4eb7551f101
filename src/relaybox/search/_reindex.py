"""Rebuild a search index while the old one serves, then replace the old one.

While ``NAME__building`` exists, every send that starts ``LOOK`` seconds after its creation writes to both.
Changes that were sent earlier were committed before the database is read. So the new index is complete when
the events of the backfill have arrived. It is compared with the database even so, and replaces the old one
only if nothing differs.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from relaybox.core.commands import command
from relaybox.core.event_loop import run
from relaybox.errors import RelayboxError, StoreError
from relaybox.operate.admin import no_progress
from relaybox.operate.pace import Pace, never
from relaybox.operate.runner import Runner, to_its_end
from relaybox.search._backfill import abackfill
from relaybox.search._reconcile import Comparison
from relaybox.search.change import BUILDING, INDEX_HEADER, index_of
from relaybox.search.engine import TROUBLE, Engine, open_engine, translated_errors
from relaybox.search.indexes import LOOK
from relaybox.search.reindex_operation import (
    NAMED,
    POLL,
    BuildWatch,
    Leftovers,
    ReindexFailed,
    Tell,
    alone,
    end_all,
    reindexes,
    unfinished,
)
from relaybox.search.results import Backfilled, Difference, Progress, Reindexed
from relaybox.search.source import as_source
from relaybox.search.workspace import Workspace, open_records, open_workspace

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

ROUNDS = 5
"""Rounds of repairs before the reindex gives up."""

CLEANING = 30.0
"""Seconds in which a failed build tries to remove what it leaves behind."""

log = logging.getLogger(__name__)


def silent(text: str) -> None:
    """Ignore the messages."""


async def areindex(
    outbox: Outbox,
    destination: str,
    source: Any,
    *,
    index: str | None = None,
    rate: float | None = None,
    batch: int = 500,
    patience: float = 600.0,
    like: str | None = None,
    actor: str = "application",
    tell: Tell = silent,
) -> Reindexed:
    """Rebuild the index of a destination from a source, then replace the old index.

    The old index serves until then, and stays if anything fails: ``ReindexFailed`` says why. A relay must
    run. The new index gets the settings of ``like``, by default the old index. ``rate`` is in documents a
    second; ``patience`` is the number of seconds without progress before it fails.
    """
    pace = Pace(rate, never)
    began = time.monotonic()
    made = as_source(source)
    async with open_workspace(outbox, destination, made, index, actor) as workspace:
        records, own = workspace.records, workspace.index
        about = {"index": own, "source": made.name, "rate": rate}
        building = replace(workspace, index=f"{own}{BUILDING}")
        fill = partial(abackfill, outbox, destination, made, rate=rate, batch=batch, actor=actor)
        with translated_errors(workspace.engine, ReindexFailed):
            async with alone(records, actor, destination, about) as runner:
                documents = await Build(building, own, runner, fill, pace, patience, like or own, tell).run()
        result = Reindexed(destination, own, documents, runner.skipped, time.monotonic() - began)
        await records.admin.note("reindex", {**about, "destination": destination, "documents": documents})
    return result


def reindex(outbox: Outbox, destination: str, source: Any, **options: Any) -> Reindexed:
    """Run ``areindex`` from synchronous code."""
    return run(areindex(outbox, destination, source, **options))


async def alook(
    outbox: Outbox, destination: str, source: Any, *, index: str | None = None, like: str | None = None
) -> tuple[str, int | None]:
    """Return the index to build, and the number of documents if known. Raise ``ReindexFailed``."""
    async with open_workspace(outbox, destination, source, index, "application") as workspace:
        own, engine = workspace.index, workspace.engine
        with translated_errors(engine, ReindexFailed):
            await check_present(engine, own, like or own)
        return own, await workspace.rows.count()


async def aabort(
    outbox: Outbox,
    destination: str,
    *,
    index: str | None = None,
    dry_run: bool = False,
    actor: str = "application",
    tell: Tell = silent,
) -> int:
    """Stop running reindexes and remove what they leave; return their number. ``dry_run`` only reports."""
    configured = outbox.settings.destination(destination)
    engine = open_engine(configured)
    try:
        async with open_records(outbox, actor) as records:
            running = await unfinished(records, destination)
            if not dry_run:
                await end_all(records, destination, running)
            fixed = index or index_of(configured).fixed
            recorded = [] if fixed else await reindexes(records, destination)
            for live in {fixed} if fixed else {str(one.details["index"]) for one in recorded}:
                left = Leftovers(records, configured, engine, f"{live}{BUILDING}", tell)
                with translated_errors(engine):
                    await (left.look() if dry_run else left.clear())
    finally:
        await engine.close()
    return len(running)


class Build:
    """One build: the index of ``building``, which ``fill`` fills, replaces ``live``.

    ``pace`` is that of repairs. ``like`` names the index whose settings the new one gets.
    """

    def __init__(
        self,
        building: Workspace,
        live: str,
        runner: Runner,
        fill: Callable[..., Awaitable[Backfilled]],
        pace: Pace,
        patience: float,
        like: str,
        tell: Tell,
    ) -> None:
        self._building = building
        self._engine = building.engine
        self._live = live
        self._runner = runner
        self._fill_index = fill
        self._pace = pace
        self._patience = patience
        self._like = like
        self._tell = tell
        self._leftovers = Leftovers(
            building.records, building.destination, building.engine, building.index, tell
        )
        self._identity: str | None = None
        self._creating = False

    async def run(self) -> int:
        """Build and replace; return the number of documents in the new index. Raise ``ReindexFailed``."""
        try:
            identity = await self._runner.guard(self._begin())
            return await self._build(BuildWatch(self._building, identity, self._patience, self._tell))
        except BaseException:
            await self.clean_up()
            raise

    async def _build(self, watch: BuildWatch) -> int:
        try:
            await self._runner.guard(self._fill(watch), watch.run())
            return await self._swap(watch)
        except TROUBLE:
            # If the index was dropped just now, that reason says more.
            await watch.check_index()
            raise
        except ReindexFailed:
            raise
        except RelayboxError as error:
            raise ReindexFailed(str(error)) from error

    async def _begin(self) -> str:
        await check_present(self._engine, self._live, self._like)
        await self._leftovers.clear()
        self._tell(f"creating {self._building.index}")
        self._creating = True
        await self._engine.create(self._building.index, like=self._like)
        self._identity = (await self._engine.present([self._building.index])).get(self._building.index)
        if self._identity is None:
            raise ReindexFailed(f"the index {self._building.index!r} disappeared after it was created")
        return self._identity

    async def _fill(self, watch: BuildWatch) -> None:
        # After half of this time, every send that starts writes to both indexes.
        await asyncio.sleep(2 * LOOK)
        self._tell("reading the database")

        def progress(far: Progress) -> None:
            self._runner.done = far.done
            watch.backlog = far.waiting

        filled = await self._fill_index(index=self._building.index, resume=False, progress=progress)
        self._runner.done, watch.backlog = filled.done, None
        if filled.stopped:
            raise ReindexFailed("its backfill was cancelled")
        if filled.refusals:
            reasons = "; ".join(f"document {one.id}: {one.reason}" for one in filled.refused[:NAMED])
            raise ReindexFailed(f"cannot emit events for {filled.refusals:,} of the documents: {reasons}")
        self._tell(f"{filled.done:,} documents emitted")
        await self._arrive(watch)
        await self._settle_differences(watch)

    async def _arrive(self, watch: BuildWatch) -> None:
        reported_at = time.monotonic()
        while True:
            try:
                if not (pending := await watch.pending()):
                    break
                if time.monotonic() - reported_at > 5.0:
                    self._tell(f"{pending:,} events on their way")
                    reported_at = time.monotonic()
            except StoreError as error:
                # If the database stays away, the heartbeat ends the build.
                log.warning("the database does not say how much is pending: %s", error)
            await asyncio.sleep(POLL)
        await watch.check_failed()

    async def _settle_differences(self, watch: BuildWatch) -> None:
        marks = {INDEX_HEADER: self._building.index}
        give_up = time.monotonic() + self._patience
        rounds = 0
        while True:
            self._tell(f"comparing {self._building.index} with the database")
            try:
                result = await Comparison(self._building, self._pace, marks, NAMED, no_progress, never).run()
            except (*TROUBLE, StoreError):
                # The engine or the database may be back in a moment.
                if time.monotonic() > give_up:
                    raise
                await asyncio.sleep(LOOK)
                continue
            if not result.differences:
                return
            rounds += 1
            self._runner.skipped += result.repaired
            if rounds > ROUNDS or not result.repaired:
                examples = "; ".join(map(_described, result.examples[:NAMED]))
                raise ReindexFailed(f"{result.differences:,} documents differ still: {examples}")
            self._tell(f"{result.repaired:,} documents repaired")
            await self._arrive(watch)

    async def _swap(self, watch: BuildWatch) -> int:
        built = await self._runner.guard(self._check(watch))
        self._tell(f"{self._building.index} takes the place of {self._live}")
        # Half of a replacement is worse than none or all.
        await to_its_end(self._replace())
        self._creating = False
        try:
            await self._leftovers.sweep()
        except (*TROUBLE, StoreError) as error:
            self._warn(error)
        return built

    async def _check(self, watch: BuildWatch) -> int:
        """Raise if the new index may not replace the live one; return the number of documents."""
        built = await self._engine.count(self._building.index)
        if not built and await self._engine.count(self._live):
            raise ReindexFailed(f"the source has no documents, and {self._live!r} has: see its query")
        await self._runner.beat()
        self._runner.check()
        await watch.check_index(strict=True)
        return built

    async def _replace(self) -> None:
        try:
            await self._engine.replace(self._live, self._building.index)
        except TROUBLE as error:
            # The new index may serve already, and only the old one be left.
            if (await self._engine.present([self._live])).get(self._live) != self._identity:
                raise
            log.warning("%r serves, but its engine is in trouble: %s", self._live, error)

    async def clean_up(self) -> None:
        """Drop the new index after a failure, unless another reindex owns it."""
        try:
            async with asyncio.timeout(CLEANING):
                if not self._creating or await self._drop_own():
                    await self._leftovers.discard()
        except Exception as error:
            self._warn(error)

    async def _drop_own(self) -> bool:
        """Drop the index; return False if another reindex now owns that name, and events for it."""
        identity = (await self._engine.present([self._building.index])).get(self._building.index)
        if identity is not None and self._identity not in (None, identity):
            return False
        if identity is not None:
            self._tell(f"dropping {self._building.index}; {self._live} goes on serving")
        # Drop it even if it is not visible: its creation may be under way.
        await self._engine.drop(self._building.index)
        return True

    def _warn(self, error: Exception) -> None:
        fix = command(f"reindex --destination {self._building.destination.name} --abort")
        reason = str(error) or type(error).__name__
        log.warning("%r may be left behind (%s): %s clears it away", self._building.index, reason, fix)


async def check_present(engine: Engine, live: str, like: str) -> None:
    """Raise ``ReindexFailed`` if the index to replace, or the one to copy settings from, does not exist."""
    present = await engine.present([live, like])
    if live not in present:
        fix = f"so there is nothing to replace: create it, or fill it with {command('backfill')}"
        raise ReindexFailed(f"the index {live!r} does not exist on {engine.where}, {fix}")
    if like not in present:
        raise ReindexFailed(f"like = {like!r}: there is no such index on {engine.where}; create it")


def _described(one: Difference) -> str:
    behind = f", behind a failed event: see {command(f'why {one.failed}')}" if one.blocked else ""
    return f"{one.id} is {one.kind}{': ' + one.refused if one.refused else ''}{behind}"
