"""The actions of ``Admin``, as its base class: on given ids, or in batches on all that a filter finds.

Each batch is a transaction with its own audit row. An action that ends half-way leaves whole batches, and
running it again does the rest. A replay starts from the beginning, because replayed rows do not change.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any, Literal, TypeAlias, TypedDict, Unpack
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.core.event import TEST_TYPE
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, did_you_mean
from relaybox.operate.pace import Pace, never
from relaybox.stores.ledger import BATCH, Audit, Choice, Counted, Entry, Filter, Lane, SingleEvent, State
from relaybox.stores.sql.ledger import SqlLedger

Progress: TypeAlias = Callable[[int], None]
Stop: TypeAlias = Callable[[], bool]
Ready: TypeAlias = Callable[[Entry], bool]
Change: TypeAlias = Callable[[Sequence[Entry], Audit], Awaitable[Collection[UUID]]]
Action = Literal["retry", "replay", "discard", "move"]

NAMED = 100
"""Ids that an audit row lists; it counts all of them."""

CANARY = "canary"
"""The aggregate id of test events that no operator asked for."""

STATUSES: Mapping[str, tuple[Choice, ...]] = {
    "retry": ("failed",),
    "replay": ("delivered", "completed", "failed", "discarded"),
    "discard": ("failed", "pending", "due", "scheduled", "parked"),
    # Failed ones first: if they block their keys, no later row of a key may get ahead of them.
    "move": ("failed", "pending"),
}
"""The statuses that each action's filter may have, the first by default; a move takes one after the other."""


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


@dataclass
class _Way:
    details: Mapping[str, Any]
    dry_run: bool = False
    progress: Progress = no_progress
    rate: float | None = None
    stop: Stop = never

    def __post_init__(self) -> None:
        self.pace = Pace(self.rate, self.stop)


