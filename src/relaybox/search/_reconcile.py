"""Compare a database and a search index, and have what differs written again, through the outbox.

The database is read page by page, and the index asked for the documents of each page; then the ids of the
index are read, and the database asked which of them it has. Nothing is locked while that goes on, so a
difference is looked at once more before it counts: the database, the outbox, the index and the database
again, in this order. Where nothing of the document is under way in the outbox, everything that was committed
before is in the index; so an index that then differs from a row that was the same before and after is wrong.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relaybox.core.event_loop import run
from relaybox.operate.admin import Progress, Stop, no_progress
from relaybox.operate.pace import Pace, never
from relaybox.search.change import INDEX_HEADER
from relaybox.search.comparison import Comparison, Repairs
from relaybox.search.engine import EngineFailed, translated_errors
from relaybox.search.results import Reconciled
from relaybox.search.source import as_source
from relaybox.search.workspace import Target, open_workspace

if TYPE_CHECKING:
    from relaybox.outbox import Outbox


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

    With ``repair`` an event is emitted for each difference, to this destination only: no more than ``rate``
    a second, of the row as it is in that transaction. ``index`` is for a destination that has several.
    ``examples`` is how many differences of each kind are told one by one. Where the source has no documents
    at all a repair is refused with ``ConfigError``, unless ``allow_empty``: it would delete every document of
    the index. ``dry_run``: as with ``repair``, but nothing is emitted.
    """
    pace = Pace(rate, stop)
    async with open_workspace(outbox, destination, as_source(source), index, actor) as workspace:
        repairs = Repairs(workspace, pace, {INDEX_HEADER: index} if index else {})
        emits = repair and not dry_run
        comparison = Comparison(workspace, repairs if emits else None, examples, progress, stop)
        with translated_errors(workspace.target.engine):
            await _check_index(workspace.target)
            result = await comparison.run(allow_empty=allow_empty or not repair)
        if emits:
            await workspace.records.admin.note("reconcile", result.figures())
    return result


def reconcile(outbox: Outbox, destination: str, source: Any, **options: Any) -> Reconciled:
    """``areconcile``, from synchronous code."""
    return run(areconcile(outbox, destination, source, **options))


async def _check_index(target: Target) -> None:
    if target.index not in await target.engine.present([target.index]):
        fix = "create it, or name another with --index"
        raise EngineFailed(f"the index {target.index!r} does not exist on {target.engine.where}: {fix}")
