"""Removal of old rows, for ``relay/upkeep/prune.py``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from relaybox.database.statements.delivery import Query
from relaybox.database.statements.upkeep import PROMPT
from relaybox.database.steps import Row, Steps
from relaybox.stores.sql.rows import listed
from relaybox.stores.sql.store import Topic, driven, walk_names
from relaybox.stores.sql.upkeep.term import LONG_AGO, ago, prune_by_age, under_term
from relaybox.stores.upkeep import History, Slice


class SqlPrune(Topic):
    """Finds and removes old rows, batch by batch."""

    @driven
    def kept(self) -> Steps[tuple[str, ...]]:
        """Return the destinations that may have delivered rows, configured or not."""
        return tuple((yield from walk_names(self.sql, "kept")))

    @driven
    def delivered(
        self, term: int, destination: str, age: float, after: datetime | None, limit: int
    ) -> Steps[Slice[datetime] | None]:
        """Remove rows delivered more than ``age`` seconds ago, oldest first."""
        since = self.dialect.to_time(after or LONG_AGO)
        words = {"destination": destination, "seconds": ago(age), "since": since, "limit": limit}
        gone = yield from self._remove(term, "delivered", **words)
        if gone is None:
            return None
        times = (self.dialect.from_time(row[0]) for row in gone)
        return Slice(len(gone), max(times) if len(gone) == limit else None)

    @driven
    def discarded(
        self, term: int, age: Callable[[str], float], after: UUID | None, limit: int
    ) -> Steps[Slice[UUID] | None]:
        """Check the next ``limit`` rows, and remove those discarded longer ago than ``age`` allows."""
        led, rows = yield self._walk(term, "walk_events", after, limit)
        if not led:
            return None
        discarded: dict[str, list[Any]] = defaultdict(list)
        for id_, destination, status in rows:
            if status == "discarded":
                discarded[destination].append(id_)
        changed = 0
        for destination, ids in discarded.items():
            words = {"ids": listed(self.dialect, ids), "seconds": ago(age(destination))}
            gone = yield from self._remove(term, "discarded", **words)
            if gone is None:
                return None
            changed += len(gone)
        return Slice(changed, self._last(rows, limit))

    @driven
    def orphans(self, term: int, after: UUID | None, limit: int) -> Steps[Slice[UUID] | None]:
        """Check the next ``limit`` records of attempts, and remove those without a delivery."""
        led, rows = yield self._walk(term, "walk_attempts", after, limit)
        orphans = list({id_: None for id_, delivery in rows if delivery is None})
        if led and orphans:
            ids = listed(self.dialect, orphans)
            led, _ = yield [self.sql("fence", term=term), self.sql("forget_attempts", ids=ids, term=term)]
        return Slice(len(orphans), self._last(rows, limit)) if led else None

    @driven
    def keys(
        self, term: int, age: float, after: datetime | None, limit: int
    ) -> Steps[Slice[datetime] | None]:
        """Check the next ``limit`` idempotency keys older than ``age`` seconds.

        Remove those whose event has been final for that long. Others restart their age: from when the event
        became final, or from now while it is open.
        """
        name = "keys" if self.dialect.one_statement else "find_keys"
        since = self.dialect.to_time(after or LONG_AGO)
        rows = yield from under_term(self.sql, term, name, seconds=ago(age), since=since, limit=limit)
        if rows is None:
            return None
        if self.dialect.one_statement:
            [[gone, seen, last]] = rows
            return Slice(gone, last if seen == limit else None)
        time, old, kept = self.dialect.from_time, [], []
        for event_type, key, _, final, cut in rows:
            if final is None or time(final) < time(cut):
                old.append((event_type, key))
            else:
                kept.append(self.sql("keep_key", event_type=event_type, key=key, at=final))
        if kept:
            yield kept
        yield from self._forget("forget_keys", old)
        return Slice(len(old), time(rows[-1][2]) if len(rows) == limit else None)

    @driven
    def history(self, term: int, history: History, age: float, limit: int) -> Steps[int | None]:
        """Remove rows older than ``age`` seconds; return the number of rows."""
        if self.dialect.one_statement or history != "inbox":
            return (yield from prune_by_age(self.sql, term, history, age, limit))
        found = yield from under_term(self.sql, term, "find_marks", seconds=ago(age), limit=limit)
        if found is None:
            return None
        yield from self._forget("forget_marks", found)
        return len(found)

    def _remove(self, term: int, which: str, **words: Any) -> Steps[list[Row] | None]:
        """Remove deliveries and their attempts; return when they were delivered."""
        found = yield from under_term(self.sql, term, which, **words)
        if found is None or self.dialect.one_statement:
            return found
        ids = [row[0] for row in found]
        if ids:
            forget = [self.sql("forget_attempts", ids=ids), self.sql("remove", ids=ids)]
            yield [*self._keys_of(found), *forget]
        return [row[-1:] for row in found]

    def _keys_of(self, removed: Iterable[Row]) -> Iterator[Query]:
        """Renew the idempotency keys of rows that became final long after their emit."""
        for _, event_id, event_type, key, created, final, _ in removed:
            # Rows edited by hand are removed as well.
            with suppress(ValueError, TypeError, AttributeError):
                lasted = self.dialect.from_time(final) - self.dialect.from_time(created)
                if lasted > timedelta(seconds=PROMPT) and key.replace("-", "") != event_id:
                    yield self.sql("keep_key", event_type=event_type, key=key, at=final)

    def _walk(self, term: int, name: str, after: UUID | None, limit: int) -> list[Query]:
        page = self.sql(name, after=self.dialect.to_uuid(after or UUID(int=0)), limit=limit)
        return [self.sql("fence", term=term), page]

    def _last(self, rows: Sequence[Row], limit: int) -> UUID | None:
        """Return the last valid id of a full page, where the next page continues."""
        for id_, *_ in reversed(rows if len(rows) == limit else ()):
            with suppress(ValueError, TypeError, AttributeError):
                return self.dialect.from_uuid(id_)
        return None

    def _forget(self, forget: str, found: Sequence[Sequence[Any]]) -> Steps[None]:
        """Remove only keys that could be locked: a caller's transaction may hold one for long."""
        keys: dict[str, list[str]] = defaultdict(list)
        for of, key in found:
            keys[of].append(key)
        for of, several in keys.items():
            yield [self.sql(forget, of=of, keys=several)]
