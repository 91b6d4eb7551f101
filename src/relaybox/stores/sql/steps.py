"""What a store does, as steps.

The statements of one yield are atomic where the driver can send them in one round trip; if they meet a lock,
``Locked`` is thrown into the generator. A driver that cannot runs the whole generator in one transaction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple, TypeAlias
from uuid import UUID, uuid4

import msgspec
from uuid_utils.compat import uuid7

from relaybox.core import ordering
from relaybox.core.event import Delivery, Status
from relaybox.core.ordering import Candidate
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried, wait
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row, Steps
from relaybox.errors import Locked
from relaybox.stores.sql.delivered import OfLease, by_lease
from relaybox.stores.sql.rows import POSITION, Unread, candidates, read, without_unaddressable
from relaybox.stores.store import (
    Claim,
    DeadLetter,
    Held,
    OnFailed,
    Settlement,
    Want,
    bury,
    is_dead_letter,
    used_up,
)

Claimed: TypeAlias = tuple[list[Row], int, list[Row]]
"""The rows of a claim, how many others were parked, and the destination's own row if nothing was leased."""

ERROR_LENGTH = 2_000
UNION_LENGTH = 200
"""SQLite takes no more than 500 SELECTs in one statement."""
# Every database reads a UUID from its 32 digits; those that keep it as text keep these.
_json = msgspec.json.Encoder(uuid_format="hex")


class Settled(NamedTuple):
    """The ids whose lease was lost, whether the next of some key can be claimed now, and what was left
    because somebody has locked it.
    """

    lost: frozenset[UUID]
    due: bool
    left: frozenset[UUID] = frozenset()


