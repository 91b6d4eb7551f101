"""The one door for operators: every question and every action that the command, the web and Django offer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, TypeAlias
from uuid import UUID

from relaybox.config import Destination
from relaybox.errors import ConfigError, did_you_mean
from relaybox.ledger import (
    EVERYTHING,
    Attempt,
    Audit,
    Choice,
    Content,
    Counts,
    Entry,
    Filter,
    Lane,
    Ledger,
    Mark,
    Page,
    Place,
    Relay,
    State,
)
from relaybox.why import Reason, explain

Progress: TypeAlias = Callable[[int], None]
Change: TypeAlias = Callable[[Sequence[Entry], Audit], Awaitable[Collection[UUID]]]

WINDOWS = 20
"""How many windows of rows one page of a search looks through before it answers with what it has."""

NAMED = 100
"""How many ids an audit row names; it counts all of them."""

FAILED: tuple[Choice, ...] = ("failed",)
FINAL: tuple[Choice, ...] = ("delivered", "completed", "failed", "discarded")
WAITING: tuple[Choice, ...] = ("failed", "pending", "due", "scheduled", "parked")


@dataclass(frozen=True, slots=True)
class DestinationStats:
    """One destination: its rows, and whether anything holds it up."""

    name: str
    configured: bool
    counts: Counts
    place: Place | None
    handed_over: bool = False
    """Whether Debezium sends, and no relay."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Where everything is."""

    total: Counts
    destinations: tuple[DestinationStats, ...]
    relays: tuple[Relay, ...]


@dataclass(frozen=True, slots=True)
class Detail:
    """One delivery with what it carries and what went wrong with it."""

    entry: Entry
    content: Content | None
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class Named:
    """The deliveries of these ids, an event's being that of all of its; or only those for a destination.

    ``exact``: only the deliveries whose own ids these are, though an event may have the same.
    """

    ids: Sequence[UUID]
    destination: str | None = None
    exact: bool = False


What: TypeAlias = Filter | Named | Sequence[UUID]


@dataclass(frozen=True, slots=True)
class Done:
    """What an action did, or with ``dry_run`` would have done.

    ``skipped`` rows were named but are not in a state for it (leased, or final). The rest is about ids:
    ``unknown`` ones are nowhere, for ``idle`` ones every row was skipped, and ``shared`` ones name several
    rows; ``destinations`` are those of the rows affected.
    """

    affected: int = 0
    skipped: int = 0
    unknown: tuple[UUID, ...] = ()
    idle: tuple[UUID, ...] = ()
    shared: tuple[UUID, ...] = ()
    destinations: tuple[str, ...] = ()


def no_progress(count: int) -> None:
    """For callers that do not want to know how far it is."""


