"""The operators' service: every question and action that the CLI, the dashboard and Django offer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from relaybox.core.settings import Destination
from relaybox.operate.action import Done, Named, Progress, Stop, no_progress
from relaybox.operate.admin_actions import CANARY, NAMED
from relaybox.operate.admin_records import AdminRecords, Rows, check_limit
from relaybox.operate.history import Failures, Point, Series
from relaybox.operate.why import Reason, explain
from relaybox.stores.ledger import (
    EVERYTHING,
    Attempt,
    Choice,
    Content,
    Counts,
    DestinationState,
    Entry,
    Filter,
    Page,
    Policy,
    Relay,
    State,
)
from relaybox.stores.sql.ledger import SqlLedger

__all__ = [
    "NAMED", "Admin", "DeadLetterRow", "DestinationStats", "Detail", "Done", "Failures", "Named", "Point",
    "Progress", "Rows", "Series", "Stats", "Stop", "no_progress",
]  # fmt: skip

WINDOWS = 12
"""Windows of rows that one page of a search reads before it returns what it has."""

UNDELIVERED: tuple[Choice, ...] = ("pending", "sending", "failed")
IN_DEAD_LETTERS: tuple[Choice, ...] = (*UNDELIVERED, "delivered")


@dataclass(frozen=True, slots=True)
class DestinationStats:
    """One destination: its rows, and whether it is held up."""

    name: str
    configured: bool
    counts: Counts
    place: DestinationState | None
    handed_over: bool = False
    """True if Debezium sends, not a relay."""
    timeout: float | None = None
    """The function's timeout in seconds, if the destination is a function."""

    @property
    def overdue(self) -> bool:
        """True if a delivery has been with its function for longer than the timeout."""
        seconds = self.counts.sending_seconds
        return self.timeout is not None and seconds is not None and seconds > self.timeout

    @property
    def state(self) -> str:
        """Return what ``why`` would name first, in a word or two; ``ok`` if nothing holds it up."""
        place = self.place
        if place is not None and place.paused:
            return "paused"
        if place is not None and place.circuit != "closed":
            return f"circuit {place.circuit.replace('_', '-')}"
        if self.handed_over:
            return "debezium"
        if not self.configured:
            return "unknown" if self.name else "no route"
        if self.counts.failed:
            return "failing"
        return "retrying" if self.counts.retrying else "ok"


@dataclass(frozen=True, slots=True)
class Stats:
    """The counts of all deliveries, and the relays."""

    total: Counts
    destinations: tuple[DestinationStats, ...]
    relays: tuple[Relay, ...]


@dataclass(frozen=True, slots=True)
class Detail:
    """One delivery with its content and its failed attempts."""

    entry: Entry
    content: Content | None
    attempts: tuple[Attempt, ...]


@dataclass(frozen=True, slots=True)
class DeadLetterRow:
    """A delivery that another destination gave up; its headers say which, and why."""

    entry: Entry
    origin: str | None
    reason: str | None


class Admin(AdminRecords):
    """The questions and actions of one operator, on a ledger and the configured destinations."""

    def acting_as(self, actor: str) -> Admin:
        """Return the service for another operator, on the same connections."""
        return Admin(self._ledger, self._destinations.values(), actor)

    async def destinations(self) -> Mapping[str, Destination]:
        """Return the configured destinations by name."""
        return self._destinations

    async def names(self) -> tuple[str, ...]:
        """Return every destination that is configured or has rows."""
        return tuple(sorted(self._destinations.keys() | await self._ledger.overview.names()))

    async def stats(self) -> Stats:
        """Count rows by destination and state, up to ``ledger.CAP``, so it never reads the whole table."""
        names, timeouts = await self.names(), self._configured.timeouts
        overview = self._ledger.overview
        counts, places = await overview.counts(names), await overview.states()

        def stats_of(name: str) -> DestinationStats:
            about = places.get(name), name in self._configured.handed_over, timeouts.get(name)
            return DestinationStats(name, name in self._destinations, counts[name], *about)

        return Stats(
            _total(counts.values()), tuple(map(stats_of, names)), await self._ledger.overview.relays()
        )

    async def events(
        self,
        filter: Filter = EVERYTHING,
        *,
        limit: int = 50,
        cursor: UUID | None = None,
        windows: int = WINDOWS,
    ) -> Page:
        """Return deliveries, newest first. A page with a cursor may be short: there is more to search."""
        filter = await self._configured.check_filter(filter)
        found: list[Entry] = []
        for _ in range(windows):
            page = await self._ledger.entries.search(filter, limit - len(found), cursor)
            found += page.entries
            cursor = page.cursor
            if cursor is None or len(found) == limit:
                break
        return Page(tuple(found), cursor)

    async def destination(self, name: str) -> Destination | None:
        """Return a destination's configuration, or None if it only has rows. Raise if it is unknown."""
        await self._configured.check_known(name)
        return self._destinations.get(name)

    async def contents(self, ids: Collection[UUID]) -> Mapping[UUID, Content]:
        """Return the contents of deliveries."""
        return await self._ledger.entries.contents(ids)

    async def inbox(self, consumer: str) -> AsyncIterator[Sequence[tuple[str, datetime]]]:
        """Yield the messages that a consumer has processed, and when, in batches."""
        after = ""
        while marks := await self._ledger.overview.marks(consumer, after):
            yield marks
            after, _ = marks[-1]

    async def event(self, id_: UUID) -> tuple[Detail, ...]:
        """Return the delivery with that id, or every delivery of the event with that id."""
        entries = self._ledger.entries
        found = await entries.find(id_)
        return tuple([Detail(e, await entries.content(e.id), await entries.attempts(e.id)) for e in found])

    async def why(self, id_: UUID) -> tuple[Reason, ...]:
        """Explain the state of each delivery with that id."""
        find, overview = self._ledger.entries.find, self._ledger.overview
        entries = await find(id_)
        places, relays = await overview.states(), await overview.relays()
        about = self._configured.handed_over, await self.shadowed(entries), self._configured.timeouts
        reasons = []
        for entry in entries:
            policy = self._configured.policies.get(entry.destination, Policy())
            head = await _head(self._ledger, policy, entry)
            shared = {entry.event_id} if len(entries) > 1 else set[UUID]()
            if head is not None and head.status == "failed":
                shared |= {head.event_id} if len(await find(head.event_id)) > 1 else set()
            reasons.append(explain(entry, places, self._destinations, relays, head, shared, *about))
        return tuple(reasons)

    async def shadowed(self, entries: Iterable[Entry]) -> frozenset[UUID]:
        """Return the ids of those that were delivered in shadow: nothing was sent."""
        return await self._ledger.entries.shadowed([one.id for one in entries if one.status == "delivered"])

    async def dead_letters(self, limit: int = 50, cursor: UUID | None = None) -> Rows[DeadLetterRow]:
        """Return copies in dead-letter destinations, newest first, without discarded ones."""
        check_limit(limit)
        names = {one.dead_letter for one in self._destinations.values() if one.dead_letter is not None}
        filters = [Filter(status, name) for name in sorted(names) for status in IN_DEAD_LETTERS]
        page = _merged(
            [await self._ledger.entries.search(filter, limit, cursor) for filter in filters], limit
        )
        contents = await self._ledger.entries.contents([entry.id for entry in page.entries])
        return Rows(tuple(_dead_letter(e, contents.get(e.id)) for e in page.entries), page.cursor)


