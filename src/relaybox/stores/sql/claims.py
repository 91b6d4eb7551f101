"""Claims rows, and handles ordering keys for claims, settles and operators."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, TypeAlias
from uuid import uuid4

from relaybox.core import ordering
from relaybox.core.event import Delivery
from relaybox.core.ordering import Candidate
from relaybox.database.dialects import Dialect
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row, Steps
from relaybox.stores.ledger import Entry
from relaybox.stores.sql.rows import POSITION, Unread, candidates, nameable, to_json, without_unaddressable
from relaybox.stores.store import Held, Want

Claimed: TypeAlias = tuple[list[Row], int, list[Row]]
"""The rows of a claim, the number of parked rows, and the destination's row if nothing was leased."""

UNION_LENGTH = 200
"""SELECTs per statement; SQLite allows at most 500."""
_position = itemgetter(POSITION)


def lock_settles(sql: Statements, destination: str) -> Query:
    """Return the lock that serializes the settles of a destination.

    Without it, two settles of one key each take the other's row for the head, and the next is never due.
    """
    return sql("lock_settles" if sql.dialect.one_statement else "lock_destination", destination=destination)


def lock_lines(sql: Statements, destinations: Collection[str]) -> list[Query]:
    """Return the locks that exclude claims and settles of these destinations, in the order all code uses."""
    locks = [
        sql(name, destination=destination)
        for destination in sorted(destinations)
        for name in ("ensure_destination", "lock_destination")
    ]
    if sql.dialect.one_statement:
        locks += [lock_settles(sql, destination) for destination in sorted(destinations)]
    return locks


def make_heads_due(sql: Statements, destination: str, keys: Collection[str], block: bool) -> Query:
    """Make the heads due; only find them where an UPDATE would wait for an uncommitted head."""
    name = "make_heads_due" if sql.dialect.returning else "parked_heads"
    return sql(name, destination=destination, keys=to_json(list(keys)), block=block)


def make_found_due(sql: Statements, results: Sequence[list[Row]]) -> Steps[None]:
    """Make the heads due that ``make_heads_due`` only found."""
    found = {row[0] for rows in results for row in rows if row[0] is not None}
    if found and not sql.dialect.returning:
        yield [sql("make_due", ids=sorted(found))]


def keys_of(rows: Iterable[Delivery | Entry]) -> dict[str, dict[str, None]]:
    """Return the distinct ordering keys of each destination."""
    keys: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.ordering_key is not None:
            keys.setdefault(row.destination, {})[row.ordering_key] = None
    return keys


def fail_unread(sql: Statements, unread: Sequence[Unread], want: Want) -> Steps[None]:
    """Fail unreadable rows, so that they do not hold up the others."""
    fail = [sql("fail_unreadable", id=row.id, text=row.text_id, error=row.error) for row in unread]
    keys = {row.key for row in unread if nameable(row.key)}
    block = want.on_failed == "block"
    queries = [lock_settles(sql, want.destination), *fail] if keys else fail
    heads = [make_heads_due(sql, want.destination, keys, block)] if keys else []
    results = yield [*queries, *heads]
    yield from make_found_due(sql, results[len(queries) :])


