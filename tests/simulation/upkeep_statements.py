"""What each statement of upkeep does to the fake database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.simulation.database import Transaction
from tests.simulation.statements import LEADER, Rows, Server, _names


class Term(NamedTuple):
    """The row of ``outbox_leader``."""

    relay: str
    term: int
    leads_until: float


class UpkeepServer(Server):
    """Executes the statements of upkeep as well."""

    def do_upkeep__now(self, transaction: Transaction) -> Rows:
        return [[self.database.now()]]

    def do_upkeep__be_seen(self, transaction: Transaction, me: str, **_: Any) -> Rows:
        self.database.lock(transaction, ("member", me))
        transaction.others["member", me] = self.database.now()
        return []

    def do_upkeep__members(self, transaction: Transaction) -> Rows:
        seen = self.database.others | transaction.others
        return [
            [key[1], at]
            for key, at in seen.items()
            if isinstance(key, tuple) and key[0] == "member" and at is not None
        ]

    def do_upkeep__forget_members(
        self, transaction: Transaction, names: Sequence[str], seconds: float
    ) -> Rows:
        return []

    def do_upkeep__leave(self, transaction: Transaction, me: str) -> Rows:
        self.database.lock(transaction, ("member", me))
        transaction.others["member", me] = None
        return []

    def do_upkeep__open_election(self, transaction: Transaction, me: str, seconds: float) -> Rows:
        if self._leader(transaction) is None:
            self.database.lock(transaction, LEADER)
            transaction.others[LEADER] = Term("", 0, self.database.now())
        return []

    def do_upkeep__lead(self, transaction: Transaction, me: str, seconds: float) -> Rows:
        now, leader = self.database.now(), self._leader(transaction)
        assert leader is not None
        if leader.relay == me or leader.leads_until <= now:
            self.database.lock(transaction, LEADER)
            goes_on = leader.relay == me and leader.leads_until > now
            transaction.others[LEADER] = Term(me, leader.term + (not goes_on), now + seconds)
        return []

    def do_upkeep__show_leader(self, transaction: Transaction, me: str, seconds: float) -> Rows:
        return []

    def do_upkeep__leading(self, transaction: Transaction, me: str, seconds: float) -> Rows:
        leader = self._leader(transaction)
        assert leader is not None
        return [[leader.term]] if leader.relay == me and leader.leads_until > self.database.now() else []

    def do_upkeep__resign(self, transaction: Transaction, me: str) -> Rows:
        leader, now = self._leader(transaction), self.database.now()
        if leader is not None and leader.relay == me and leader.leads_until > now:
            self.database.lock(transaction, LEADER)
            transaction.others[LEADER] = leader._replace(leads_until=now)
        return []

    def do_upkeep__hide_leader(self, transaction: Transaction, me: str) -> Rows:
        return []

    def do_upkeep__fence(self, transaction: Transaction, term: int) -> Rows:
        if not self._led(transaction, term):
            return []
        self.database.lock(transaction, LEADER)
        return [[term]]

    def do_upkeep__record(self, transaction: Transaction, **minute: Any) -> Rows:
        key = ("stats", minute["minute"], minute["destination"], minute["relay"])
        transaction.others[key] = minute["delivered"], minute["retried"], minute["failed"]
        return []

    def do_upkeep__kept(self, transaction: Transaction, after: str) -> Rows:
        names = {row.emitted.destination for row in self.database.rows.values() if row.status == "delivered"}
        later = sorted(name for name in names if name > after)
        return [[name] for name in later[:1]]

    def do_upkeep__delivered(
        self,
        transaction: Transaction,
        destination: str,
        seconds: float,
        since: float,
        limit: int,
        term: int | None = None,
    ) -> Rows:
        """Find and lock what is old; with a term, which one statement needs, remove it too."""
        database, before = self.database, self.database.now() + seconds
        if term is not None and not self._led(transaction, term):
            return []
        old = [
            (row.delivered_at, id_)
            for id_, row in database.rows.items()
            if row.emitted.destination == destination
            and row.status == "delivered"
            and row.delivered_at is not None
            # A moment that was handed out and comes back is rounded to microseconds, as databases keep it.
            and since <= round(row.delivered_at, 6) < before
            and database.lockable(transaction, id_)
        ]
        old = sorted(old)[:limit]
        if term is not None:
            self.do_upkeep__remove(transaction, [id_ for _, id_ in old])
            return [[at] for at, _ in old]
        return [[id_, at] for at, id_ in old]

    def do_upkeep__remove(self, transaction: Transaction, ids: Sequence[str]) -> Rows:
        for id_ in ids:
            transaction.rows[id_] = None
        return []

    def do_upkeep__forget_attempts(self, transaction: Transaction, ids: Sequence[str], **_: Any) -> Rows:
        return []

    def do_upkeep__nothing(self, transaction: Transaction, **_: Any) -> Rows:
        return []

    do_upkeep__walk_events = do_upkeep__walk_attempts = do_upkeep__nothing
    do_upkeep__idempotency = do_upkeep__find_keys = do_upkeep__nothing
    do_upkeep__inbox = do_upkeep__find_marks = do_upkeep__nothing

    def do_upkeep__stats(self, transaction: Transaction, **_: Any) -> Rows:
        transaction.changed = 0
        return []

    do_upkeep__audit = do_upkeep__stats

    def do_upkeep__changed(self, transaction: Transaction) -> Rows:
        return [[transaction.changed]]

    def do_upkeep__parked(
        self, transaction: Transaction, destination: str, after: int, limit: int, block: bool = True
    ) -> Rows:
        database, rows = self.database, []
        for position, id_ in database.parked[destination]:
            row = database.row(transaction, id_)
            if position > after and row is not None and row.next_attempt_at is None:
                rows.append([row.emitted.ordering_key, position])
            if len(rows) == limit:
                break
        return rows  # type: ignore[return-value]

    def do_upkeep__stuck(
        self, transaction: Transaction, destination: str, keys: str, block: bool, **_: Any
    ) -> Rows:
        return [[key] for key in _names(keys) if self._stuck(transaction, destination, key, block)]

    def do_upkeep__make_heads_due(
        self, transaction: Transaction, destination: str, keys: str, block: bool, term: int, **_: Any
    ) -> Rows:
        database, now, made = self.database, self.database.now(), []
        if self._led(transaction, term):
            for key in _names(keys):
                id_ = self._stuck(transaction, destination, key, block)
                if id_ is not None and database.lockable(transaction, id_):
                    row = database.change(transaction, id_)
                    row.next_attempt_at = min(row.emitted.created, now)
                    made.append([id_])
        transaction.changed = len(made)
        return made

    def do_upkeep__unpark(
        self, transaction: Transaction, destination: str, limit: int, term: int, **_: Any
    ) -> Rows:
        database, now = self.database, self.database.now()
        found: list[str] = []
        for _, id_ in database.parked[destination] if self._led(transaction, term) else ():
            if len(found) == limit:
                break
            if database.rows[id_].unleased(now) and database.lockable(transaction, id_):
                found.append(id_)
        self.do_upkeep__make_due(transaction, found)
        return [[id_] for id_ in found]

    def do_upkeep__make_due(self, transaction: Transaction, ids: Sequence[str]) -> Rows:
        now = self.database.now()
        for id_ in ids:
            row = self.database.change(transaction, id_)
            row.next_attempt_at = min(row.emitted.created, now)
        return []

    def _stuck(self, transaction: Transaction, destination: str, key: str, block: bool) -> str | None:
        """The head of a key, if it is parked and nobody holds it."""
        id_ = self._head(transaction, destination, key, block)
        row = None if id_ is None else self.database.row(transaction, id_)
        if row is None or row.status != "pending" or row.next_attempt_at is not None:
            return None
        return id_ if row.unleased(self.database.now()) else None

    def _led(self, transaction: Transaction, term: int) -> bool:
        leader = self._leader(transaction)
        return leader is not None and leader.term == term and leader.leads_until > self.database.now()

    def _leader(self, transaction: Transaction) -> Term | None:
        return self.database.other(transaction, LEADER)  # type: ignore[no-any-return]
