"""The operations of a store, as steps.

One yield is atomic if the driver sends it in one round trip; a lock timeout then raises ``Locked`` in the
generator. Other drivers run the whole generator in one transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Released
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row, Steps
from relaybox.errors import Locked
from relaybox.stores.sql.claims import (
    OneStatement,
    Stepwise,
    fail_unread,
    held_by,
    keys_of,
    lock_settles,
    make_found_due,
    make_heads_due,
)
from relaybox.stores.sql.outcomes import OfLease, OutcomeStatements, by_lease, items_of
from relaybox.stores.sql.rows import listed, read, to_json
from relaybox.stores.store import Claim, DeadLetter, OnFailed, Settlement, Want, bury, used_up


class Settled(NamedTuple):
    """The result of a settle: ids of lost leases, whether the next row of a key is due, and locked ids."""

    lost: frozenset[UUID]
    due: bool
    left: frozenset[UUID] = frozenset()


class StoreSteps:
    """Claim, settle and extend for one database."""

    def __init__(self, statements: Statements) -> None:
        self.statements = statements
        self.dialect = statements.dialect
        self._outcomes = OutcomeStatements(statements)
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
        held = None if deliveries or parked or not places else held_by(self.dialect, want, places[0])
        return Claim(deliveries, parked=parked, held=held)

    def settle(
        self, settlements: Sequence[Settlement], on_failed: OnFailed, dead_letter: DeadLetter | None = None
    ) -> Steps[Settled]:
        """Write outcomes and make the next row of each key due, in one transaction."""
        settlements = _each_once(settlements)
        keys = keys_of(delivery for delivery, _ in settlements)
        queries = [lock_settles(self.statements, name) for name in sorted(keys)]
        outcomes = {type(settlement.outcome) for settlement in settlements}
        if Delivered in outcomes and len(outcomes) > 1:
            queries += self._outcomes.lock_rows(settlements)
        delivered: list[OfLease] = []
        if self.dialect.one_statement and Delivered in outcomes:
            delivered = by_lease(settlements)
            settlements = [s for s in settlements if type(s.outcome) is not Delivered]
        first = len(queries)
        queries += [self._outcomes.deliver(one) for one in delivered]
        answers = list(self._outcomes.settle_others(queries, settlements, dead_letter))
        results = yield [*queries, *self._make_heads_due(keys, on_failed)]
        heads = results[len(queries) :]
        yield from make_found_due(self.statements, heads)
        lost = self._lost([s.delivery for s in settlements], [results[index] for index in answers])
        lost = lost.union(*(one.lost(results[first + at]) for at, one in enumerate(delivered)))
        due = any(due for [[due]] in heads) if self.dialect.one_statement else bool(keys)
        return Settled(lost, due)

    def settle_free(
        self, settlements: Sequence[Settlement], on_failed: OnFailed, dead_letter: DeadLetter | None = None
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
        looked_at = listed(self.dialect, [*ids, *behind])
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
        words = {"destination": destination, "keys": to_json(list(keys)), "block": block}
        return self.statements("next_of_keys", **words, ids=listed(self.dialect, ids))

    def extend(self, deliveries: Sequence[Delivery], lease: float) -> Steps[Settled]:
        """Extend leases, but skip locked rows: usually they are being settled."""
        items = items_of([Settlement(delivery, Released()) for delivery in deliveries])
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

    def _make_heads_due(self, keys: Mapping[str, Collection[str]], on_failed: OnFailed) -> list[Query]:
        block = on_failed == "block"
        return [make_heads_due(self.statements, name, of, block) for name, of in keys.items()]

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
