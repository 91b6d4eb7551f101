"""One operator's action on deliveries: on given ids, or in batches on all that a filter finds.

Each batch is a transaction with its own audit row. An action that ends half-way leaves whole batches, and
running it again does the rest. A replay starts from the beginning, because replayed rows do not change.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TypeAlias, TypedDict
from uuid import UUID

from relaybox.operate.pace import Pace, never
from relaybox.stores.ledger import BATCH, Audit, Entry, Filter
from relaybox.stores.sql.ledger.entries import SqlEntries

Progress: TypeAlias = Callable[[int], None]
Stop: TypeAlias = Callable[[], bool]
Ready: TypeAlias = Callable[[Entry], bool]
Change: TypeAlias = Callable[[Sequence[Entry], Audit], Awaitable[Collection[UUID]]]


@dataclass(frozen=True, slots=True)
class Named:
    """Deliveries by their id or their event's, of one ``destination`` if given. ``exact``: no events' ids."""

    ids: Sequence[UUID]
    destination: str | None = None
    exact: bool = False


What: TypeAlias = Filter | Named | Sequence[UUID]


@dataclass(frozen=True, slots=True)
class Done:
    """What an action did, or would do with ``dry_run``.

    ``skipped`` rows were in the wrong state (leased, or final). ``unknown`` ids do not exist, ``idle`` ids
    had all rows skipped, ``shared`` ids have several rows. ``destinations`` are those of the affected rows.
    """

    affected: int = 0
    skipped: int = 0
    unknown: tuple[UUID, ...] = ()
    idle: tuple[UUID, ...] = ()
    shared: tuple[UUID, ...] = ()
    destinations: tuple[str, ...] = ()
    stopped: bool = False


def no_progress(count: int) -> None:
    """Ignore progress."""


class Options(TypedDict, total=False):
    """How to run an action. Named ids ignore ``rate`` (rows a second) and ``stop`` (asked before a batch)."""

    dry_run: bool
    progress: Progress
    rate: float | None
    stop: Stop


class ActionRun:
    """One run of an action."""

    def __init__(
        self,
        entries: SqlEntries,
        *,
        dry_run: bool = False,
        progress: Progress = no_progress,
        rate: float | None = None,
        stop: Stop = never,
    ) -> None:
        self.dry_run = dry_run
        self.pace = Pace(rate, stop)
        self._entries = entries
        self._progress = progress

    async def on_found(self, filter: Filter, act: Change, audit: Audit, done: Done | None = None) -> Done:
        """Act in batches on what the filter finds, and add to what was ``done`` before."""
        done = done or Done()
        began: datetime | None = None
        async for found in walk(self._entries, filter, None if self.dry_run else self.pace):
            began = began or found[0].seen_at
            # If a clock is ahead, ids do not show what was created later, such as a replay's own copies.
            part = [entry for entry in found if entry.created_at <= began]
            if not await self.pace.turn(0 if self.dry_run else len(part)):
                return replace(done, stopped=True)
            changed = len(await act(part, audit))
            done = replace(done, affected=done.affected + changed, skipped=done.skipped + len(part) - changed)
            self._progress(done.affected)
        return done

    async def on_named(self, what: Named, act: Change, audit: Audit) -> Done:
        """Act on named deliveries, all at once."""
        found: dict[UUID, list[Entry]] = {}
        for id_ in what.ids:
            rows = await self._entries.find(id_, exact=what.exact)
            found[id_] = [one for one in rows if what.destination in (None, one.destination)]
        entries = {entry.id: entry for of_one in found.values() for entry in of_one}
        changed = frozenset(await act(tuple(entries.values()), audit))
        known = {id_: {entry.id for entry in named} for id_, named in found.items() if named}
        self._progress(len(changed))
        return Done(
            affected=len(changed),
            skipped=len(entries) - len(changed),
            unknown=tuple(id_ for id_ in found if id_ not in known),
            idle=tuple(id_ for id_, own in known.items() if changed.isdisjoint(own)),
            shared=tuple(id_ for id_, own in known.items() if len(own) > 1),
            destinations=tuple(sorted({entries[id_].destination for id_ in changed})),
        )

    def when_ready(self, ready: Ready, change: Change) -> Change:
        """Return the change of those that are ready for it; a dry run only finds them."""

        async def act(entries: Sequence[Entry], audit: Audit) -> Collection[UUID]:
            chosen = [entry for entry in entries if ready(entry)]
            if self.dry_run or not chosen:
                return [entry.id for entry in chosen]
            return await change(chosen, audit)

        return act


async def walk(
    entries: SqlEntries, filter: Filter, pace: Pace | None = None
) -> AsyncIterator[Sequence[Entry]]:
    """Yield what matches the filter, each once, oldest first, without later arrivals.

    With a pace, yield batches of the allowed size, read when they may be processed.
    """
    last = await entries.newest()
    size = BATCH if pace is None else pace.size(BATCH)
    cursor: UUID | None = None
    while last is not None:
        page = await entries.walk(filter, cursor, last, size)
        if page.entries and pace is not None and pace.waits:
            await pace.turn(0)
            page = await entries.walk(filter, cursor, last, size)
        if page.entries:
            yield page.entries
        if page.cursor is None:
            break
        cursor = page.cursor