class StoreSteps:
    """Claim, settle and extend for one database."""

    def __init__(self, statements: Statements) -> None:
        self.statements = statements
        self.dialect = statements.dialect
        self._claiming = (OneStatement if self.dialect.one_statement else Stepwise)(statements)

    def claim(self, want: Want) -> Steps[Claim]:
        """Lease due rows, and fail those whose relays died in all of their attempts."""
        claim = self._claiming.ordered if want.ordered else self._claiming.unordered
        rows, parked, places = yield from claim(want)
        deliveries, behind, unread = read(self.dialect, rows, want.ordered)
        if unread:
            parked += len(unread)
            yield from fail_unread(self.statements, unread, want)
            yield from self.settle([Settlement(one, Released()) for one in behind], want.on_failed)
        if failed := used_up(deliveries):
            try:
                buried = [Settlement(delivery, bury(delivery)) for delivery in failed]
                yield from self.settle(buried, want.on_failed, want.dead_letter)
            except Locked:
                # They are leased already, and the relay that holds them fails them.
                return Claim(deliveries, parked=parked)
            deliveries = tuple(delivery for delivery in deliveries if not delivery.exhausted)
            return Claim(deliveries, failed=failed, parked=parked)
        held = None if deliveries or parked or not places else self._held(want, places[0])
        return Claim(deliveries, parked=parked, held=held)

    def _held(self, want: Want, place: Row) -> Held | None:
        paused_at, paused_until, pause_reason, circuit, circuit_until, circuit_reason, now = place
        if paused_at is not None and (paused_until is None or paused_until > now):
            return Held("paused", self._seconds(now, paused_until), pause_reason)
        if circuit != "closed" and not want.probe:
            return Held(circuit, self._seconds(now, circuit_until), circuit_reason)
        return None

    def _seconds(self, now: Any, until: Any) -> float | None:
        if until is None:
            return None
        left = self.dialect.from_time(until) - self.dialect.from_time(now)
        return max(0.0, left.total_seconds())

    def settle(
        self,
        settlements: Sequence[Settlement],
        on_failed: OnFailed,
        dead_letter: DeadLetter | None = None,
    ) -> Steps[Settled]:
        """Write outcomes and make the next of each key due, in one transaction."""
        settlements = _each_once(settlements)
        keys = keys_of(settlements)
        queries = [lock_settles(self.statements, name) for name in sorted(keys)]
        outcomes = {type(settlement.outcome) for settlement in settlements}
        if Delivered in outcomes and len(outcomes) > 1:
            queries += self._lock_rows(settlements)
        delivered: list[OfLease] = []
        if self.dialect.one_statement and Delivered in outcomes:
            delivered = by_lease(settlements)
            settlements = [s for s in settlements if type(s.outcome) is not Delivered]
        first = len(queries)
        queries += [self._deliver(one) for one in delivered]
        answers = list(self._settle_others(queries, settlements, dead_letter))
        results = yield [*queries, *self._make_heads_due(keys, on_failed)]
        heads = results[len(queries) :]
        yield from make_found_due(self.statements, heads)
        lost = self._lost([s.delivery for s in settlements], [results[index] for index in answers])
        lost = lost.union(*(one.lost(results[first + at]) for at, one in enumerate(delivered)))
        due = any(due for [[due]] in heads) if self.dialect.one_statement else bool(keys)
        return Settled(lost, due)

    def settle_free(
        self,
        settlements: Sequence[Settlement],
        on_failed: OnFailed,
        dead_letter: DeadLetter | None = None,
    ) -> Steps[Settled]:
        """Settle as ``settle`` does, but leave rows that somebody has locked.

        So too all of a key whose next row is locked: it could not be made due, and nothing else would.
        """
        keys = keys_of(settlements)
        ids = sorted({self.dialect.to_uuid(settlement.delivery.id) for settlement in settlements})
        block = on_failed == "block"
        behind: dict[Any, tuple[str, str]] = {}
        if keys:
            locks = [lock_settles(self.statements, name) for name in sorted(keys)]
            results = yield [*locks, *(self._next_of_keys(name, of, block, ids) for name, of in keys.items())]
            for name, rows in zip(keys, results[len(locks) :], strict=True):
                behind |= {id_: (name, key) for key, id_ in rows if id_ is not None}
        looked_at = self._ids([*ids, *behind])
        there, free = yield [self.statements(name, ids=looked_at) for name in ("rows_there", "rows_free")]
        locked = {id_ for [id_] in there} - {id_ for [id_] in free}
        stuck = {of for id_, of in behind.items() if id_ in locked}
        locked_ids = {self.dialect.from_uuid(id_) for id_ in locked}
        left = frozenset(
            delivery.id
            for delivery, _ in settlements
            if delivery.id in locked_ids or (delivery.destination, delivery.ordering_key) in stuck
        )
        rest = [settlement for settlement in settlements if settlement.delivery.id not in left]
        if not rest:
            return Settled(frozenset(), False, left)
        settled = yield from self.settle(rest, on_failed, dead_letter)
        return settled._replace(left=left)

    def _next_of_keys(self, destination: str, keys: Collection[str], block: bool, ids: list[Any]) -> Query:
        listed = _json.encode(list(keys)).decode()
        words = {"destination": destination, "keys": listed, "block": block, "ids": self._ids(ids)}
        return self.statements("next_of_keys", **words)

    def _ids(self, ids: list[Any]) -> Any:
        return _array(map(str, ids)) if self.dialect.one_statement else ids

    def _deliver(self, delivered: OfLease) -> Query:
        name = "deliver" if delivered.keep else "delete"
        count = len(delivered.deliveries)
        if delivered.lease is not None:
            ids = sorted(delivery.id.hex for delivery in delivered.deliveries)
            return self.statements(f"{name}_lease", ids=_array(ids), token=delivered.lease, count=count)
        pairs = sorted((delivery.id.hex, delivery.lease_token.hex) for delivery in delivered.deliveries)
        listed, tokens = map(_array, zip(*pairs, strict=True))
        return self.statements(name, ids=listed, tokens=tokens, count=count)

    def _lock_rows(self, settlements: Sequence[Settlement]) -> Iterator[Query]:
        """Ahead of several statements, each of which takes its own rows in the order of their ids: two
        transactions would come to wait for each other's.
        """
        ids = sorted(settlement.delivery.id.hex for settlement in settlements)
        if self.dialect.one_statement:
            yield self.statements("lock_rows", ids=_array(ids))
        elif not self.dialect.returning:
            yield self.statements("lock_rows", ids=ids)

    def _settle_others(
        self, queries: list[Query], settlements: Sequence[Settlement], dead_letter: DeadLetter | None
    ) -> Iterator[int]:
        deleted = [s for s in settlements if isinstance(s.outcome, Delivered) and not s.outcome.keep]
        kept = [s for s in settlements if not isinstance(s.outcome, Delivered) or s.outcome.keep]
        if kept:
            yield self._settle_kept(queries, kept, dead_letter)
        if deleted:
            yield self._add_fenced(queries, "forget_attempts", "delete", items=self._items(deleted))

    def _settle_kept(
        self, queries: list[Query], kept: Sequence[Settlement], dead_letter: DeadLetter | None
    ) -> int:
        names = ["settle"]
        params: dict[str, Any] = {"items": self._items(kept, copy=dead_letter is not None)}
        if any(isinstance(s.outcome, Retried | Failed) for s in kept):
            names.insert(0, "record_attempts")
        if dead_letter is not None and any(isinstance(s.outcome, Failed) for s in kept):
            names.insert(0, "copy_failed")
            params |= {
                "dead_letter": dead_letter.destination,
                "max_attempts": dead_letter.max_attempts,
                "ordered": dead_letter.ordered,
            }
        return self._add_fenced(queries, *names, **params)

    def extend(self, deliveries: Sequence[Delivery], lease: float) -> Steps[Settled]:
        """Move the end of leases, but leave rows that somebody has locked: most often they are settled."""
        items = self._items([Settlement(delivery, Released()) for delivery in deliveries])
        if self.dialect.returning:
            [held] = yield [self.statements("extend", items=items, seconds=lease)]
            left = [id_ for id_, extended in held if not extended]
        else:
            held, rows = yield [self.statements(name, items=items) for name in ("mine_now", "mine_free")]
            free = {id_ for [id_] in rows}
            left = [id_ for [id_] in held if id_ not in free]
            if free:
                yield [self.statements("extend", ids=sorted(free), seconds=lease)]
        return Settled(self._lost(deliveries, [held]), False, frozenset(map(self.dialect.from_uuid, left)))

    def hold_alone(self, delivery: Delivery, alone: bool) -> Steps[None]:
        """Have the death of the relay that holds this row count, or no longer."""
        own = {"id": self.dialect.to_uuid(delivery.id), "token": self.dialect.to_uuid(delivery.lease_token)}
        yield [self.statements("hold_alone", alone=alone, **own)]

    def _add_fenced(self, queries: list[Query], *names: str, **params: Any) -> int:
        """Add statements for the rows that are still ours; where the result is that holds those rows' ids.

        The last statement ends or moves the leases: the others go ahead of it.
        """
        if not self.dialect.returning:
            names = ("mine", *names)
        answer = len(queries) + (len(names) - 1 if self.dialect.returning else 0)
        queries += [self.statements(name, **params) for name in names]
        return answer

    def _make_heads_due(self, keys: Mapping[str, Collection[str]], on_failed: OnFailed) -> list[Query]:
        block = on_failed == "block"
        return [make_heads_due(self.statements, name, of, block) for name, of in keys.items()]

    def _items(self, settlements: Sequence[Settlement], *, copy: bool = False) -> str:
        return _json.encode(
            [
                {
                    "id": delivery.id,
                    "token": delivery.lease_token,
                    "attempt": delivery.attempts,
                    "relay": delivery.lease_owner,
                    **_effect(outcome),
                    **({"copy": uuid7()} if copy and is_dead_letter(delivery, outcome) else {}),
                }
                # In the order of ids, so that no two statements wait for each other's rows.
                for delivery, outcome in sorted(settlements, key=lambda s: s.delivery.id.int)
            ]
        ).decode()

    def now(self) -> Steps[datetime]:
        """The time by the database's clock."""
        [[[now]]] = yield [self.statements("now")]
        return self.dialect.from_time(now)

    def _lost(self, deliveries: Sequence[Delivery], results: Sequence[list[Row]]) -> frozenset[UUID]:
        # An id comes back at most as often as it was sent, so equal numbers mean that none is missing.
        if sum(map(len, results)) == len(deliveries):
            return frozenset()
        ours = {self.dialect.from_uuid(row[0]) for rows in results for row in rows}
        return frozenset(delivery.id for delivery in deliveries if delivery.id not in ours)