class Admin:
    """Questions and actions of one operator, on a ledger and with the destinations that are configured."""

    def __init__(self, ledger: Ledger, destinations: Iterable[Destination], actor: str) -> None:
        self._ledger = ledger
        self._destinations = {destination.name: destination for destination in destinations}
        self._lanes = {
            name: Lane(
                destination.ordered or destination.handed_over,
                destination.on_failed == "block",
                destination.handed_over,
            )
            for name, destination in self._destinations.items()
        }
        self._handed_over = frozenset(name for name, lane in self._lanes.items() if lane.handed_over)
        self._actor = actor

    async def names(self) -> tuple[str, ...]:
        """Every destination that is configured, or has rows."""
        return tuple(sorted(self._destinations.keys() | await self._ledger.names()))

    async def stats(self) -> Stats:
        """How many rows are where; counts stop at ``ledger.CAP``, so that it never reads the whole table."""
        names = await self.names()
        counts = await self._ledger.counts(names)
        places = await self._ledger.places()
        destinations = tuple(
            DestinationStats(
                name, name in self._destinations, counts[name], places.get(name), name in self._handed_over
            )
            for name in names
        )
        return Stats(_total(counts.values()), destinations, await self._ledger.relays())

    async def events(
        self,
        filter: Filter = EVERYTHING,
        *,
        limit: int = 50,
        cursor: UUID | None = None,
        windows: int = WINDOWS,
    ) -> Page:
        """Deliveries, newest first. A page with a cursor may be short: there was more to look through."""
        await self._check_filter(filter)
        found: list[Entry] = []
        for _ in range(windows):
            page = await self._ledger.search(filter, limit - len(found), cursor)
            found += page.entries
            cursor = page.cursor
            if cursor is None or len(found) == limit:
                break
        return Page(tuple(found), cursor)

    async def destination(self, name: str) -> Destination | None:
        """A destination as it is configured; None: it only has rows. Raises where there is no such."""
        await self._check_known(name)
        return self._destinations.get(name)

    async def contents(self, ids: Collection[UUID]) -> Mapping[UUID, Content]:
        """What deliveries carry."""
        return await self._ledger.contents(ids)

    async def inbox(self, consumer: str) -> AsyncIterator[Sequence[Mark]]:
        """What a consumer has processed, a batch at a time."""
        after = ""
        while marks := await self._ledger.marks(consumer, after):
            yield marks
            after = marks[-1].message_id

    async def event(self, id_: UUID) -> tuple[Detail, ...]:
        """The delivery of that id, or every delivery of the event of that id; none where there is no such."""
        return tuple(
            [
                Detail(entry, await self._ledger.content(entry.id), await self._ledger.attempts(entry.id))
                for entry in await self._ledger.find(id_)
            ]
        )

    async def why(self, id_: UUID) -> tuple[Reason, ...]:
        """Why each delivery of that id is where it is; none where there is no such."""
        entries = await self._ledger.find(id_)
        places = await self._ledger.places()
        relays = await self._ledger.relays()
        reasons = []
        for entry in entries:
            head = await self._head(entry)
            shared = {entry.event_id} if len(entries) > 1 else set[UUID]()
            if head is not None and head.status == "failed":
                beside = await self._ledger.find(head.event_id)
                shared |= {head.event_id} if len(beside) > 1 else set()
            known = self._destinations.keys()
            reasons.append(explain(entry, places, known, relays, head, shared, self._handed_over))
        return tuple(reasons)

    async def retry(self, what: What, *, dry_run: bool = False, progress: Progress = no_progress) -> Done:
        """Failed deliveries start anew, with all their attempts, at their old place in the order.

        A filter is about failed ones. An id may also name one that backs off: it becomes due now.
        """

        def ready(entry: Entry) -> bool:
            return entry.state is State.FAILED or entry.backing_off

        async def change(entries: Sequence[Entry], audit: Audit) -> Collection[UUID]:
            return await self._ledger.retry(entries, self._lanes, audit)

        return await self._act("retry", what, FAILED, ready, change, dry_run, progress)

    async def discard(self, what: What, *, dry_run: bool = False, progress: Progress = no_progress) -> Done:
        """Failed and pending deliveries are given up; the next one of each key becomes due.

        A filter is about failed ones unless its status says otherwise.
        """

        def ready(entry: Entry) -> bool:
            return entry.status in ("pending", "failed") and entry.state is not State.SENDING

        async def change(entries: Sequence[Entry], audit: Audit) -> Collection[UUID]:
            return await self._ledger.discard(entries, self._lanes, audit)

        return await self._act("discard", what, WAITING, ready, change, dry_run, progress)

    async def replay(
        self,
        what: What,
        *,
        to: str | None = None,
        dry_run: bool = False,
        progress: Progress = no_progress,
    ) -> Done:
        """Final deliveries are sent again, each as a new row of the same event, with a header that says so.

        A filter is about delivered ones unless its status says otherwise.
        """
        if to is not None:
            self._check_configured(to)
            self._check_relayed(to, "replay its own deliveries without it, or emit the events again")

        def ready(entry: Entry) -> bool:
            return entry.status != "pending" and (to or entry.destination) in self._destinations

        async def change(entries: Sequence[Entry], audit: Audit) -> Collection[UUID]:
            return await self._ledger.replay(entries, to, self._lanes, audit)

        details = {} if to is None else {"to": to}
        return await self._act("replay", what, FINAL, ready, change, dry_run, progress, **details)

    async def move(
        self, from_: str, to: str, *, dry_run: bool = False, progress: Progress = no_progress
    ) -> Done:
        """Pending and failed deliveries of a destination go to another; failed ones stay failed there.

        What is being sent stays where it is, and is counted as skipped.
        """
        await self._check_known(from_)
        self._check_configured(to)
        self._check_relayed(to, "name another destination, or emit the events again")
        if from_ == to:
            raise ConfigError(f"to = {to!r}: the rows are there already; name another destination")

        async def change(entries: Sequence[Entry], audit: Audit) -> int:
            return len(await self._ledger.move(entries, to, self._lanes, audit))

        affected = skipped = 0
        # The failed ones first: where they block their keys, nothing of those keys must get ahead of them.
        statuses: tuple[Choice, ...] = ("failed", "pending")
        for status in statuses:
            filter = Filter(status=status, destination=from_)
            audit = Audit(self._actor, "move", {"from": from_, "to": to, "status": status})
            async for entries in self.walk(filter):
                changed = len(entries) if dry_run else await change(entries, audit)
                affected += changed
                skipped += len(entries) - changed
                progress(affected)
        sending = (await self._ledger.counts([from_]))[from_].sending
        return Done(affected, max(skipped, sending))

    async def pause(self, destination: str, reason: str, until: datetime | None = None) -> None:
        """Keep every relay from sending there, until that moment or until somebody resumes it."""
        await self._check_known(destination)
        if destination in self._handed_over:
            fix = "pause the connector instead"
            raise ConfigError(f"destination {destination!r} is read by Debezium, no relay sends there; {fix}")
        details = {"destination": destination, "reason": reason, "until": until}
        await self._ledger.pause(destination, reason, until, Audit(self._actor, "pause", details))

    async def resume(self, destination: str) -> bool:
        """End a pause and close an open circuit, so that the next claim goes through; whether one was."""
        await self._check_known(destination)
        return await self._ledger.resume(
            destination, Audit(self._actor, "resume", {"destination": destination})
        )

    async def _act(
        self,
        action: str,
        what: What,
        statuses: Sequence[Choice],
        ready: Callable[[Entry], bool],
        change: Change,
        dry_run: bool,
        progress: Progress,
        **details: Any,
    ) -> Done:
        """Do it to what is ready for it: to what a filter finds batch by batch, to what ids name at once."""

        async def act(entries: Sequence[Entry], audit: Audit) -> Collection[UUID]:
            chosen = [entry for entry in entries if ready(entry)]
            if dry_run or not chosen:
                return [entry.id for entry in chosen]
            return await change(chosen, audit)

        if not isinstance(what, Filter):
            named = what if isinstance(what, Named) else Named(what)
            done = await self._act_on_named(action, named, act, details)
            progress(done.affected)
            return done
        filter = await self._checked(action, what, statuses)
        given = {name: value for name, value in asdict(filter).items() if value is not None}
        audit = Audit(self._actor, action, {"filter": given, **details})
        affected = skipped = 0
        async for entries in self.walk(filter):
            changed = len(await act(entries, audit))
            affected += changed
            skipped += len(entries) - changed
            progress(affected)
        return Done(affected, skipped)

    async def _act_on_named(self, action: str, what: Named, act: Change, details: Mapping[str, Any]) -> Done:
        about: dict[str, Any] = {"ids": list(what.ids[:NAMED])}
        if what.destination is not None:
            await self._check_known(what.destination)
            about["destination"] = what.destination
        found = {
            id_: [
                entry
                for entry in await self._ledger.find(id_, exact=what.exact)
                if what.destination in (None, entry.destination)
            ]
            for id_ in what.ids
        }
        entries = {entry.id: entry for of_one in found.values() for entry in of_one}
        audit = Audit(self._actor, action, {**about, **details})
        changed = frozenset(await act(tuple(entries.values()), audit))
        return Done(
            affected=len(changed),
            skipped=len(entries) - len(changed),
            unknown=tuple(id_ for id_, named in found.items() if not named),
            idle=tuple(
                id_ for id_, named in found.items() if named and changed.isdisjoint(e.id for e in named)
            ),
            shared=tuple(id_ for id_, named in found.items() if len(named) > 1),
            destinations=tuple(sorted({entries[id_].destination for id_ in changed})),
        )

    async def walk(self, filter: Filter) -> AsyncIterator[Sequence[Entry]]:
        """Everything that the filter is true of, each once, oldest first; not what comes in the meantime."""
        last = await self._ledger.newest()
        cursor: UUID | None = None
        while last is not None:
            page = await self._ledger.walk(filter, cursor, last)
            if page.entries:
                yield page.entries
            if page.cursor is None:
                break
            cursor = page.cursor

    async def _checked(self, action: str, filter: Filter, statuses: Sequence[Choice]) -> Filter:
        await self._check_filter(filter)
        if filter.status is None:
            return replace(filter, status=statuses[0])
        if filter.status not in statuses:
            raise ConfigError(f"status = {filter.status!r}: {action} takes {', '.join(statuses)}")
        return filter

    async def _head(self, entry: Entry) -> Entry | None:
        """The first open row of a delivery's key, where that matters."""
        if entry.ordering_key is None or entry.status != "pending":
            return None
        lane = self._lanes.get(entry.destination, Lane())
        if not lane.ordered and entry.state is not State.PARKED:
            return None
        return await self._ledger.head(entry.destination, entry.ordering_key, block=lane.block)

    async def _check_filter(self, filter: Filter) -> None:
        if filter.destination is not None:
            await self._check_known(filter.destination)

    async def _check_known(self, name: str) -> None:
        """A destination that is configured, or has rows."""
        if name not in self._destinations:
            known = self._destinations.keys() | await self._ledger.names()
            if name not in known:
                raise _no_destination(name, known)

    def _check_configured(self, name: str) -> None:
        if name not in self._destinations:
            raise _no_destination(name, self._destinations)

    def _check_relayed(self, to: str, fix: str) -> None:
        """Debezium sees what is inserted, not what is changed, and its message's key is made by emit."""
        if to in self._handed_over:
            raise ConfigError(f"to = {to!r}: Debezium takes only what is emitted to it; {fix}")


def _no_destination(name: str, known: Iterable[str]) -> ConfigError:
    return ConfigError(f"no destination is called {name!r}{did_you_mean(name, known)}")


def _total(counts: Iterable[Counts]) -> Counts:
    every = list(counts)
    numbers: Mapping[str, int] = {
        name: sum(getattr(count, name) for count in every)
        for name in ("due", "scheduled", "parked", "sending", "delivered", "failed")
    }
    times = [count.oldest_pending for count in every if count.oldest_pending is not None]
    ages = [count.oldest_seconds for count in every if count.oldest_seconds is not None]
    return Counts(
        **numbers,
        oldest_pending=min(times, default=None),
        oldest_seconds=max(ages, default=None),
        capped=frozenset[str]().union(*(count.capped for count in every)),
    )