class OneStatement:
    """PostgreSQL: a claim is one statement; if ordered, it follows a lock on the destination's row."""

    def __init__(self, statements: Statements) -> None:
        self._sql = statements

    def unordered(self, want: Want) -> Steps[Claimed]:
        """Claim with one statement."""
        lease = _lease(want)
        if want.only is not None:
            claim = self._sql("claim_chosen", **lease)
        elif want.suspects:
            claim = self._sql("claim", **lease)
        else:
            name = "claim_light" if want.light else "claim_unsuspected"
            claim = self._sql(name, since=want.since, **lease)
        rows, *places = yield [claim, *self._explain(want)]
        return _leased(rows, lease), 0, places[0] if places else []

    def ordered(self, want: Want) -> Steps[Claimed]:
        """Lock the destination's row, so that the claim sees earlier commits; without a row it is empty."""
        lock = self._sql("lock_destination", destination=want.destination)
        block = want.on_failed == "block"
        name = "claim_ordered" if want.only is None else "claim_chosen_ordered"
        spread = want.limit if want.spread is None else want.spread
        run = want.limit if want.run is None else want.run
        lease = _lease(want)
        claim = self._sql(name, spread=spread, run=run, block=block, **lease)
        while True:
            locked, rows, *places = yield [lock, claim, *self._explain(want)]
            if locked:
                break
            yield [self._sql("ensure_destination", destination=want.destination)]
        claimed = [row[1:] for row in rows if row[1] is not None]
        return _leased(claimed, lease), rows[0][0], places[0] if places else []

    def _explain(self, want: Want) -> Iterator[Query]:
        if want.explain:
            yield self._sql("read_destination", destination=want.destination)


class Stepwise:
    """MySQL and SQLite: a claim is a few short statements, and ``ordering.py`` decides."""

    def __init__(self, statements: Statements) -> None:
        self._sql = statements
        self._dialect = statements.dialect

    def unordered(self, want: Want) -> Steps[Claimed]:
        """Read a window, lock its free rows by id, lease, read.

        A locking scan also locks the row after its end, which the next destination's claim then misses. So
        one follows only if other sessions hold part of a full window.
        """
        [rows] = yield [self._window(want)]
        window, failed = yield from self._addressable(want, rows)
        locked = yield from self._lock(want, [row.id for row in window])
        sizes = {row.id: row.size for row in locked if row.free}
        mine = [row._replace(size=sizes[row.id]) for row in window if row.id in sizes]
        if want.only is None and len(mine) < len(rows) == want.limit:
            [rows] = yield [self._sql("due_locked", limit=want.limit, **_line(want))]
            mine, more = yield from self._addressable(want, rows)
            failed += more
        return (yield from self._take(want, ordering.unordered(mine, want.limit, want.bytes), failed))

    def ordered(self, want: Want) -> Steps[Claimed]:
        """Lock the destination's row, read a window, lock heads and runs, lease, park, read."""
        yield from self._lock_destination(want.destination)
        [rows] = yield [self._window(want)]
        window, failed = yield from self._addressable(want, rows)
        if not window:
            return (yield from self._take(want, [], failed))
        heads = yield from self._heads(want, window)
        runs = yield from self._runs(want, heads, window)
        members = [row for run in runs.values() for row in run]
        locked = yield from self._lock(want, [row.id for row in (*members, *window)])
        sizes = {row.id: row.size for row in locked if row.free}
        choice = ordering.choose(window, heads, runs, sizes, want.limit, want.bytes)
        if choice.park:
            yield [self._sql("park", ids=choice.park)]
        return (yield from self._take(want, choice.take, len(choice.park) + failed))

    def _addressable(self, want: Want, rows: Sequence[Row]) -> Steps[tuple[list[Candidate], int]]:
        """Return the candidates that a statement can address; fail and count the others."""
        named, unread = without_unaddressable(self._dialect, rows)
        if unread:
            yield from fail_unread(self._sql, unread, want)
        return candidates(self._dialect, named), len(unread)

    def _window(self, want: Want) -> Query:
        if want.only is None:
            return self._sql("due", limit=want.limit, **_line(want))
        return self._sql("due_of_chosen", limit=len(want.only), **_line(want))

    def _lock_destination(self, destination: str) -> Steps[None]:
        lock = self._sql("lock_destination", destination=destination)
        [locked] = yield [lock]
        if not locked:
            yield [self._sql("ensure_destination", destination=destination), lock]

    def _heads(self, want: Want, window: Sequence[Candidate]) -> Steps[dict[str | None, Candidate]]:
        keys = list({row.key: None for row in window if row.key is not None})
        if not keys:
            return {}
        block = want.on_failed == "block"
        params = {"destination": want.destination, "keys": to_json(keys), "block": block}
        [rows] = yield [self._sql("heads", **params)]
        found = [row[0] for row in rows if row[0] is not None]
        locked = yield from self._lock(want, found, "lock_heads")
        # A head that cannot be addressed blocks its key until it is due and fails.
        unnamed = {
            key: Candidate(id_, key, 0, free=False, suspect=0)
            for key, [id_] in zip(keys, rows, strict=True)
            if isinstance(id_, bytes)
        }
        return unnamed | {head.key: head for head in locked}

    def _runs(
        self, want: Want, heads: dict[str | None, Candidate], window: Sequence[Candidate]
    ) -> Steps[dict[str | None, list[Candidate]]]:
        only = None if want.only is None else {self._dialect.to_uuid(id_) for id_ in want.only}
        free = [head for head in heads.values() if head.free and (only is None or head.id in only)]
        due = Counter(row.key for row in window)
        shares = {h.key: ordering.share(want.limit, len(heads), due[h.key], want.run) for h in free}
        if max(shares.values(), default=1) == 1:
            return ordering.runs(free, ())
        block = want.on_failed == "block"
        common = {**_line(want), "block": block}
        records = [{"key": h.key, "start": h.position, "share": shares[h.key], **common} for h in free]
        parts = [records[start : start + UNION_LENGTH] for start in range(0, len(records), UNION_LENGTH)]
        results = yield [self._sql.union("run", part) for part in parts]
        return ordering.runs(free, candidates(self._dialect, [row for rows in results for row in rows]), only)

    def _lock(self, want: Want, ids: Sequence[Any], name: str = "lock") -> Steps[list[Candidate]]:
        if not ids:
            return []
        [rows] = yield [self._sql(name, ids=list(dict.fromkeys(ids)), suspects=want.suspects)]
        return candidates(self._dialect, rows)

    def _take(self, want: Want, ids: list[Any], parked: int) -> Steps[Claimed]:
        """Lease the rows and read them; if there are none, read the reason."""
        if not ids:
            [places] = yield [self._sql("read_destination", destination=want.destination)]
            return [], parked, places
        token = self._dialect.to_uuid(uuid4())
        lease = self._sql("lease", ids=ids, token=token, owner=want.owner, seconds=want.lease)
        _, rows = yield [lease, self._sql("read", ids=ids)]
        return rows, parked, []


