"""A backfill that writes nothing: how many documents it would emit, and whether they would be taken."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TYPE_CHECKING

from relaybox.core.outcome import Unavailable
from relaybox.core.settings import Destination
from relaybox.database.dialects import Dialect
from relaybox.emit.row import Call, RowBuilder
from relaybox.errors import PayloadError
from relaybox.search.change import changes_of
from relaybox.search.checkpoint import Position
from relaybox.search.results import Backfilled, Refused
from relaybox.search.rows import Item, Rows
from relaybox.search.workspace import Unwritable, wanted

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

LISTED = 20
"""Documents that would be refused and are named; no more are looked for then."""


async def rehearse(
    outbox: Outbox,
    rows: Rows,
    destination: Destination,
    call_of: Callable[[Item], Call],
    position: Position | None,
    size: int,
) -> Backfilled:
    """Count, and see what becomes of the first page; ``position`` is where an earlier one was interrupted."""
    position = position if position is not None and position.key is not None else None
    before = 0 if position is None else position.done + position.skipped
    after = None if position is None else position.key
    total = await rows.count()
    first: Sequence[Item] = ()
    counted = before
    async for page in rows.read(size, after):
        first = first or page
        counted += len(page)
        if total is not None:
            break
    refused = [one async for one in _refused(outbox, rows, destination, call_of, first)]
    return Backfilled(
        0 if position is None else position.done,
        counted if total is None else total,
        0 if position is None else position.skipped,
        after,
        refused=tuple(refused),
        refusals=len(refused),
        example=call_of(first[0]) if first else None,
        by_id=rows.guarded,
    )


async def _refused(
    outbox: Outbox,
    rows: Rows,
    destination: Destination,
    call_of: Callable[[Item], Call],
    page: Sequence[Item],
) -> AsyncIterator[Refused]:
    """Those that cannot be events, and those of which a search destination makes no document."""
    builder, dialect, found = RowBuilder(outbox.settings), _dialect(outbox), 0
    changes = changes_of(destination)
    try:
        for item in page:
            try:
                builder.build(call_of(item), dialect)
                if changes is None:
                    continue
                made = await wanted(changes, rows, destination, item.id, item.payload)
                if not isinstance(made, Unwritable):
                    continue
                refused = Refused(item.id, made.reason, at_destination=True)
            except PayloadError as error:
                refused = Refused(item.id, str(error))
            except Unavailable as error:
                refused = Refused(item.id, str(error), at_destination=True)
            yield refused
            found += 1
            if found == LISTED:
                return
    finally:
        if changes is not None:
            changes.close()


def _dialect(outbox: Outbox) -> Dialect:
    from relaybox.database.dialects import DIALECTS
    from relaybox.database.migrations import server_dialect

    return DIALECTS[server_dialect(outbox.settings.database)]