async def _head(ledger: SqlLedger, policy: Policy, entry: Entry) -> Entry | None:
    """Return the first open row of the entry's key, if it may be in the entry's way."""
    if entry.ordering_key is None or entry.status != "pending":
        return None
    if not policy.ordered and entry.state is not State.PARKED:
        return None
    return await ledger.entries.head(entry.destination, entry.ordering_key, block=policy.block)


def _merged(pages: Sequence[Page], limit: int) -> Page:
    """Merge searches, newest first, up to the first cursor: rows past it are unknown."""
    known = max((page.cursor for page in pages if page.cursor is not None), default=None)
    found = {e.id: e for page in pages for e in page.entries if known is None or e.id >= known}
    newest = sorted(found.values(), key=lambda entry: entry.id, reverse=True)
    return Page(tuple(newest[:limit]), newest[limit - 1].id if len(newest) > limit else known)


def _dead_letter(entry: Entry, content: Content | None) -> DeadLetterRow:
    values = (content and headers_of(content)) or {}
    texts = [values.get(f"relaybox-dead-letter-{name}") for name in ("from", "reason")]
    return DeadLetterRow(entry, *(text if isinstance(text, str) else None for text in texts))


def headers_of(content: Content) -> dict[str, Any] | None:
    """Return the stored headers, or None if they are not a JSON object."""
    with suppress(ValueError, RecursionError):
        headers = json.loads(content.headers)
        return headers if isinstance(headers, dict) else None
    return None


def _total(counts: Collection[Counts]) -> Counts:
    def known(name: str) -> list[Any]:
        return [value for one in counts if (value := getattr(one, name)) is not None]

    states = ("due", "scheduled", "parked", "sending", "delivered", "failed")
    numbers: dict[str, Any] = {name: sum(known(name)) for name in states}
    return Counts(
        **numbers,
        oldest_pending=min(known("oldest_pending"), default=None),
        oldest_seconds=max(known("oldest_seconds"), default=None),
        capped=frozenset[str]().union(*known("capped")),
    )


class CanaryRows:
    """The test events that relays send to a destination on a schedule."""

    def __init__(self, admin: Admin, ledger: SqlLedger, destination: str) -> None:
        self._admin = admin
        self._ledger = ledger
        self._destination = destination

    async def send(self) -> UUID:
        """Write a test event and return its id."""
        return await self._admin.test(self._destination, audited=False)

    async def look(self, id_: UUID) -> Entry | None:
        """Return the row with that id."""
        return next(iter(await self._ledger.entries.find(id_, exact=True)), None)

    async def left(self) -> Entry | None:
        """Return an undelivered test event of any relay."""
        for status in UNDELIVERED:
            filter = Filter(status, self._destination, aggregate_type="relaybox", aggregate_id=CANARY)
            if entries := (await self._admin.events(filter, limit=1)).entries:
                return entries[0]
        return None

    async def forget(self, id_: UUID) -> None:
        """Delete a failed test event."""
        await self._ledger.changes.forget(id_)
