"""A fake database: rows, transactions, row locks and a clock, as PostgreSQL, MariaDB and SQLite have them.

- What a transaction writes nobody else sees before it commits; each statement sees what was committed when it
  began, and the transaction's own writes.
- A position is taken at the INSERT, and transactions commit in any order.
- A transaction that writes or locks a row holds it to its end; others wait, or skip it.
- A server that is killed loses open transactions, and the last commits that nobody waited for (claims).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, TypeAlias
from uuid import UUID

from relaybox.core import ordering

EPOCH = datetime(2030, 1, 1, tzinfo=UTC)
Key: TypeAlias = Hashable
OPEN = frozenset({"pending", "failed"})


@lru_cache(16)
def to_datetime(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


def to_seconds(moment: datetime) -> float:
    return (moment - EPOCH).total_seconds()


class Clock(Protocol):
    @property
    def now(self) -> float: ...


class Emitted(NamedTuple):
    id: UUID
    event_id: UUID
    destination: str
    aggregate_type: str
    aggregate_id: str
    event_type: str
    payload: str | None
    payload_data: bytes | None
    payload_encoding: str | None
    headers: str
    ordering_key: str | None
    position: int
    idempotency_key: str
    max_attempts: int
    created: float
    created_at: datetime

    @property
    def size(self) -> int:
        return len(self.payload or "") + len(self.headers)

    def read(self, attempts: int, crashes: int) -> tuple[Any, ...]:
        return (*self[:2], *self[3:13], attempts, self.max_attempts, crashes, self.created_at)


@dataclass(slots=True, eq=False)
class Row:
    emitted: Emitted
    next_attempt_at: float | None
    updated_at: float
    status: str = "pending"
    attempts: int = 0
    crashes: int = 0
    leased_until: float | None = None
    token: str | None = None
    owner: str | None = None
    delivered_at: float | None = None
    error: str | None = None

    def copy(self) -> Row:
        new = Row(self.emitted, self.next_attempt_at, self.updated_at, self.status, self.attempts)
        new.crashes, new.leased_until, new.token = self.crashes, self.leased_until, self.token
        new.owner, new.delivered_at, new.error = self.owner, self.delivered_at, self.error
        return new

    @property
    def deaths(self) -> int:
        """Return how often a relay died while it held this row, since it was last settled."""
        return self.crashes % ordering.ALONE

    @property
    def suspect(self) -> int:
        deaths = self.deaths + (self.token is not None)
        return deaths if deaths > 1 else 0

    def unleased(self, now: float) -> bool:
        return self.leased_until is None or self.leased_until <= now


class Blocked(Exception):
    """A statement must wait until another transaction ends."""

    def __init__(self, holder: Transaction) -> None:
        super().__init__()
        self.holder = holder


class Deadlock(Exception):
    """Two transactions wait for each other."""


@dataclass(slots=True, eq=False)
class Transaction:
    """What a session does between BEGIN and COMMIT."""

    node: object
    used_at: float
    rows: dict[str, Row | None] = field(default_factory=dict)
    others: dict[Key, Any] = field(default_factory=dict)
    locks: list[Key] = field(default_factory=list)
    memo: Any = None
    changed: int = 0
    over: bool = False
    awaiting: Transaction | None = None
    waiters: list[Callable[[], None]] = field(default_factory=list)


class Database:
    """The tables. The ``clock`` tells true time; ``skew`` is what the server's own is ahead of it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.skew = 0.0
        self.rows: dict[str, Row] = {}
        self.others: dict[Key, Any] = {}
        """Rows of the small tables, each an immutable value under a key of its own."""
        self.due: defaultdict[str, list[tuple[float, int, str]]] = defaultdict(list)
        self.parked: defaultdict[str, list[tuple[int, str]]] = defaultdict(list)
        self.open: defaultdict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
        self.on_change: Callable[[Row | None, Row | None], None] | None = None
        self._locks: dict[Key, Transaction] = {}
        self._last_position = 0
        self._unflushed: list[dict[str, Row | None]] = []
        self.forgotten: dict[str, float] = {}
        """The tokens of the claims that a killed server forgot, and when, in true time, each was to end."""
        self._sessions: dict[Transaction, None] = {}

    def now(self) -> float:
        return self._clock.now + self.skew

    def begin(self, node: object) -> Transaction:
        transaction = Transaction(node, self._clock.now)
        self._sessions[transaction] = None
        return transaction

    def next_position(self) -> int:
        """Taken at once, whatever becomes of the transaction."""
        self._last_position += 1
        return self._last_position

    def row(self, transaction: Transaction, id_: str) -> Row | None:
        return transaction.rows[id_] if id_ in transaction.rows else self.rows.get(id_)

    def other(self, transaction: Transaction, key: Key) -> Any:
        return transaction.others[key] if key in transaction.others else self.others.get(key)

    def lock(self, transaction: Transaction, key: Key) -> None:
        if not self.lockable(transaction, key):
            raise Blocked(self._locks[key])

    def wait_for(self, transaction: Transaction, key: Key) -> None:
        """Raise ``Blocked`` while another holds the row; it is not held afterwards."""
        holder = self._locks.get(key)
        if holder is not None and holder is not transaction:
            raise Blocked(holder)

    def lockable(self, transaction: Transaction, key: Key) -> bool:
        """Lock the row and return True, or return False if another transaction holds it (SKIP LOCKED)."""
        holder = self._locks.get(key)
        if holder is None:
            self._locks[key] = transaction
            transaction.locks.append(key)
            return True
        return holder is transaction

    def change(self, transaction: Transaction, id_: str) -> Row:
        """Return the version of a row that the transaction may change; it holds the lock."""
        row = transaction.rows.get(id_)
        if row is None:
            row = transaction.rows[id_] = self.rows[id_].copy()
        row.updated_at = self._clock.now + self.skew
        return row

    def wait(self, transaction: Transaction, holder: Transaction, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when the holder ends; raises ``Deadlock`` where it waits for this one."""
        other: Transaction | None = holder
        while other is not None:
            if other is transaction:
                raise Deadlock
            other = other.awaiting
        if holder.over:
            wake()
            return
        transaction.awaiting = holder
        holder.waiters.append(wake)

    def commit(self, transaction: Transaction, *, flush: bool = True) -> None:
        """Make it so. Without ``flush`` a server that is killed soon after may forget it."""
        if transaction.over:
            return
        before = {id_: self._put(id_, row) for id_, row in transaction.rows.items()}
        self.others.update(transaction.others)
        if not flush:
            self._unflushed.append(before)
        elif before or transaction.others:
            self._unflushed.clear()
        self._end(transaction)

    def rollback(self, transaction: Transaction) -> None:
        if not transaction.over:
            self._end(transaction)

    def kill(self, forget: int) -> set[str]:
        """Die and come back: no transaction survives, nor do the last ``forget`` commits without a flush.

        Return the ids of the rows that those had inserted.
        """
        for transaction in list(self._sessions):
            self.rollback(transaction)
        gone: set[str] = set()
        for before in reversed(self._unflushed[len(self._unflushed) - forget :] if forget else []):
            for id_, row in before.items():
                claimed = self._put(id_, row, notify=False)
                if claimed is not None and claimed.token is not None:
                    self.forgotten[claimed.token] = (claimed.leased_until or 0.0) - self.skew
                if row is None:
                    gone.add(id_)
        self._unflushed.clear()
        return gone

    def sessions(self, node: object) -> list[Transaction]:
        return [transaction for transaction in self._sessions if transaction.node is node]

    @property
    def unflushed(self) -> int:
        return len(self._unflushed)

    def _end(self, transaction: Transaction) -> None:
        transaction.over = True
        self._sessions.pop(transaction, None)
        for key in transaction.locks:
            del self._locks[key]
        for wake in transaction.waiters:
            wake()

    def _put(self, id_: str, row: Row | None, *, notify: bool = True) -> Row | None:
        """Store the row and return what was there before."""
        before = self.rows.get(id_)
        if (
            before is None
            or row is None
            or before.next_attempt_at != row.next_attempt_at
            or before.status != row.status
        ):
            for index, entry in () if before is None else self._indexes(id_, before):
                del index[bisect_left(index, entry)]
            for index, entry in () if row is None else self._indexes(id_, row):
                insort(index, entry)
        if row is None:
            self.rows.pop(id_, None)
        else:
            self.rows[id_] = row
        if notify and self.on_change is not None:
            self.on_change(before, row)
        return before

    def _indexes(self, id_: str, row: Row) -> Iterator[tuple[list[Any], tuple[Any, ...]]]:
        emitted, status = row.emitted, row.status
        if status == "pending":
            if row.next_attempt_at is None:
                yield self.parked[emitted.destination], (emitted.position, id_)
            else:
                yield self.due[emitted.destination], (row.next_attempt_at, emitted.position, id_)
        if emitted.ordering_key is not None and status in OPEN:
            yield self.open[emitted.destination, emitted.ordering_key], (emitted.position, id_)
