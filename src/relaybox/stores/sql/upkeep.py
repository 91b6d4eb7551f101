"""Upkeep in any SQL database, on the connections of its store."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from operator import itemgetter
from typing import Any
from uuid import UUID

import msgspec

from relaybox.core.event import beside
from relaybox.database.pools.places import UPKEEP
from relaybox.database.statements.delivery import Query
from relaybox.database.statements.upkeep import PROMPT, texts
from relaybox.database.steps import Row, Steps, ask
from relaybox.errors import RowRefused
from relaybox.stores.sql.claims import lock_lines
from relaybox.stores.sql.rows import addressable, number
from relaybox.stores.sql.store import SqlStore, walk_names
from relaybox.stores.upkeep import (
    Beat,
    History,
    Member,
    Minute,
    Router,
    Said,
    Setting,
    Slice,
    Turn,
    Waiting,
)

FORGOTTEN = timedelta(days=1)
"""How long after its last heartbeat a member is forgotten."""
OLDEST = 100 * 365 * 86_400.0
"""Seconds; every database can subtract them from its clock."""
LONG_AGO = datetime(1970, 1, 1, tzinfo=UTC)
KEYS = 1000
ROWS_OF_A_KEY = 5
"""Rows read per key if the database cannot step from key to key."""
ROUTED = 100
"""Events routed per transaction; all are read with their payloads."""
log = logging.getLogger(__name__)

_json = msgspec.json.Encoder(uuid_format="hex")


class SqlUpkeep:
    """Upkeep in a store's database; ``stores/upkeep.py`` has the contract."""

    def __init__(self, store: SqlStore) -> None:
        self._run = partial(store.driver.run, lane=UPKEEP)
        self._refused: set[Any] = set()
        """Ids of unrouted rows that violate a constraint and were logged."""
        # A late heartbeat makes a relay count as dead.
        self._run_vital = store.vital.run
        self._store_sql = store.steps.statements
        self._dialect = self._store_sql.dialect
        self._sql = self._store_sql.others(texts(self._dialect.name))

    async def beat(self, member: Member, live: float, *, joins: bool = True) -> Beat:
        """Record a heartbeat, and return the members seen within ``live`` seconds.

        ``joins`` commits the heartbeat first. Members not seen for a day are forgotten.
        """
        words = {"me": member.name, "host": member.host, "pid": member.pid, "version": member.version}
        be_seen = [self._sql("be_seen", **words)]
        if joins:
            await self._run_vital(partial(ask, be_seen))
            be_seen = []
        return await self._run_vital(lambda: self._see(timedelta(seconds=live), be_seen))

    async def leave(self, name: str) -> None:
        """Leave the members."""
        await self._run_vital(partial(ask, [self._sql("leave", me=name)]))

    async def lead(self, name: str, seconds: float) -> int | None:
        """Lead, or keep leading, for ``seconds``; return the term, or None while another member leads."""
        names = ("open_election", "lead", "show_leader", "leading")
        queries = [self._sql(statement, me=name, seconds=seconds) for statement in names]
        *_, rows = await self._run_vital(partial(ask, queries))
        return rows[0][0] if rows else None

    async def current_term(self) -> int | None:
        """Return the term of the current leader, or None."""
        [rows] = await self._run(partial(ask, [self._sql("current_term")]))
        return rows[0][0] if rows else None

    async def resign(self, name: str) -> None:
        """Stop leading, if this member leads."""
        queries = [self._sql("resign", me=name), self._sql("hide_leader", me=name)]
        await self._run_vital(partial(ask, queries))

    async def said(self) -> tuple[Said, ...]:
        """Return what relays reported about destinations, sorted by name."""
        # The time comes last, so that no age is negative.
        rows, [[moment]] = await self._run(partial(ask, [self._sql("said"), self._sql("now")]))
        now = self._dialect.from_time(moment)
        said = []
        for destination, relay, setting, at in rows:
            # Ignore a report that was edited by hand, or that a later release wrote in another form.
            with suppress(msgspec.MsgspecError):
                age = (now - self._dialect.from_time(at)).total_seconds()
                said.append(Said(destination, _read(setting), relay, age))
        return tuple(said)

    async def known(self) -> dict[str, frozenset[str]]:
        """Return the destinations that each relay reported about."""
        [rows] = await self._run(partial(ask, [self._sql("known")]))
        known: dict[str, set[str]] = defaultdict(set)
        for relay, destination in rows:
            known[relay].add(destination)
        return {relay: frozenset(names) for relay, names in known.items()}

    async def say(self, relay: str, settings: Mapping[str, Setting], outdated: Sequence[Said]) -> None:
        """Report settings in one transaction; forget outdated reports, unless renewed or from a member."""
        # In a fixed order, so that two relays do not deadlock.
        says = [
            self._sql("say", me=relay, destination=name, setting=_json.encode(setting).decode())
            for name, setting in sorted(settings.items())
        ]
        forgets = [
            self._sql("unsay", destination=one.destination, relay=one.relay, seconds=-one.age)
            for one in outdated
        ]
        await self._run(partial(ask, [*says, *forgets]))

    async def fall_silent(self, relay: str) -> None:
        """Mark a relay's reports as old, without forgetting them."""
        at = self._dialect.to_time(LONG_AGO)
        await self._run(partial(ask, [self._sql("fall_silent", me=relay, at=at)]))

    async def kept(self) -> tuple[str, ...]:
        """Return the destinations that may have delivered rows, configured or not."""
        return tuple(await self._run(partial(walk_names, self._sql, "kept")))

    async def prune_delivered(
        self, term: int, destination: str, age: float, after: datetime | None, limit: int
    ) -> Slice[datetime] | None:
        """Remove rows delivered more than ``age`` seconds ago, oldest first."""
        since = self._dialect.to_time(after or LONG_AGO)
        words = {"destination": destination, "seconds": _ago(age), "since": since, "limit": limit}
        return await self._run(lambda: self._prune_delivered(term, words))

    async def prune_discarded(
        self, term: int, age: Callable[[str], float], after: UUID | None, limit: int
    ) -> Slice[UUID] | None:
        """Check the next ``limit`` rows, and remove those discarded longer ago than ``age`` allows."""
        return await self._run(lambda: self._prune_discarded(term, age, after, limit))

    async def prune_orphans(self, term: int, after: UUID | None, limit: int) -> Slice[UUID] | None:
        """Check the next ``limit`` records of attempts, and remove those without a delivery."""
        return await self._run(lambda: self._prune_orphans(term, after, limit))

    async def prune_keys(
        self, term: int, age: float, after: datetime | None, limit: int
    ) -> Slice[datetime] | None:
        """Check the next ``limit`` idempotency keys older than ``age`` seconds.

        Remove those whose event has been final for that long. Others restart their age: from when the event
        became final, or from now while it is open.
        """
        since = self._dialect.to_time(after or LONG_AGO)
        words = {"seconds": _ago(age), "since": since, "limit": limit}
        return await self._run(lambda: self._prune_keys(term, words))

    async def prune_history(self, term: int, history: History, age: float, limit: int) -> int | None:
        """Remove rows older than ``age`` seconds; return the number of rows."""
        words = {"seconds": _ago(age), "limit": limit}
        return await self._run(lambda: self._prune_history(term, history, words))

    async def sweep(self, destination: str, block: bool, after: str | None, limit: int) -> Slice[str]:
        """Make the parked heads of the next ``limit`` keys due, under the locks of settles; any relay may."""
        return await self._run(lambda: self._sweep(destination, block, after, limit))

    async def unpark(self, destination: str, limit: int) -> int:
        """Make parked rows of an unordered destination due; return the number of rows."""
        return await self._run(lambda: self._unpark(destination, limit))

    async def route(self, term: int, router: Router, after: Turn | None, limit: int) -> Slice[Turn] | None:
        """Check the next ``limit`` unrouted events, and route those that a route takes, by position.

        If one is locked, raise and route none of its batch: a later event of its key must not overtake it.
        """
        # Ask the routes between two transactions: a route may be the application's function.
        seen = await self._run(lambda: self._unrouted(term, after, limit))
        if seen is None:
            return None
        wanted = [
            (number(position), id_)
            for id_, _, position, event_type in seen
            # A row that cannot be addressed would be removed without a copy: leave it.
            if addressable(self._dialect, id_) and isinstance(event_type, str) and router.takes(event_type)
        ]
        ids, changed = [id_ for _, id_ in sorted(wanted, key=itemgetter(0))], 0
        for start in range(0, len(ids), ROUTED):
            routed = await self._route_some(term, router, ids[start : start + ROUTED])
            if routed is None:
                return None
            changed += routed
        if len(seen) < limit:
            return Slice(changed, None)
        _, due, position, _ = seen[-1]
        return Slice(changed, (self._dialect.from_time(due), position))

    async def _route_some(self, term: int, router: Router, ids: Sequence[Any]) -> int | None:
        """Route these together; if the database refuses a row, one by one, so that only that row stays."""
        waiting = await self._run(partial(self._waiting, ids))
        try:
            return await self._run(partial(self._route, term, _targets(waiting, router)), checked=True)
        except RowRefused as error:
            if len(ids) == 1:
                if ids[0] not in self._refused:
                    # PostgreSQL appends the row with its payload.
                    problem = str(error).partition(" DETAIL:")[0]
                    log.warning("row %s stays unrouted, because it breaks a constraint: %s", ids[0], problem)
                self._refused.update(ids)
                return 0
        changed = 0
        for id_ in ids:
            routed = await self._route_some(term, router, [id_])
            if routed is None:
                return None
            changed += routed
        return changed

    async def record(self, minutes: Sequence[Minute]) -> None:
        """Write the counts over those of the same relay and minute."""
        await self._run(partial(ask, list(map(self._record, minutes))))

    def _record(self, row: Minute) -> Query:
        encoded = {"minute": self._dialect.to_time(row.minute), "lag": _json.encode(row.lag).decode()}
        return self._sql("record", **(asdict(row) | encoded))

    def _see(self, live: timedelta, first: Sequence[Query]) -> Steps[Beat]:
        # The time comes first: a member seen between two round trips must not count as too old.
        *_, [[moment]], rows = yield [*first, self._sql("now"), self._sql("members")]
        now = self._dialect.from_time(moment)
        ages = {name: now - self._dialect.from_time(seen_at) for name, seen_at in rows}
        gone = [name for name, age in ages.items() if age > FORGOTTEN]
        if gone:
            yield [self._sql("forget_members", names=gone, seconds=-FORGOTTEN.total_seconds())]
        return Beat(tuple(sorted(name for name, age in ages.items() if age < live)), now)

    def _fence(self, term: int) -> Query:
        return self._sql("fence", term=term)

    def _remove(self, term: int, which: str, words: dict[str, Any]) -> Steps[list[Row] | None]:
        """Remove deliveries and their attempts; return when they were delivered."""
        if self._dialect.one_statement:
            led, gone = yield [self._fence(term), self._sql(which, term=term, **words)]
            return gone if led else None
        [led] = yield [self._fence(term)]
        if not led:
            return None
        [found] = yield [self._sql(which, **words)]
        ids = [row[0] for row in found]
        if ids:
            forget = [self._sql("forget_attempts", ids=ids), self._sql("remove", ids=ids)]
            yield [*self._keys_of(found), *forget]
        return [row[-1:] for row in found]

    def _keys_of(self, removed: Iterable[Row]) -> Iterator[Query]:
        """Renew the idempotency keys of rows that became final long after their emit."""
        for _, event_id, event_type, key, created, final, _ in removed:
            # Rows edited by hand are removed as well.
            with suppress(ValueError, TypeError, AttributeError):
                lasted = self._dialect.from_time(final) - self._dialect.from_time(created)
                if lasted > timedelta(seconds=PROMPT) and key.replace("-", "") != event_id:
                    yield self._sql("keep_key", event_type=event_type, key=key, at=final)

    def _prune_delivered(self, term: int, words: dict[str, Any]) -> Steps[Slice[datetime] | None]:
        gone = yield from self._remove(term, "delivered", words)
        if gone is None:
            return None
        times = (self._dialect.from_time(row[0]) for row in gone)
        return Slice(len(gone), max(times) if len(gone) == words["limit"] else None)

    def _prune_discarded(
        self, term: int, age: Callable[[str], float], after: UUID | None, limit: int
    ) -> Steps[Slice[UUID] | None]:
        led, rows = yield [self._fence(term), self._walk("walk_events", after, limit)]
        if not led:
            return None
        discarded: dict[str, list[Any]] = defaultdict(list)
        for id_, destination, status in rows:
            if status == "discarded":
                discarded[destination].append(id_)
        changed = 0
        for destination, ids in discarded.items():
            words = {"ids": self._ids(ids), "seconds": _ago(age(destination))}
            gone = yield from self._remove(term, "discarded", words)
            if gone is None:
                return None
            changed += len(gone)
        return Slice(changed, self._last(rows, limit))

    def _prune_orphans(self, term: int, after: UUID | None, limit: int) -> Steps[Slice[UUID] | None]:
        led, rows = yield [self._fence(term), self._walk("walk_attempts", after, limit)]
        orphans = list({id_: None for id_, delivery in rows if delivery is None})
        if led and orphans:
            forget = self._sql("forget_attempts", ids=self._ids(orphans), term=term)
            led, _ = yield [self._fence(term), forget]
        return Slice(len(orphans), self._last(rows, limit)) if led else None

    def _walk(self, name: str, after: UUID | None, limit: int) -> Query:
        return self._sql(name, after=self._dialect.to_uuid(after or UUID(int=0)), limit=limit)

    def _last(self, rows: Sequence[Row], limit: int) -> UUID | None:
        """Return the last valid id of a full page, where the next page continues."""
        for id_, *_ in reversed(rows if len(rows) == limit else ()):
            with suppress(ValueError, TypeError, AttributeError):
                return self._dialect.from_uuid(id_)
        return None

    def _ids(self, ids: Iterable[Any]) -> Any:
        return f"{{{','.join(map(str, ids))}}}" if self._dialect.one_statement else list(ids)

    def _prune_history(self, term: int, history: History, words: dict[str, Any]) -> Steps[int | None]:
        if self._dialect.one_statement:
            led, gone = yield [self._fence(term), self._sql(history, term=term, **words)]
            return len(gone) if led else None
        [led] = yield [self._fence(term)]
        if not led:
            return None
        if history == "inbox":
            [found] = yield [self._sql("find_marks", **words)]
            yield from self._forget("forget_marks", found)
            return len(found)
        _, [[changed]] = yield [self._sql(history, **words), self._sql("changed")]
        return int(changed)

    def _prune_keys(self, term: int, words: dict[str, Any]) -> Steps[Slice[datetime] | None]:
        if self._dialect.one_statement:
            led, [[gone, seen, last]] = yield [self._fence(term), self._sql("keys", term=term, **words)]
            return Slice(gone, last if seen == words["limit"] else None) if led else None
        [led] = yield [self._fence(term)]
        if not led:
            return None
        [found] = yield [self._sql("find_keys", **words)]
        time, gone, kept = self._dialect.from_time, [], []
        for event_type, key, _, final, cut in found:
            if final is None or time(final) < time(cut):
                gone.append((event_type, key))
            else:
                kept.append(self._sql("keep_key", event_type=event_type, key=key, at=final))
        if kept:
            yield kept
        yield from self._forget("forget_keys", gone)
        return Slice(len(gone), time(found[-1][2]) if len(found) == words["limit"] else None)

    def _forget(self, forget: str, found: Sequence[Sequence[Any]]) -> Steps[None]:
        """Remove only keys that could be locked: a caller's transaction may hold one for long."""
        keys: dict[str, list[str]] = defaultdict(list)
        for of, key in found:
            keys[of].append(key)
        for of, several in keys.items():
            yield [self._sql(forget, of=of, keys=several)]

    def _sweep(self, destination: str, block: bool, first: str | None, limit: int) -> Steps[Slice[str]]:
        """If few rows are parked, check their keys; otherwise step from key to key."""
        page = min(limit, KEYS)
        if first is None:
            [rows] = yield [self._sql("parked", destination=destination, limit=page)]
            if len(rows) < page:
                keys = list({key: None for [key] in rows if key is not None})
                return Slice((yield from self._make_stuck_due(destination, block, keys)), None)
            first = ""
        for _ in range(0, limit, page):
            keys, first = yield from self._next_keys(destination, first, page)
            made = yield from self._make_stuck_due(destination, block, keys)
            if made or first is None:
                return Slice(made, first)
        return Slice(0, first)

    def _next_keys(self, destination: str, first: str, limit: int) -> Steps[tuple[list[str], str | None]]:
        words = {"destination": destination, "first": first}
        if self._dialect.returning:
            [rows] = yield [self._sql("next_keys", **words, limit=limit + 1)]
            keys = [key for [key] in rows]
            return keys[:limit], keys[limit] if len(keys) > limit else None
        [rows] = yield [self._sql("keys_of_next_rows", **words, limit=limit * ROWS_OF_A_KEY)]
        keys = [key for [key] in rows]
        # In the order of bytes, the next text after a text is that text with a NUL.
        return keys, f"{keys[-1]}\0" if keys else None

    def _make_stuck_due(self, destination: str, block: bool, keys: Sequence[str]) -> Steps[int]:
        """Take the locks only if a head is parked, and then check again."""
        words = {"destination": destination, "block": block}
        stuck: list[Row] = []
        if keys:
            [stuck] = yield [self._sql("stuck", **words, keys=_json.encode(keys).decode())]
        if not stuck:
            return 0
        words |= {"keys": _json.encode([key for [key] in stuck]).decode()}
        return (yield from self._make_due(destination, self._sql("make_stuck_due", **words)))

    def _unpark(self, destination: str, limit: int) -> Steps[int]:
        words = {"destination": destination}
        [parked] = yield [self._sql("parked", **words, limit=1)]
        if not parked:
            return 0
        return (yield from self._make_due(destination, self._sql("unpark", **words, limit=limit)))

    def _make_due(self, destination: str, find: Query) -> Steps[int]:
        """Make rows due; without a single statement for it, find and lock them first. Return their number."""
        *_, found = yield [*lock_lines(self._store_sql, [destination]), find]
        if found and not self._dialect.one_statement:
            yield [self._sql("make_due", ids=[row[0] for row in found])]
        return len(found)

    def _unrouted(self, term: int, after: Turn | None, limit: int) -> Steps[list[Row] | None]:
        if after is None:
            page = self._sql("unrouted", limit=limit)
        else:
            since, position = self._dialect.to_time(after[0]), after[1]
            page = self._sql("unrouted_after", since=since, position=position, limit=limit)
        led, rows = yield [self._fence(term), page]
        return rows if led else None

    def _waiting(self, ids: Sequence[Any]) -> Steps[list[tuple[Any, Waiting]]]:
        [rows] = yield [self._sql("waiting", ids=self._ids(ids))]
        waiting = []
        for id_, event_id, *rest in rows:
            # A row edited by hand stays unrouted, without holding up the others.
            with suppress(ValueError, TypeError, AttributeError):
                waiting.append((id_, Waiting(self._dialect.from_uuid(event_id), *rest)))
        return waiting

    def _route(self, term: int, targets: Sequence[dict[str, Any]]) -> Steps[int | None]:
        """Check again under the locks, because an operator may have changed rows meanwhile."""
        if not targets:
            return 0
        if self._dialect.one_statement:
            route = self._sql("route", term=term, targets=_json.encode(targets).decode())
            led, gone = yield [self._fence(term), route]
            return len(gone) if led else None
        [led] = yield [self._fence(term)]
        if not led:
            return None
        [found] = yield [self._sql("lock_unrouted", ids=list({target["id"]: None for target in targets}))]
        ids = [row[0] for row in found]
        if ids:
            targets = [target for target in targets if target["id"] in ids]
            route = self._sql("route", targets=_json.encode(targets).decode())
            yield [route, self._sql("forget_attempts", ids=ids), self._sql("remove", ids=ids)]
        return len(ids)


def _targets(waiting: Iterable[tuple[Any, Waiting]], router: Router) -> list[dict[str, Any]]:
    """Return a record per new row; ``line`` keeps the order of an event's targets."""
    return [
        {
            "id": id_,
            "copy": beside(event.event_id, line + 1),
            "line": line,
            "destination": target.destination,
            "max_attempts": target.max_attempts,
            "final": target.final,
            # Leave it out if it is None: some JSON functions read null as text.
            **({} if target.ordering_key is None else {"ordering_key": target.ordering_key}),
        }
        for id_, event in waiting
        for line, target in enumerate(router.targets(event))
    ]


def _read(setting: Any) -> Setting:
    if isinstance(setting, str | bytes):
        return msgspec.json.decode(setting, type=Setting)
    return msgspec.convert(setting, Setting)


def _ago(age: float) -> float:
    return -min(age, OLDEST)
