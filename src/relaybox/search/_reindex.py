"""Rebuild a search index while the old one serves; see ``build.py`` for how nothing gets lost."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from relaybox.core.settings import Destination
from relaybox.operate.pace import Pace, never
from relaybox.search._reconcile import opened
from relaybox.search.build import Build, How, check_present
from relaybox.search.change import BUILDING, index_of
from relaybox.search.desk import Desk, open_desk
from relaybox.search.engine import open_engine, translated_errors
from relaybox.search.leftovers import Leftovers
from relaybox.search.operation import LOOKED_AT, ReindexFailed, alone, is_dead, others
from relaybox.search.source import as_source
from relaybox.search.target import destination_of
from relaybox.search.watch import POLL, Tell
from relaybox.stores.journal import STALLED

if TYPE_CHECKING:
    from relaybox.outbox import Outbox


@dataclass(frozen=True, slots=True)
class Reindexed:
    """An index that was rebuilt: its documents, how many of them were repaired, and how long it took."""

    destination: str
    index: str
    documents: int
    repaired: int
    seconds: float


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
    async with opened(outbox, destination, made, index, actor) as (desk, rows, target):
        about = {"index": target.index, "source": made.name, "rate": rate}
        build = Build(outbox, made, desk, rows, target, How(actor, rate, batch, patience, like), tell)
        with translated_errors(target.engine, ReindexFailed):
            async with alone(desk, actor, destination, about) as running:
                documents = await build.run(running)
        result = Reindexed(destination, target.index, documents, running.repaired, time.monotonic() - began)
        await desk.admin.note("reindex", {**about, "destination": destination, "documents": documents})
    return result


def reindex(outbox: Outbox, destination: str, source: Any, **options: Any) -> Reindexed:
    """``areindex``, from synchronous code."""
    from relaybox.core.event_loop import run

    return run(areindex(outbox, destination, source, **options))


async def alook(
    outbox: Outbox, destination: str, source: Any, *, index: str | None = None, like: str | None = None
) -> tuple[str, int | None]:
    """The index that a reindex would build, and how many documents it would read, where that is known.

    Raises ``ReindexFailed`` where it could not even begin: the engine is away, or there is no such index.
    """
    async with opened(outbox, destination, as_source(source), index, "application") as (_, rows, target):
        with translated_errors(target.engine, ReindexFailed):
            await check_present(target.engine, target.index, like or target.index)
        return target.index, await rows.count()


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
        async with open_desk(outbox, actor) as desk:
            running = await others(desk, destination)
            if not dry_run:
                for one in running:
                    await desk.admin.cancel(one.id)
                await _ended(desk, destination)
            for live in {index} if index else await _indexes(desk, configured):
                left = Leftovers(desk, configured, engine, f"{live}{BUILDING}", tell)
                with translated_errors(engine):
                    await (left.look() if dry_run else left.clear())
    finally:
        await engine.close()
    return len(running)


async def _indexes(desk: Desk, destination: Destination) -> set[str]:
    """The one that the destination names, else those that were rebuilt lately."""
    fixed = index_of(destination).fixed
    if fixed is not None:
        return {fixed}
    operations = await desk.admin.journal.operations(LOOKED_AT)
    reindexes = [one.details for one in operations if one.action == "reindex"]
    return {str(about["index"]) for about in reindexes if about.get("destination") == destination.name}


async def _ended(desk: Desk, destination: str) -> None:
    """Wait until those that are alive have noticed."""
    give_up = time.monotonic() + STALLED
    while living := [one for one in await others(desk, destination) if not is_dead(one)]:
        if time.monotonic() > give_up:
            raise ReindexFailed(f"a reindex of {destination!r} does not end ({living[0].actor})")
        await asyncio.sleep(POLL)
    for one in await others(desk, destination):
        await desk.admin.journal.finish(one.id, "failed", one.done, one.skipped, "its process ended")