def _line(want: Want) -> dict[str, Any]:
    line = {"destination": want.destination, "probe": want.probe, "suspects": want.suspects}
    return line if want.only is None else {**line, "only": to_json(list(set(want.only)))}


def _lease(want: Want) -> dict[str, Any]:
    return {
        **_line(want),
        "limit": want.limit,
        "bytes": want.bytes,
        "owner": want.owner,
        "seconds": want.lease,
        "token": uuid4(),
    }


def _leased(rows: Sequence[Row], lease: dict[str, Any]) -> list[Row]:
    same = (lease["destination"], lease["token"], lease["owner"])
    return [(*row, *same) for row in sorted(rows, key=_position)]


def held_by(dialect: Dialect, want: Want, row: Row) -> Held | None:
    """Return why a destination's row holds the claim, or None."""
    paused_at, paused_until, pause_reason, circuit, circuit_until, circuit_reason, now = row
    if paused_at is not None and (paused_until is None or paused_until > now):
        return Held("paused", _seconds(dialect, now, paused_until), pause_reason)
    if circuit != "closed" and not want.probe:
        return Held(circuit, _seconds(dialect, now, circuit_until), circuit_reason)
    return None


def _seconds(dialect: Dialect, now: Any, until: Any) -> float | None:
    if until is None:
        return None
    left = dialect.from_time(until) - dialect.from_time(now)
    return max(0.0, left.total_seconds())