def _each_once(settlements: Sequence[Settlement]) -> Sequence[Settlement]:
    # Positions, because to hash and compare ids takes long.
    if len({settlement.delivery.position for settlement in settlements}) == len(settlements):
        return settlements
    return list({(s.delivery.position, s.delivery.lease_token.int): s for s in settlements}.values())


def _array(values: Iterable[str]) -> str:
    return f"{{{','.join(values)}}}"


def lock_settles(sql: Statements, destination: str) -> Query:
    """Lock what lets settles of a destination come one after the other.

    Two relays may settle rows of one key at the same moment, one of them late. Each would take the other's
    row for the head, and neither would make the next one due.
    """
    return sql("lock_settles" if sql.dialect.one_statement else "lock_destination", destination=destination)


def lock_lines(sql: Statements, destinations: Collection[str]) -> list[Query]:
    """Lock out the claims and the settles of these destinations, in the order in which everybody does."""
    locks = [
        sql(name, destination=destination)
        for destination in sorted(destinations)
        for name in ("ensure_destination", "lock_destination")
    ]
    if sql.dialect.one_statement:
        locks += [lock_settles(sql, destination) for destination in sorted(destinations)]
    return locks


def make_heads_due(sql: Statements, destination: str, keys: Collection[str], block: bool) -> Query:
    """Where an UPDATE would wait for a head that is not committed yet, the heads are only found."""
    name = "make_heads_due" if sql.dialect.returning else "parked_heads"
    return sql(name, destination=destination, keys=_json.encode(list(keys)).decode(), block=block)


