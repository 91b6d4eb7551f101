"""The operations of a store, as steps.

One yield is atomic if the driver sends it in one round trip; a lock timeout then raises ``Locked`` in the
generator. Other drivers run the whole generator in one transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.core.event import Delivery, Status
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried, wait
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row, Steps
from relaybox.errors import Locked
from relaybox.stores.sql.claims import (
    OneStatement,
    Stepwise,
    fail_unread,
    keys_of,
    lock_settles,
    make_found_due,
    make_heads_due,
)
from relaybox.stores.sql.rows import read
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

ERROR_LENGTH = 2_000
LEASES_APART = 3
"""Up to this many leases are settled by one statement each."""
_json = msgspec.json.Encoder(uuid_format="hex")


class Settled(NamedTuple):
    """The result of a settle: ids of lost leases, whether the next row of a key is due, and locked ids."""

    lost: frozenset[UUID]
    due: bool
    left: frozenset[UUID] = frozenset()


class OfLease(NamedTuple):
    """Deliveries settled by one statement without JSON, usually all of one ``lease``."""

    keep: bool
    deliveries: Sequence[Delivery]
    lease: UUID | None = None

    def lost(self, rows: Sequence[Sequence[Any]]) -> frozenset[UUID]:
        """Return the ids of lost leases; the statement lists our ids only if some are missing."""
        [[count, ids]] = rows
        if count == len(self.deliveries):
            return frozenset()
        ours = set((ids or "").split(","))
        return frozenset(delivery.id for delivery in self.deliveries if str(delivery.id) not in ours)


class StoreSteps:
    """Claim, settle and extend for one database."""

    def __init__(self, statements: Statements) -> None:
        self.statements = statements
        self.dialect = statements.dialect
        self._claiming = (OneStatement if self.dialect.one_statement else Stepwise)(statements)

    def claim(self, want: Want) -> Steps[Claim]:
        """Lease due rows, and fail those whose relays died in all their attempts."""
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
                # They are already leased, so the relay that holds them fails them.
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
        """Write outcomes and make the next row of each key due, in one transaction."""
        settlements = _each_once(settlements)
        keys = keys_of(delivery for delivery, _ in settlements)
        queries = [lock_settles(self.statements, name) for name in sorted(keys)]
        outcomes = {type(settlement.outcome) for settlement in settlements}
        if Delivered in outcomes and len(outcomes) > 1:
            queries += self._lock_rows(settlements)
        delivered: list[OfLease] = []
        if self.dialect.one_statement and Delivered in outcomes:
            delivered = _by_lease(settlements)
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
        """Settle, but skip locked rows, and keys whose next row is locked: nothing would make it due."""
        keys = keys_of(delivery for delivery, _ in settlements)
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
        """Lock all rows first: several statements, each in the order of ids, could deadlock."""
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
        """Extend leases, but skip locked rows: usually they are being settled."""
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
        """Set whether the death of the relay that holds this row counts."""
        own = {"id": self.dialect.to_uuid(delivery.id), "token": self.dialect.to_uuid(delivery.lease_token)}
        yield [self.statements("hold_alone", alone=alone, **own)]

    def _add_fenced(self, queries: list[Query], *names: str, **params: Any) -> int:
        """Add statements for our rows, the end of leases last; return the index of the result with ids."""
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
                # In the order of ids, so that two statements do not deadlock.
                for delivery, outcome in sorted(settlements, key=lambda s: s.delivery.id.int)
            ]
        ).decode()

    def now(self) -> Steps[datetime]:
        """Return the database's time."""
        [[[now]]] = yield [self.statements("now")]
        return self.dialect.from_time(now)

    def _lost(self, deliveries: Sequence[Delivery], results: Sequence[list[Row]]) -> frozenset[UUID]:
        # Each id returns at most once per item sent, so equal numbers mean that none is missing.
        if sum(map(len, results)) == len(deliveries):
            return frozenset()
        ours = {self.dialect.from_uuid(row[0]) for rows in results for row in rows}
        return frozenset(delivery.id for delivery in deliveries if delivery.id not in ours)


def _each_once(settlements: Sequence[Settlement]) -> Sequence[Settlement]:
    # Compare positions, because hashing ids is slow.
    if len({settlement.delivery.position for settlement in settlements}) == len(settlements):
        return settlements
    return list({(s.delivery.position, s.delivery.lease_token.int): s for s in settlements}.values())


def _by_lease(settlements: Sequence[Settlement]) -> list[OfLease]:
    """Group deliveries by lease if their ids do not overlap, else by ``keep``: locks go in order of ids."""
    of: dict[tuple[bool, UUID], list[Delivery]] = {}
    for delivery, outcome in settlements:
        if type(outcome) is Delivered:
            of.setdefault((outcome.keep, delivery.lease_token), []).append(delivery)
    if len(of) <= LEASES_APART:
        leases = sorted((OfLease(keep, each, lease) for (keep, lease), each in of.items()), key=_first)
        if all(_last(one) < _first(following) for one, following in pairwise(leases)):
            return leases
    every = [
        (keep, [each for (kept, _), of_lease in of.items() if kept is keep for each in of_lease])
        for keep in (True, False)
    ]
    return [OfLease(keep, deliveries) for keep, deliveries in every if deliveries]


def _first(delivered: OfLease) -> int:
    return min(delivery.id.int for delivery in delivered.deliveries)


def _last(delivered: OfLease) -> int:
    return max(delivery.id.int for delivery in delivered.deliveries)


def _array(values: Iterable[str]) -> str:
    return f"{{{','.join(values)}}}"


def _effect(outcome: Outcome) -> dict[str, Any]:
    match outcome:
        case Delivered():
            return {"status": Status.DELIVERED, "given_back": 0}
        case Retried(after, error, counts, cut_off):
            return {
                "status": Status.PENDING,
                "seconds": wait(after),
                "error": storable(error),
                "given_back": int(not counts),
                "cut_off": int(cut_off),
            }
        case Failed(error, counts):
            return {"status": Status.FAILED, "error": storable(error), "given_back": int(not counts)}
        case Released():
            return {"status": Status.PENDING, "given_back": 1}


def storable(text: str) -> str:
    """Make an error text storable everywhere: no NUL, no lone surrogate, limited length."""
    return text[:ERROR_LENGTH].replace("\0", "�").encode("utf-8", "replace").decode()
