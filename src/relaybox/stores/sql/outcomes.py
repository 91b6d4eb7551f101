"""The statements that write outcomes, and the rows that they name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple
from uuid import UUID

from uuid_utils.compat import uuid7

from relaybox.core.event import Delivery, Status
from relaybox.core.outcome import Delivered, Failed, Outcome, Released, Retried, wait
from relaybox.database.statements.delivery import Query, Statements
from relaybox.stores.sql.rows import array, to_json
from relaybox.stores.store import DeadLetter, Settlement, is_dead_letter

ERROR_LENGTH = 2_000
LEASES_APART = 3
"""Up to this many leases are settled by one statement each."""


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


class OutcomeStatements:
    """Makes the statements of a settle for one database."""

    def __init__(self, sql: Statements) -> None:
        self._sql = sql
        self._dialect = sql.dialect

    def deliver(self, delivered: OfLease) -> Query:
        """Return the statement that ends these leases as delivered; PostgreSQL only."""
        name = "deliver" if delivered.keep else "delete"
        count = len(delivered.deliveries)
        if delivered.lease is not None:
            listed = array(sorted(delivery.id.hex for delivery in delivered.deliveries))
            return self._sql(f"{name}_lease", ids=listed, token=delivered.lease, count=count)
        pairs = sorted((delivery.id.hex, delivery.lease_token.hex) for delivery in delivered.deliveries)
        listed, tokens = map(array, zip(*pairs, strict=True))
        return self._sql(name, ids=listed, tokens=tokens, count=count)

    def lock_rows(self, settlements: Sequence[Settlement]) -> Iterator[Query]:
        """Lock all rows first: several statements, each in the order of ids, could deadlock."""
        ids = sorted(settlement.delivery.id.hex for settlement in settlements)
        if self._dialect.one_statement:
            yield self._sql("lock_rows", ids=array(ids))
        elif not self._dialect.returning:
            yield self._sql("lock_rows", ids=ids)

    def settle_others(
        self, queries: list[Query], settlements: Sequence[Settlement], dead_letter: DeadLetter | None
    ) -> Iterator[int]:
        """Add statements for the other outcomes; yield the index of each result with ids."""
        deleted = [s for s in settlements if isinstance(s.outcome, Delivered) and not s.outcome.keep]
        kept = [s for s in settlements if not isinstance(s.outcome, Delivered) or s.outcome.keep]
        if kept:
            yield self._settle_kept(queries, kept, dead_letter)
        if deleted:
            yield self._add_fenced(queries, "forget_attempts", "delete", items=items_of(deleted))

    def _settle_kept(
        self, queries: list[Query], kept: Sequence[Settlement], dead_letter: DeadLetter | None
    ) -> int:
        names = ["settle"]
        params: dict[str, Any] = {"items": items_of(kept, copy=dead_letter is not None)}
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

    def _add_fenced(self, queries: list[Query], *names: str, **params: Any) -> int:
        """Add statements for our rows, the end of leases last; return the index of the result with ids."""
        if not self._dialect.returning:
            names = ("mine", *names)
        answer = len(queries) + (len(names) - 1 if self._dialect.returning else 0)
        queries += [self._sql(name, **params) for name in names]
        return answer


def items_of(settlements: Sequence[Settlement], *, copy: bool = False) -> str:
    """Return the settlements as the JSON of a statement; ``copy`` adds ids for dead letters."""
    return to_json(
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
    )


def by_lease(settlements: Sequence[Settlement]) -> list[OfLease]:
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