def make_found_due(sql: Statements, results: Sequence[list[Row]]) -> Steps[None]:
    """What is left to do where heads were only found."""
    found = {row[0] for rows in results for row in rows if row[0] is not None}
    if found and not sql.dialect.returning:
        yield [sql("make_due", ids=sorted(found))]


def fail_unread(sql: Statements, unread: Sequence[Unread], want: Want) -> Steps[None]:
    """So that the others need not wait for them."""
    fail = [sql("fail_unreadable", id=row.id, text=row.text_id, error=row.error) for row in unread]
    keys = {row.key for row in unread if isinstance(row.key, str)}
    block = want.on_failed == "block"
    queries = [lock_settles(sql, want.destination), *fail] if keys else fail
    heads = [make_heads_due(sql, want.destination, keys, block)] if keys else []
    results = yield [*queries, *heads]
    yield from make_found_due(sql, results[len(queries) :])


class OneStatement:
    """PostgreSQL: a claim is one statement; when ordered, after the lock on the destination's row."""

    def __init__(self, statements: Statements) -> None:
        self._sql = statements

    def unordered(self, want: Want) -> Steps[Claimed]:
        """One statement."""
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
        """The lock is a statement of its own so that the next one sees what was committed before it.

        Without a row to lock, the claim takes nothing.
        """
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
    """MySQL and SQLite: a claim is a few short statements, decided on by ``ordering.py``."""

    def __init__(self, statements: Statements) -> None:
        self._sql = statements
        self._dialect = statements.dialect

    def unordered(self, want: Want) -> Steps[Claimed]:
        """Look at a window, lock what nobody else has of it, lease, read.

        A scan that locks also locks, for a moment, the row behind its end. That is the first one of the next
        destination, whose claim would not see it. So rows are locked by their ids, and by a scan only where
        others have part of a full window.
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
        """Lock the destination's row, look at a window, lock heads and runs, lease, park, read."""
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
        """The candidates that a statement can name, and how many others were failed."""
        named, unread = without_unaddressable(self._dialect, rows)
        if unread:
            yield from fail_unread(self._sql, unread, want)
        return candidates(self._dialect, named), len(unread)

    def _window(self, want: Want) -> Query:
        if want.only is None:
            return self._sql("due", limit=want.limit, **_line(want))
        # All of them: keys that have to wait must not fill the window for the others.
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
        params = {"destination": want.destination, "keys": _json.encode(keys).decode(), "block": block}
        [rows] = yield [self._sql("heads", **params)]
        found = [row[0] for row in rows if row[0] is not None]
        locked = yield from self._lock(want, found, "lock_heads")
        # One that cannot be named cannot be looked at either; in its time it will be due, and failed.
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
        """Lease the rows and read them; without any, read why there may be none."""
        if not ids:
            [places] = yield [self._sql("read_destination", destination=want.destination)]
            return [], parked, places
        token = self._dialect.to_uuid(uuid4())
        lease = self._sql("lease", ids=ids, token=token, owner=want.owner, seconds=want.lease)
        _, rows = yield [lease, self._sql("read", ids=ids)]
        return rows, parked, []


def keys_of(settlements: Sequence[Settlement]) -> dict[str, dict[str, None]]:
    """The ordering keys of each destination, each once."""
    keys: dict[str, dict[str, None]] = {}
    for delivery, _ in settlements:
        if delivery.ordering_key is not None:
            keys.setdefault(delivery.destination, {})[delivery.ordering_key] = None
    return keys


def _line(want: Want) -> dict[str, Any]:
    line = {"destination": want.destination, "probe": want.probe, "suspects": want.suspects}
    return line if want.only is None else {**line, "only": _json.encode(list(set(want.only))).decode()}


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
    """The rows of a claim, in their order and with what is the same for all of them."""
    same = (lease["destination"], lease["token"], lease["owner"])
    return [(*row, *same) for row in sorted(rows, key=_position)]


_position = itemgetter(POSITION)


def _effect(outcome: Outcome) -> dict[str, Any]:
    """The columns of a settlement."""
    match outcome:
        case Delivered():
            return {"status": Status.DELIVERED, "given_back": 0}
        case Retried(after, error, counts):
            return {
                "status": Status.PENDING,
                "seconds": wait(after),
                "error": storable(error),
                "given_back": int(not counts),
            }
        case Failed(error, counts):
            return {"status": Status.FAILED, "error": storable(error), "given_back": int(not counts)}
        case Released():
            return {"status": Status.PENDING, "given_back": 1}


def storable(text: str) -> str:
    """An error's text as every database takes it: no NUL, no lone surrogate, not endless."""
    return text[:ERROR_LENGTH].replace("\0", "�").encode("utf-8", "replace").decode()
