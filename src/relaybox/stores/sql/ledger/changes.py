"""Operators' changes, each in one transaction with its audit row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any, TypeAlias
from uuid import UUID

from uuid_utils.compat import uuid7

from relaybox.core.event import TEST_TYPE
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row, Steps, ask
from relaybox.stores.ledger import BATCH, Audit, Entry, Policy
from relaybox.stores.sql.claims import keys_of, lock_lines, make_found_due, make_heads_due
from relaybox.stores.sql.expressions import Expressions
from relaybox.stores.sql.ledger.journal import audited
from relaybox.stores.sql.rows import to_json
from relaybox.stores.sql.store import Driver, Topic, driven

Policies: TypeAlias = Mapping[str, Policy]


class SqlChanges(Topic):
    """Changes rows and destinations."""

    def __init__(self, driver: Driver, sql: Statements, expressions: Expressions, notes: Statements) -> None:
        super().__init__(driver, sql)
        self._entry = expressions.entry
        self._store_sql = expressions.statements
        self._notes = notes

    async def retry(self, entries: Sequence[Entry], policies: Policies, audit: Audit) -> frozenset[UUID]:
        """Make failed rows due with attempts reset, and rows that back off due now; return changed ids."""
        return await self._change_rows("retry", entries, policies, audit)

    async def discard(self, entries: Sequence[Entry], policies: Policies, audit: Audit) -> frozenset[UUID]:
        """Discard failed and pending rows; the next row of each key becomes due."""
        return await self._change_rows("discard", entries, policies, audit)

    async def move(
        self, entries: Sequence[Entry], to: str, policies: Policies, audit: Audit
    ) -> frozenset[UUID]:
        """Move pending and failed rows; an ordered destination gets the first rows of each key instead."""
        moved: set[UUID] = set()
        ordered = _policy(policies, to).ordered
        for name in sorted({entry.destination for entry in entries}):
            part = [entry for entry in entries if entry.destination == name]
            if ordered:
                part = await self._first_of_keys(part)
            params = {"from_": name, "to": to, "ordered": ordered}
            moved |= await self._change_rows("move", part, policies, audit, **params)
        return frozenset(moved)

    async def replay(
        self, entries: Sequence[Entry], to: str | None, policies: Policies, audit: Audit
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
                    "keyed": _policy(policies, to or entry.destination).ordered,
                    "handed_over": _policy(policies, to or entry.destination).handed_over,
                }
                for copy, entry in copies.items()
            ]
            params = {"records": to_json(records), **self._seen(part), **audited(audit)}
            found = map(self.dialect.from_uuid, await self._change("replay", params))
            made |= {copies[copy].id: copy for copy in found}
        return made

    async def write_test(
        self,
        id_: UUID,
        destination: str,
        aggregate_id: str,
        payload: str,
        max_attempts: int,
        audit: Audit | None,
    ) -> None:
        """Write a test event for one destination, due now and unordered; ``payload`` is JSON."""
        own = self.dialect.to_uuid(id_)
        about = (destination, "relaybox", aggregate_id, TEST_TYPE, payload, None, None, "{}", None)
        queries = [self._store_sql.insert([(own, own, *about, str(id_), max_attempts, None)])]
        if audit is not None:
            queries.append(self._notes("note", affected=1, **audited(audit)))
        await self.run(partial(ask, queries), checked=True)

    @driven
    def forget(self, id_: UUID) -> Steps[None]:
        """Delete a failed row and its attempts, such as a test event's, without an audit row."""
        own = self.dialect.to_uuid(id_)
        yield [self.sql("forget_attempts_of", id=own), self.sql("forget", id=own)]

    async def pause(self, destination: str, reason: str, until: datetime | None, audit: Audit) -> None:
        """Stop all relays from claiming for the destination."""
        time = None if until is None else self.dialect.to_time(until)
        params = {"destination": destination, "reason": reason, "until": time, **audited(audit)}
        await self._change("pause", params, [self._store_sql("ensure_destination", destination=destination)])

    async def resume(self, destination: str, audit: Audit) -> bool:
        """End a pause and close the circuit; return whether anything changed."""
        return bool(await self._change("resume", {"destination": destination, **audited(audit)}))

    async def _first_of_keys(self, entries: Sequence[Entry]) -> list[Entry]:
        """Replace entries with the first rows of the same keys and statuses; keep those without a key."""
        alike = Counter((one.destination, one.ordering_key, one.status == "failed") for one in entries)
        queries = [
            self.sql("first_of_key", destination=name, key=key, failed=failed, limit=count, block=True)
            for (name, key, failed), count in alike.items()
            if key is not None
        ]
        found = await self.run(partial(ask, queries)) if queries else []
        first = [self._entry(row) for rows in found for row in rows]
        return [*first, *(entry for entry in entries if entry.ordering_key is None)]

    async def _change_rows(
        self, action: str, entries: Sequence[Entry], policies: Policies, audit: Audit, **params: Any
    ) -> frozenset[UUID]:
        changed: set[UUID] = set()
        for part in _batches(entries):
            ids = [self.dialect.to_uuid(entry.id) for entry in sorted(part, key=lambda entry: entry.id)]
            keys = keys_of(part)
            values = {"ids": ids, **params, **self._seen(part), **audited(audit)}
            heads = [
                make_heads_due(self._store_sql, name, of, _policy(policies, name).block)
                for name, of in sorted(keys.items())
            ]
            found = await self._change(action, values, lock_lines(self._store_sql, keys), heads)
            changed |= set(map(self.dialect.from_uuid, found))
        return frozenset(changed)

    def _seen(self, entries: Sequence[Entry]) -> Mapping[str, Any]:
        """Return what the entries share, to check their rows under the locks."""
        return {
            "statuses": sorted({entry.status for entry in entries}),
            "destinations": sorted({entry.destination for entry in entries}),
            "seen": self.dialect.to_time(max(max(entry.seen_at, entry.updated_at) for entry in entries)),
        }

    @driven
    def _change(
        self,
        action: str,
        params: Mapping[str, Any],
        before: Sequence[Query] = (),
        after: Sequence[Query] = (),
    ) -> Steps[list[Any]]:
        """Return the changed ids or names; ``before`` holds the locks that settles also take."""
        if self.dialect.one_statement:
            results = yield [*before, self.sql(action, **params), *after]
            return _first_values(results[len(before)])
        *_, found = yield [*before, self.sql(f"{action}_lock", **params)]
        if found:
            params = {**params, "ids": _first_values(found)}
            audit = self.sql("audit", affected=len(found), **params)
            _, _, *heads = yield [self.sql(f"{action}_write", **params), audit, *after]
            yield from make_found_due(self._store_sql, heads)
        return _first_values(found)


def _first_values(rows: Sequence[Row]) -> list[Any]:
    return [row[0] for row in rows]


def _policy(policies: Policies, name: str) -> Policy:
    return policies.get(name, Policy())


def _batches(entries: Sequence[Entry]) -> Iterator[Sequence[Entry]]:
    return (entries[start : start + BATCH] for start in range(0, len(entries), BATCH))
