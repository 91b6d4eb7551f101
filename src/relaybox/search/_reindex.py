"""Rebuild a search index while the old one serves; see ``build.py`` for how nothing gets lost."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from relaybox.core.event_loop import run
from relaybox.core.settings import Destination
from relaybox.operate.pace import Pace, never
from relaybox.search.build import Build, How, Leftovers, check_present
from relaybox.search.build_watch import POLL, Tell
from relaybox.search.change import BUILDING, index_of
from relaybox.search.engine import open_engine, translated_errors
from relaybox.search.reindex_operation import LOOKED_AT, ReindexFailed, alone, is_dead, others
from relaybox.search.results import Reindexed
from relaybox.search.source import as_source
from relaybox.search.workspace import OutboxRecords, destination_of, open_records, open_workspace
from relaybox.stores.journal import STALLED

if TYPE_CHECKING:
    from relaybox.outbox import Outbox


def silent(text: str) -> None:
    """For callers that do not want to be told."""


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
    """Build the index of a destination anew from a source, and let it take the place of the old one.

    The old one serves until then, and goes on serving where anything fails: ``ReindexFailed`` says what.
    ``like`` is an index whose settings the new one gets instead of the old one's.

    A relay has to run. ``rate`` is in documents a second, ``patience`` how many seconds nothing may arrive.
    """
    Pace(rate, never)
    began = time.monotonic()
    made = as_source(source)
    async with open_workspace(outbox, destination, made, index, actor) as workspace:
        records, target = workspace.records, workspace.target
        about = {"index": target.index, "source": made.name, "rate": rate}
        build = Build(outbox, made, workspace, How(actor, rate, batch, patience, like), tell)
        with translated_errors(target.engine, ReindexFailed):
            async with alone(records, actor, destination, about) as running:
                documents = await build.run(running)
        result = Reindexed(destination, target.index, documents, running.repaired, time.monotonic() - began)
        await records.admin.note("reindex", {**about, "destination": destination, "documents": documents})
    return result


def reindex(outbox: Outbox, destination: str, source: Any, **options: Any) -> Reindexed:
    """``areindex``, from synchronous code."""
    return run(areindex(outbox, destination, source, **options))


async def alook(
    outbox: Outbox, destination: str, source: Any, *, index: str | None = None, like: str | None = None
) -> tuple[str, int | None]:
    """The index that a reindex would build, and how many documents it would read, where that is known.

    Raises ``ReindexFailed`` where it could not even begin: the engine is away, or there is no such index.
    """
    async with open_workspace(outbox, destination, as_source(source), index, "application") as workspace:
        target = workspace.target
        with translated_errors(target.engine, ReindexFailed):
            await check_present(target.engine, target.index, like or target.index)
        return target.index, await workspace.rows.count()


async def aabort(
    outbox: Outbox,
    destination: str,
    *,
    index: str | None = None,
    dry_run: bool = False,
    actor: str = "application",
    tell: Tell = silent,
) -> int:
    """End the reindexes of a destination that run, and clear away what they leave; how many it were.

    ``dry_run``: only tell what would be cleared away.
    """
    configured = destination_of(outbox, destination)
    engine = open_engine(configured)
    try:
        async with open_records(outbox, actor) as records:
            running = await others(records, destination)
            if not dry_run:
                for one in running:
                    await records.admin.cancel(one.id)
                await _ended(records, destination)
            for live in {index} if index else await _indexes(records, configured):
                left = Leftovers(records, configured, engine, f"{live}{BUILDING}", tell)
                with translated_errors(engine):
                    await (left.look() if dry_run else left.clear())
    finally:
        await engine.close()
    return len(running)


async def _indexes(records: OutboxRecords, destination: Destination) -> set[str]:
    """The one that the destination names, else those that were rebuilt lately."""
    fixed = index_of(destination).fixed
    if fixed is not None:
        return {fixed}
    operations = await records.admin.journal.operations(LOOKED_AT)
    reindexes = [one.details for one in operations if one.action == "reindex"]
    return {str(about["index"]) for about in reindexes if about.get("destination") == destination.name}


async def _ended(records: OutboxRecords, destination: str) -> None:
    """Wait until those that are alive have noticed."""
    give_up = time.monotonic() + STALLED
    while living := [one for one in await others(records, destination) if not is_dead(one)]:
        if time.monotonic() > give_up:
            raise ReindexFailed(f"a reindex of {destination!r} does not end ({living[0].actor})")
        await asyncio.sleep(POLL)
    for one in await others(records, destination):
        await records.admin.journal.finish(one.id, "failed", one.done, one.skipped, "its process ended")