class AdminActions:
    """The half of ``Admin`` that changes something."""

    def __init__(self, ledger: SqlLedger, destinations: Iterable[Destination], actor: str) -> None:
        self._ledger = ledger
        self._destinations = {destination.name: destination for destination in destinations}
        self._lanes: dict[str, Lane] = {}
        for name, one in self._destinations.items():
            ordered = one.ordered or one.handed_over
            self._lanes[name] = Lane(ordered, one.on_failed == "block", one.handed_over)
        self._handed_over = frozenset(name for name, lane in self._lanes.items() if lane.handed_over)
        self._actor = actor

    async def retry(self, what: What, **options: Unpack[Options]) -> Done:
        """Restart failed deliveries with all their attempts, at their old place in the order.

        An id may also name one that backs off: it becomes due now.
        """
        return await self._act(
            "retry",
            what,
            lambda entry: entry.state is State.FAILED or entry.backing_off,
            lambda entries, audit: self._ledger.retry(entries, self._lanes, audit),
            _Way({}, **options),
        )

    async def discard(self, what: What, **options: Unpack[Options]) -> Done:
        """Give up failed and pending deliveries, by default failed; the next one of each key becomes due."""
        return await self._act(
            "discard",
            what,
            lambda entry: entry.status in ("pending", "failed") and entry.state is not State.SENDING,
            lambda entries, audit: self._ledger.discard(entries, self._lanes, audit),
            _Way({}, **options),
        )

    async def replay(self, what: What, *, to: str | None = None, **options: Unpack[Options]) -> Done:
        """Send final deliveries again, each as a new row of the same event, with a header that says so.

        A filter finds delivered ones unless its status says otherwise.
        """
        self._check_target("replay", to)
        return await self._act(
            "replay",
            what,
            lambda entry: entry.status != "pending" and (to or entry.destination) in self._destinations,
            lambda entries, audit: self._ledger.replay(entries, to, self._lanes, audit),
            _Way({} if to is None else {"to": to}, **options),
        )

    async def move(self, from_: str, to: str, **options: Unpack[Options]) -> Done:
        """Give pending and failed deliveries to another destination, where failed ones stay failed.

        Deliveries that are being sent stay, and count as skipped.
        """
        await self._check_known(from_)
        self._check_target("move", to, from_)
        way, done = _Way({}, **options), Done()
        passed_over: datetime | None = None

        async def change(entries: Sequence[Entry], audit: Audit) -> Collection[UUID]:
            nonlocal passed_over
            ids = {entry.id for entry in entries}
            if way.dry_run or not ids:
                return ids
            moved = await self._ledger.move(entries, to, self._lanes, audit)
            if not moved <= ids:
                passed_over = entries[0].seen_at
            return moved

        for status in STATUSES["move"]:
            filter = Filter(status, from_)
            audit = Audit(self._actor, "move", {"from": from_, "to": to, "status": status})
            done = await self._go_through(filter, change, audit, way, done)
            # Ids need not follow a key's order: rows that others overtook are behind the walk, so walk again.
            while passed_over is not None and not way.pace.stopped:
                filter, passed_over = replace(filter, until=filter.until or passed_over), None
                done = await self._go_through(filter, change, audit, way, done)
        return replace(done, skipped=max(done.skipped, (await self._ledger.counts([from_]))[from_].sending))

    async def count(self, action: Action, filter: Filter, *, to: str | None = None) -> Counted:
        """Count the rows that the action would affect, up to ``ledger.CAP``; raise as the action would."""
        if action == "move":
            from_ = filter.destination or ""
            await self._check_known(from_)
            self._check_target(action, to, from_)
            parts = [await self._ledger.count(Filter(status, from_)) for status in STATUSES[action]]
            return Counted(sum(one.count for one in parts), any(one.capped for one in parts))
        if action == "replay":
            self._check_target(action, to)
        return await self._ledger.count(await self._checked(action, filter))

    async def pause(self, destination: str, reason: str, until: datetime | None = None) -> None:
        """Stop all sends to a destination, until that moment or until it is resumed."""
        await self._check_known(destination)
        self._check_relayed(destination, "pause the connector instead")
        details = {"destination": destination, "reason": reason, "until": until}
        await self._ledger.pause(destination, reason, until, Audit(self._actor, "pause", details))

    async def resume(self, destination: str) -> bool:
        """End a pause and close an open circuit, so the next claim gets through. True if there was one."""
        await self._check_known(destination)
        audit = Audit(self._actor, "resume", {"destination": destination})
        return await self._ledger.resume(destination, audit)

    async def test(self, destination: str, *, audited: bool = True) -> UUID:
        """Emit a test event, without order, and return its id. A relay's canary is not ``audited``."""
        _check_named(destination, self._destinations)
        self._check_relayed(destination, "emit an event instead")
        payload = {"test": True, "destination": destination, "sent_by": self._actor}
        event = SingleEvent(
            id=uuid7(),
            aggregate_type="relaybox",
            aggregate_id="test" if audited else CANARY,
            event_type=TEST_TYPE,
            payload=msgspec.json.encode(payload).decode(),
            headers="{}",
            max_attempts=self._destinations[destination].max_attempts,
        )
        audit = Audit(self._actor, "test", {"destination": destination, "event_id": event.id})
        await self._ledger.write(destination, event, audit if audited else None)
        return event.id

    async def note(self, action: str, details: Mapping[str, Any]) -> None:
        """Audit an action that changes no row, such as a login."""
        await self._ledger.note(Audit(self._actor, action, details))

    async def _act(self, action: str, what: What, ready: Ready, change: Change, way: _Way) -> Done:
        """Apply an action to rows that are ready for it: a filter's in batches, named ones at once."""

        async def act(entries: Sequence[Entry], audit: Audit) -> Collection[UUID]:
            chosen = [entry for entry in entries if ready(entry)]
            if way.dry_run or not chosen:
                return [entry.id for entry in chosen]
            return await change(chosen, audit)

        if not isinstance(what, Filter):
            named = what if isinstance(what, Named) else Named(what)
            done = await self._act_on_named(action, named, act, way.details)
            way.progress(done.affected)
            return done
        filter = await self._checked(action, what)
        audit = Audit(self._actor, action, {"filter": described(filter), **way.details})
        return await self._go_through(filter, act, audit, way, Done())

    async def _go_through(self, filter: Filter, act: Change, audit: Audit, way: _Way, done: Done) -> Done:
        began: datetime | None = None
        async for found in self.walk(filter, None if way.dry_run else way.pace):
            began = began or found[0].seen_at
            # If a clock is ahead, ids do not show what was created later, such as a replay's own copies.
            part = [entry for entry in found if entry.created_at <= began]
            if not await way.pace.turn(0 if way.dry_run else len(part)):
                return replace(done, stopped=True)
            changed = len(await act(part, audit))
            done = replace(done, affected=done.affected + changed, skipped=done.skipped + len(part) - changed)
            way.progress(done.affected)
        return done

    async def _act_on_named(self, action: str, what: Named, act: Change, details: Mapping[str, Any]) -> Done:
        await self._check_known(what.destination)
        about: dict[str, Any] = {"ids": list(what.ids[:NAMED])}
        if what.destination is not None:
            about["destination"] = what.destination
        found: dict[UUID, list[Entry]] = {}
        for id_ in what.ids:
            rows = await self._ledger.find(id_, exact=what.exact)
            found[id_] = [one for one in rows if what.destination in (None, one.destination)]
        entries = {entry.id: entry for of_one in found.values() for entry in of_one}
        audit = Audit(self._actor, action, {**about, **details})
        changed = frozenset(await act(tuple(entries.values()), audit))
        known = {id_: {entry.id for entry in named} for id_, named in found.items() if named}
        return Done(
            affected=len(changed),
            skipped=len(entries) - len(changed),
            unknown=tuple(id_ for id_ in found if id_ not in known),
            idle=tuple(id_ for id_, own in known.items() if changed.isdisjoint(own)),
            shared=tuple(id_ for id_, own in known.items() if len(own) > 1),
            destinations=tuple(sorted({entries[id_].destination for id_ in changed})),
        )

    async def walk(self, filter: Filter, pace: Pace | None = None) -> AsyncIterator[Sequence[Entry]]:
        """Yield what matches the filter, each once, oldest first, without later arrivals.

        With a pace, yield batches of the allowed size, read when they may be processed.
        """
        last = await self._ledger.newest()
        size = BATCH if pace is None else pace.size(BATCH)
        cursor: UUID | None = None
        while last is not None:
            page = await self._ledger.walk(filter, cursor, last, size)
            if page.entries and pace is not None and pace.waits:
                await pace.turn(0)
                page = await self._ledger.walk(filter, cursor, last, size)
            if page.entries:
                yield page.entries
            if page.cursor is None:
                break
            cursor = page.cursor

    async def _checked(self, action: str, filter: Filter) -> Filter:
        filter = await self._check_filter(filter)
        statuses = STATUSES[action]
        if filter.status not in (None, *statuses):
            raise ConfigError(f"status = {filter.status!r}: {action} takes {', '.join(statuses)}")
        return replace(filter, status=filter.status or statuses[0])

    async def _check_filter(self, filter: Filter) -> Filter:
        """Check the filter. A filter by fingerprint finds failed rows only."""
        await self._check_known(filter.destination)
        if filter.fingerprint is None:
            return filter
        if filter.status not in (None, "failed"):
            raise ConfigError(f"status = {filter.status!r}: only failed deliveries have a fingerprint")
        return replace(filter, status="failed")

    async def _check_known(self, name: str | None) -> None:
        if name is not None and name not in self._destinations:
            _check_named(name, self._destinations.keys() | await self._ledger.names())

    def _check_relayed(self, name: str, fix: str) -> None:
        if name in self._handed_over:
            raise ConfigError(f"destination {name!r} is read by Debezium, no relay sends there; {fix}")

    def _check_target(self, action: str, to: str | None, from_: str | None = None) -> None:
        """Raise if rows cannot go there: Debezium sees only inserts, and emit makes its message key."""
        if to is None and action == "move":
            raise ConfigError("to: name the destination that gets the deliveries")
        if to is None:
            return
        _check_named(to, self._destinations)
        if to in self._handed_over:
            own = "replay its own deliveries without it"
            fix = f"{own if action == 'replay' else 'name another destination'}, or emit the events again"
            raise ConfigError(f"to = {to!r}: Debezium takes only what is emitted to it; {fix}")
        if from_ == to:
            raise ConfigError(f"to = {to!r}: the rows are there already; name another destination")


def described(filter: Filter) -> dict[str, Any]:
    """Return a filter's criteria as audits and operations record them."""
    return {name: value for name, value in asdict(replace(filter, rules=None)).items() if value is not None}


def _check_named(name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ConfigError(f"no destination is called {name!r}{did_you_mean(name, known)}")
