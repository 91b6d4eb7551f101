"""The ledger in any SQL database: operators' queries and changes, on a store's connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.core.shadow import is_shadow
from relaybox.database.statements.delivery import Query
from relaybox.database.statements.ledger import next_names, texts
from relaybox.database.steps import Row, Steps, ask
from relaybox.stores.ledger import (
    BATCH,
    CAP,
    Attempt,
    Audit,
    Content,
    Counted,
    Counts,
    Entry,
    Filter,
    Lane,
    Mark,
    Page,
    Place,
    Relay,
    SingleEvent,
)
from relaybox.stores.sql.claims import keys_of, lock_lines, make_found_due, make_heads_due
from relaybox.stores.sql.journal import SqlJournal, audited
from relaybox.stores.sql.search import COLUMNS, Bounds, Search, shown
from relaybox.stores.sql.store import SqlStore, walk_names

_json = msgspec.json.Encoder(uuid_format="hex")


class SqlLedger(SqlJournal):
    """The ledger in a store's database; ``stores/ledger.py`` has the contract."""

    def __init__(self, store: SqlStore) -> None:
        super().__init__(store)
        dialect = self._dialect
        self._next_names = next_names(dialect.name)
        self._sql = self._own.others(texts(dialect.name, COLUMNS))
        self._search = Search(self._own)

    async def names(self) -> frozenset[str]:
        """Return every destination with pending, failed or delivered rows, or with a state."""
        return await self._driver.run(self._names)

    async def counts(self, names: Collection[str]) -> Mapping[str, Counts]:
        """Count the rows of each destination by state."""
        counts = {}
        for name in names:
            queries = self._search.count(name)
            *results, errors = await self._ask([*queries.values(), self._search.next_error(name)])
            parts = {part: rows[0] for part, rows in zip(queries, results, strict=True)}
            counts[name] = self._counts(parts, shown(errors[0][0]) if errors else None)
        return counts

    async def places(self) -> Mapping[str, Place]:
        """Return the destinations that have a state."""
        [rows] = await self._ask([self._sql("places")])
        return {row[0]: Place(*self._times(row, 1, 2, 6, 8)) for row in rows}

    async def relays(self) -> tuple[Relay, ...]:
        """Return the relays, last seen first."""
        [rows] = await self._ask([self._sql("relays")])
        return tuple(Relay(*self._times(row, 4, 5, 6, 7)) for row in rows)

    async def search(self, filter: Filter, limit: int, cursor: UUID | None = None) -> Page:
        """Return entries, newest first. A short page with a cursor has more to come."""
        return await self._driver.run(lambda: self._search.page(filter, limit, Bounds(below=cursor)))

    async def walk(self, filter: Filter, cursor: UUID | None, last: UUID, limit: int = BATCH) -> Page:
        """Return entries, oldest first, up to ``last``."""
        bounds = Bounds(above=cursor, last=last, ascending=True)
        return await self._driver.run(lambda: self._search.page(filter, limit, bounds))

    async def count(self, filter: Filter) -> Counted:
        """Count matching rows up to ``CAP``; a long search reads only its first windows."""
        return await self._driver.run(lambda: self._search.tally(filter))

    async def newest(self) -> UUID | None:
        """Return the id of the newest row."""
        [rows] = await self._ask([self._search.newest()])
        return self._dialect.from_uuid(rows[0][0]) if rows else None

    async def find(self, id_: UUID, *, exact: bool = False) -> tuple[Entry, ...]:
        """Return the delivery with that id, or (unless ``exact``) all of the event with that id."""
        return await self._driver.run(lambda: self._search.find(id_, exact=exact))

    async def content(self, id_: UUID) -> Content | None:
        """Return the content of a delivery."""
        [rows] = await self._ask([self._sql("content", id=self._dialect.to_uuid(id_))])
        return self._content(rows[0]) if rows else None

    async def contents(self, ids: Collection[UUID]) -> Mapping[UUID, Content]:
        """Return the contents of these deliveries."""
        [rows] = await self._ask([self._search.contents(ids)]) if ids else [[]]
        return {self._dialect.from_uuid(row[0]): self._content(row[1:]) for row in rows}

    async def shadowed(self, ids: Collection[UUID]) -> frozenset[UUID]:
        """Return which of these deliveries are in shadow."""
        [rows] = await self._ask([self._search.shadowed(ids)]) if ids else [[]]
        return frozenset(self._dialect.from_uuid(id_) for id_, headers in rows if is_shadow(headers))

    async def marks(self, consumer: str, after: str) -> tuple[Mark, ...]:
        """Return up to ``BATCH`` messages of a consumer's inbox after this id."""
        [rows] = await self._ask([self._search.marks(consumer, after, BATCH)])
        return tuple(Mark(*self._times(row, 1)) for row in rows)

    async def attempts(self, id_: UUID) -> tuple[Attempt, ...]:
        """Return the recorded failed attempts of a delivery, oldest first."""
        [rows] = await self._ask([self._sql("attempts", id=self._dialect.to_uuid(id_))])
        return tuple(Attempt(*self._times(row, 1)) for row in rows)

    async def head(self, destination: str, ordering_key: str, *, block: bool) -> Entry | None:
        """Return the first open row of a key."""
        query = self._sql("head", destination=destination, key=ordering_key, block=block)
        [rows] = await self._ask([query])
        return self._search.entry(rows[0]) if rows else None

    async def retry(
        self, entries: Sequence[Entry], lanes: Mapping[str, Lane], audit: Audit
    ) -> frozenset[UUID]:
        """Make failed rows due with attempts reset, and rows that back off due now; return changed ids."""
        return await self._change_rows("retry", entries, lanes, audit)

    async def discard(
        self, entries: Sequence[Entry], lanes: Mapping[str, Lane], audit: Audit
    ) -> frozenset[UUID]:
        """Discard failed and pending rows; the next row of each key becomes due."""
        return await self._change_rows("discard", entries, lanes, audit)

    async def move(
        self, entries: Sequence[Entry], to: str, lanes: Mapping[str, Lane], audit: Audit
    ) -> frozenset[UUID]:
        """Move pending and failed rows; an ordered destination gets the first rows of each key instead."""
        moved: set[UUID] = set()
        ordered = _lane(lanes, to).ordered
        for name in sorted({entry.destination for entry in entries}):
            part = [entry for entry in entries if entry.destination == name]
            if ordered:
                part = await self._first_of_keys(part)
            params = {"from_": name, "to": to, "ordered": ordered}
            moved |= await self._change_rows("move", part, lanes, audit, **params)
        return frozenset(moved)

    async def replay(
        self, entries: Sequence[Entry], to: str | None, lanes: Mapping[str, Lane], audit: Audit
    ) -> Mapping[UUID, UUID]:
        """Copy final rows as new ones that are due now; return each row's new id."""
        made: dict[UUID, UUID] = {}
        for part in _batches(entries):
            copies = {uuid7(): entry for entry in part}
            records = [
                {
                    "id": entry.id,
                    "copy": copy,
                    "origin": str(entry.id),
                    "target": to or entry.destination,
                    "keyed": _lane(lanes, to or entry.destination).ordered,
                    "handed_over": _lane(lanes, to or entry.destination).handed_over,
                }
                for copy, entry in copies.items()
            ]
            params = {"records": _json.encode(records).decode(), **self._seen(part), **audited(audit)}
            rows = await self._driver.run(partial(self._change, "replay", params))
            made |= {copies[copy].id: copy for copy in self._ids(rows)}
        return made

    async def write(self, destination: str, event: SingleEvent, audit: Audit | None) -> None:
        """Write an event for one destination, due now and unordered."""
        id_ = self._dialect.to_uuid(event.id)
        about = (event.aggregate_type, event.aggregate_id, event.event_type)
        carried = (event.payload, None, None, event.headers, None)
        row = (id_, id_, destination, *about, *carried, str(event.id), event.max_attempts, None)
        notes = [] if audit is None else [self._note(audit, 1)]
        await self._driver.run(partial(ask, [self._own.insert([row]), *notes]), checked=True)

    async def forget(self, id_: UUID) -> None:
        """Delete a failed row and its attempts, such as a test event's, without an audit row."""
        own = self._dialect.to_uuid(id_)
        await self._ask([self._sql("forget_attempts_of", id=own), self._sql("forget", id=own)])

    async def pause(self, destination: str, reason: str, until: datetime | None, audit: Audit) -> None:
        """Stop all relays from claiming for the destination."""
        time = None if until is None else self._dialect.to_time(until)
        params = {"destination": destination, "reason": reason, "until": time, **audited(audit)}
        before = [self._own("ensure_destination", destination=destination)]
        await self._driver.run(lambda: self._change("pause", params, before))

    async def resume(self, destination: str, audit: Audit) -> bool:
        """End a pause and close the circuit; return whether anything changed."""
        params = {"destination": destination, **audited(audit)}
        return bool(await self._driver.run(lambda: self._change("resume", params)))

    def _content(self, row: Row) -> Content:
        payload, data, encoding, headers = row
        if not self._dialect.typed:
            payload, encoding, headers = shown(payload), shown(encoding), shown(headers) or ""
            data = data if data is None or isinstance(data, bytes) else str(data).encode()
        return Content(payload, data, encoding, headers)

    def _names(self) -> Steps[frozenset[str]]:
        [rows, unrouted] = yield [self._sql("named"), self._sql("unrouted")]
        names = {row[0] for row in (*rows, *unrouted)}
        names.update((yield from walk_names(self._sql, *self._next_names)))
        return frozenset(name if isinstance(name, str) else str(shown(name)) for name in names)

    async def _first_of_keys(self, entries: Sequence[Entry]) -> list[Entry]:
        """Replace entries with the first rows of the same keys and statuses; keep those without a key."""
        alike = Counter((one.destination, one.ordering_key, one.status == "failed") for one in entries)
        queries = [
            self._sql("first_of_key", destination=name, key=key, failed=failed, limit=count, block=True)
            for (name, key, failed), count in alike.items()
            if key is not None
        ]
        found = await self._ask(queries) if queries else []
        first = [self._search.entry(row) for rows in found for row in rows]
        return [*first, *(entry for entry in entries if entry.ordering_key is None)]

    async def _change_rows(
        self, action: str, entries: Sequence[Entry], lanes: Mapping[str, Lane], audit: Audit, **params: Any
    ) -> frozenset[UUID]:
        changed: set[UUID] = set()
        for part in _batches(entries):
            ids = [self._dialect.to_uuid(entry.id) for entry in sorted(part, key=lambda entry: entry.id)]
            keys = keys_of(part)
            before = lock_lines(self._own, keys)
            values = {"ids": ids, **params, **self._seen(part), **audited(audit)}
            after = self._make_heads_due(keys, lanes)
            rows = await self._driver.run(partial(self._change, action, values, before, after))
            changed |= set(self._ids(rows))
        return frozenset(changed)

    def _seen(self, entries: Sequence[Entry]) -> Mapping[str, Any]:
        """Return what the entries share, to check their rows under the locks."""
        return {
            "statuses": sorted({entry.status for entry in entries}),
            "destinations": sorted({entry.destination for entry in entries}),
            "seen": self._dialect.to_time(max(max(entry.seen_at, entry.updated_at) for entry in entries)),
        }

    def _change(
        self,
        action: str,
        params: Mapping[str, Any],
        before: Sequence[Query] = (),
        after: Sequence[Query] = (),
    ) -> Steps[list[Row]]:
        """Return the changed ids or names; ``before`` holds the locks that settles also take."""
        if self._dialect.one_statement:
            results = yield [*before, self._sql(action, **params), *after]
            return results[len(before)]
        *_, found = yield [*before, self._sql(f"{action}_lock", **params)]
        if found:
            params = {**params, "ids": [row[0] for row in found]}
            audit = self._sql("audit", affected=len(found), **params)
            _, _, *heads = yield [self._sql(f"{action}_write", **params), audit, *after]
            yield from make_found_due(self._own, heads)
        return found

    def _make_heads_due(self, keys: Mapping[str, Collection[str]], lanes: Mapping[str, Lane]) -> list[Query]:
        return [
            make_heads_due(self._own, name, of, _lane(lanes, name).block) for name, of in sorted(keys.items())
        ]

    def _counts(self, parts: Mapping[str, Row], retrying: str | None) -> Counts:
        leased = {part: row[1] for part, row in parts.items()}
        pending = [self._times(parts[name], 2, 3, 4) for name in ("due", "scheduled", "parked")]
        born, seen = min(([*row[2:4]] for row in pending if row[2] is not None), default=(None, None))
        held = [(row[3] - row[4]).total_seconds() for row in pending if row[4] is not None]
        capped = {part for part, row in parts.items() if row[0] > CAP}
        numbers = {part: max(min(row[0], CAP) - leased[part], 0) for part, row in parts.items()}
        return Counts(
            **numbers,
            sending=sum(leased.values()),
            oldest_pending=born,
            oldest_seconds=None if born is None else max(0.0, (seen - born).total_seconds()),
            capped=frozenset(capped),
            retrying=retrying,
            sending_seconds=max(held, default=None),
        )

    def _ids(self, rows: Sequence[Row]) -> list[UUID]:
        return [self._dialect.from_uuid(row[0]) for row in rows]

    def _times(self, row: Row, *indexes: int) -> list[Any]:
        values = list(row)
        for index in indexes:
            values[index] = None if values[index] is None else self._dialect.from_time(values[index])
        return values


def _lane(lanes: Mapping[str, Lane], name: str) -> Lane:
    return lanes.get(name, Lane())


def _batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    return (entries[start : start + BATCH] for start in range(0, len(entries), BATCH))
