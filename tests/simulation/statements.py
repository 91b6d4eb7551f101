"""What each statement of a store does to the fake database. The steps that use them are the product's own."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import starmap
from typing import Any, Literal, NamedTuple, TypeAlias
from uuid import UUID

import msgspec
import sqlalchemy as sa

from relaybox.core import ordering
from relaybox.core.ordering import Candidate
from relaybox.database import dialects
from relaybox.database.schema import make_tables
from relaybox.database.statements.delivery import Texts
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.store import ANY_SIZE
from tests.simulation.database import (
    OPEN,
    Blocked,
    Database,
    Emitted,
    Row,
    Transaction,
    to_datetime,
    to_seconds,
)
from tests.simulation.upkeep_tables import UpkeepTables

Flavour: TypeAlias = Literal["pipeline", "steps", "single"]
"""PostgreSQL: a round trip is a transaction; MariaDB: each statement is one; SQLite: one writer at a time."""
Query: TypeAlias = tuple[str, dict[str, Any]]
Rows: TypeAlias = list[Sequence[Any]]

_TIMES = {"from_time": to_datetime, "to_time": to_seconds, "to_uuid": lambda value: value.hex}
DIALECTS = {
    "pipeline": replace(dialects.POSTGRESQL, **_TIMES, from_uuid=UUID),
    "steps": replace(dialects.MARIADB, **_TIMES, native=True),
    "single": replace(dialects.SQLITE, **_TIMES, native=True),
}
TABLES = make_tables(sa.MetaData())
LOCKS_FIRST = frozenset({"ensure_destination", "open", "probe", "close", "pause", "hold_alone"})
"""Changes of one row that on MariaDB wait for its lock before they look at it."""


class FakeStatements:
    def __init__(self, flavour: Flavour, prefix: str = "") -> None:
        self.dialect = DIALECTS[flavour]
        self.tables = TABLES
        self.style = "qmark"
        self._flavour = flavour
        self._prefix = prefix

    def others(self, texts: Texts) -> FakeStatements:
        return FakeStatements(self._flavour, "upkeep " if "fence" in texts.statements else "")

    def __call__(self, name: str, **params: Any) -> Query:
        first = "locked " if self._flavour == "steps" and name in LOCKS_FIRST else ""
        return first + self._prefix + name, params

    def union(self, name: str, records: Sequence[dict[str, Any]]) -> Query:
        return self._prefix + name, {"records": records}


def make_steps(flavour: Flavour) -> StoreSteps:
    statements: Any = FakeStatements(flavour)
    return StoreSteps(statements)


EVENT_WRITES = frozenset(
    {
        "claim", "claim_light", "claim_unsuspected", "claim_chosen", "claim_ordered", "claim_chosen_ordered",
        "lease", "park", "settle", "deliver", "deliver_lease", "delete", "delete_lease", "copy_failed",
        "extend", "hold_alone", "locked hold_alone", "make_heads_due", "make_due", "upkeep make_stuck_due",
        "upkeep unpark", "upkeep make_due", "upkeep delivered", "upkeep remove",
    }
)  # fmt: skip
"""What waits for a table lock that lets others read, and lock rows."""
HELD_BY = "destination"
SETTLES = "settles"
LEADER = ("leader",)
NOBODY: tuple[Any, ...] = (None,) * 16


@dataclass(frozen=True, slots=True)
class Place:
    paused_at: float | None = None
    paused_until: float | None = None
    pause_reason: str | None = None
    circuit: str = "closed"
    circuit_until: float | None = None
    circuit_reason: str | None = None
    rate_at: float | None = None

    def paused(self, now: float) -> bool:
        return self.paused_at is not None and (self.paused_until is None or self.paused_until > now)


class Item(msgspec.Struct):
    id: str
    token: str
    status: str
    given_back: int
    attempt: int
    relay: str
    cut_off: int = 0
    seconds: float | None = None
    error: str | None = None
    copy: str | None = None


Items: TypeAlias = str | list[Item]
_items = msgspec.json.Decoder(list[Item]).decode


def _array(text: str) -> list[str]:
    return text[1:-1].split(",")


def _ids(ids: str | list[str]) -> list[str]:
    return ids if isinstance(ids, list) else _array(ids)


def _unless_all(rows: Rows, count: int) -> Rows:
    ids = None if len(rows) == count else ",".join(str(UUID(id_)) for [id_] in rows)
    return [[len(rows), ids]]


def _tokens(ids: str, token: UUID) -> str:
    return f"{{{','.join(token.hex for _ in _array(ids))}}}"


def _delivered(ids: str, tokens: str) -> list[Item]:
    return [
        Item(id_, token, "delivered", 0, 0, "")
        for id_, token in zip(_array(ids), _array(tokens), strict=True)
    ]


_names = msgspec.json.Decoder(list[str]).decode


class Server:
    def __init__(self, database: Database) -> None:
        self.database = database
        self.table_lock: Transaction | None = None
        self._decoded: tuple[str, list[Item]] = "", []
        self._read_token = "", UUID(int=0)
        self._statements: dict[str, Callable[..., Rows]] = {
            f"locked {name}": partial(self._locked, name) for name in LOCKS_FIRST
        }

    def execute(self, transaction: Transaction, query: Query) -> Rows:
        """Return the statement's rows; raise ``Blocked`` if it has to wait and is then executed again."""
        name, params = query
        if self.table_lock is not None and not self.table_lock.over and name in EVENT_WRITES:
            raise Blocked(self.table_lock)
        rows = (self._statements.get(name) or self._statement(name))(transaction, **params)
        transaction.memo = None
        return rows

    def _statement(self, name: str) -> Callable[..., Rows]:
        """Return the method of that name, where a space is written as two underscores."""
        found: Callable[..., Rows] = getattr(self, "do_" + name.replace(" ", "__"))
        return self._statements.setdefault(name, found)

    def _locked(self, name: str, transaction: Transaction, **params: Any) -> Rows:
        if "id" in params:
            self.database.wait_for(transaction, params["id"])
        elif self._place(transaction, params["destination"]) is not None:
            self.database.wait_for(transaction, (HELD_BY, params["destination"]))
        return self._statement(name)(transaction, **params)

    def do_record_attempts(self, transaction: Transaction, **_: Any) -> Rows:
        return []

    do_forget_attempts = do_record_attempts

    # Claims.

    def do_now(self, transaction: Transaction) -> Rows:
        return [[self.database.now()]]

    def do_ensure_destination(self, transaction: Transaction, destination: str) -> Rows:
        key = (HELD_BY, destination)
        if self.database.other(transaction, key) is None:
            self.database.lock(transaction, key)
            if self.database.other(transaction, key) is None:
                transaction.others[key] = Place()
        return []

    def do_lock_destination(self, transaction: Transaction, destination: str) -> Rows:
        key = (HELD_BY, destination)
        if self.database.other(transaction, key) is None:
            return []
        self.database.lock(transaction, key)
        return [[destination]]

    def do_lock_settles(self, transaction: Transaction, destination: str) -> Rows:
        self.database.lock(transaction, (SETTLES, destination))
        return [[]]

    def do_read_destination(self, transaction: Transaction, destination: str) -> Rows:
        place = self._place(transaction, destination)
        if place is None:
            return []
        pause = place.paused_at, place.paused_until, place.pause_reason
        return [[*pause, place.circuit, place.circuit_until, place.circuit_reason, self.database.now()]]

    def do_due(self, transaction: Transaction, **line: Any) -> Rows:
        return list(self._window(transaction, **line))

    def do_due_locked(self, transaction: Transaction, **line: Any) -> Rows:
        return list(self._window(transaction, lock=True, **line))

    do_due_of_chosen = do_due

    def _window(
        self,
        transaction: Transaction,
        destination: str,
        probe: bool,
        suspects: bool,
        limit: int,
        only: str | None = None,
        lock: bool = False,
        since: datetime | None = None,
    ) -> Iterator[Candidate]:
        database, now = self.database, self.database.now()
        place = self._place(transaction, destination)
        if place is not None and (place.paused(now) or (place.circuit != "closed" and not probe)):
            return
        chosen = None if only is None else frozenset(_names(only))
        for due, position, id_ in database.due[destination]:
            if due > now or not limit:
                return
            if since is not None and to_datetime(due) < since:
                continue
            row = database.row(transaction, id_)
            if row is None or not self._is_free(row, now, suspects) or row.next_attempt_at is None:
                continue
            if (chosen is not None and id_ not in chosen) or (
                lock and not database.lockable(transaction, id_)
            ):
                continue
            limit -= 1
            yield Candidate(id_, row.emitted.ordering_key, position, True, row.suspect, row.emitted.size)

    def do_heads(self, transaction: Transaction, destination: str, keys: str, block: bool) -> Rows:
        return [[self._head(transaction, destination, key, block)] for key in _names(keys)]

    def do_parked_heads(self, transaction: Transaction, destination: str, keys: str, block: bool) -> Rows:
        heads = [self._head(transaction, destination, key, block) for key in _names(keys)]
        rows = [(id_, self.database.row(transaction, id_)) for id_ in heads if id_ is not None]
        return [[id_] for id_, row in rows if row and row.status == "pending" and row.next_attempt_at is None]

    def do_run(self, transaction: Transaction, records: Sequence[dict[str, Any]]) -> Rows:
        database, now, rows = self.database, self.database.now(), []
        for record in records:
            share, key = record["share"], record["key"]
            index = database.open[record["destination"], key]
            for position, id_ in index[bisect_left(index, (record["start"], "")) :]:
                row = database.row(transaction, id_)
                if row is None or not self._is_open(row, record["block"]):
                    continue
                free = self._is_free(row, now, record["suspects"])
                rows.append((id_, key, position, free, row.suspect))
                share -= 1
                if not share:
                    break
        return rows  # type: ignore[return-value]

    def do_lock(self, transaction: Transaction, ids: Sequence[str], suspects: bool) -> Rows:
        database, now, rows = self.database, self.database.now(), []
        for id_ in sorted(ids):
            row = database.row(transaction, id_)
            if row is None or row.status not in OPEN or not database.lockable(transaction, id_):
                continue
            free = self._is_free(row, now, suspects)
            key, position = row.emitted.ordering_key, row.emitted.position
            rows.append((id_, key, position, free, row.suspect, row.emitted.size))
        return rows  # type: ignore[return-value]

    do_lock_heads = do_lock

    def do_park(self, transaction: Transaction, ids: Sequence[str]) -> Rows:
        for id_ in ids:
            self.database.change(transaction, id_).next_attempt_at = None
        return []

    def do_lease(
        self, transaction: Transaction, ids: Sequence[str], token: str, owner: str, seconds: float
    ) -> Rows:
        until = self.database.now() + seconds
        for id_ in ids:
            row = self.database.change(transaction, id_)
            died = row.token is not None
            row.attempts += 0 if died and row.crashes < ordering.ALONE else 1
            row.crashes = row.deaths + died
            row.leased_until, row.token, row.owner = until, token, owner
        return []

    def do_hold_alone(self, transaction: Transaction, id: str, token: str, alone: bool) -> Rows:
        for _item, row in self._mine(transaction, [Item(id, token, "pending", 0, 0, "")]):
            self.database.change(transaction, id).crashes = row.deaths + alone * ordering.ALONE
        return []

    def do_read(self, transaction: Transaction, ids: Sequence[str]) -> Rows:
        return [
            (
                *row.emitted.read(row.attempts, row.crashes),
                row.emitted.destination,
                self._token(row.token),
                row.owner,
            )
            for row in self._read(transaction, ids)
        ]

    def _read(self, transaction: Transaction, ids: Sequence[str]) -> list[Row]:
        rows = [self.database.row(transaction, id_) for id_ in ids]
        return sorted((row for row in rows if row is not None), key=lambda row: row.emitted.position)

    def do_claim(self, transaction: Transaction, **claim: Any) -> Rows:
        return self._claim(transaction, ordered=False, **claim)[0]

    def do_claim_light(self, transaction: Transaction, **claim: Any) -> Rows:
        return self._claim(transaction, ordered=False, all_or_none=True, **claim)[0]

    def do_claim_ordered(self, transaction: Transaction, destination: str, **claim: Any) -> Rows:
        if (HELD_BY, destination) not in transaction.locks:
            return [[0, *NOBODY]]
        rows, parked = self._claim(transaction, ordered=True, destination=destination, **claim)
        return [[parked, *row] for row in rows] or [[parked, *NOBODY]]

    do_claim_unsuspected = do_claim_chosen = do_claim
    do_claim_chosen_ordered = do_claim_ordered

    def _claim(
        self, transaction: Transaction, *, ordered: bool, owner: str, seconds: float, token: UUID, bytes: int,
        all_or_none: bool = False, **line: Any,
    ) -> tuple[Rows, int]:  # fmt: skip
        """Do in one statement what others do in steps; nothing of it waits."""
        if ordered:
            take, park = self._in_order(transaction, most=bytes, **line)
        else:
            window = list(self._window(transaction, lock=True, **line))
            take, park = ordering.unordered(window, len(window), bytes), []
            if all_or_none and sum(row.size for row in window) > bytes:
                take = []
        self.do_park(transaction, park)
        self.do_lease(transaction, take, token.hex, owner, seconds)
        rows = self._read(transaction, take)
        return [row.emitted.read(row.attempts, row.crashes) for row in rows], len(park)

    def _in_order(
        self, transaction: Transaction, *, destination: str, suspects: bool, limit: int, spread: int,
        run: int, block: bool, most: int, only: str | None = None, **line: Any,
    ) -> tuple[list[str], list[str]]:  # fmt: skip
        """Return what to lease and to park, as PostgreSQL chooses it: a run may be longer, suspects count."""
        chosen = None if only is None else frozenset(_names(only))
        size = limit if chosen is None else len(chosen)
        common: dict[str, Any] = {"destination": destination, "suspects": suspects}
        window = list(self._window(transaction, limit=size, only=only, **common, **line))
        due = Counter(row.key for row in window if row.key is not None)
        heads: dict[str | None, Candidate] = {}
        runs: dict[str | None, list[Candidate]] = {}
        left, share = limit, limit // max(1, min(spread, len(due)))
        for key in due:
            of_key = {"key": key, "block": block, **common}
            [head] = starmap(Candidate, self.do_run(transaction, [of_key | {"start": 0, "share": 1}]))
            rows = [head]
            if head.free and (chosen is None or head.id in chosen):
                of_run = of_key | {"start": head.position, "share": min(run, max(due[key], share))}
                rows = list(starmap(Candidate, self.do_run(transaction, [of_run])))
                rows = rows[:left] if chosen is None else rows
                runs |= ordering.runs([head], rows, chosen)
            heads[key] = head
            left -= len(rows)
            if chosen is None and not left:
                break
        blocked = [head.id for head in heads.values() if not head.free]
        locked = {row[0] for row in self.do_lock(transaction, blocked, suspects)}
        heads = {key: head for key, head in heads.items() if head.free or head.id in locked}
        members = [row.id for run in runs.values() for row in run] + [row.id for row in window]
        locks = self.do_lock(transaction, list(dict.fromkeys(members)), suspects)
        mine = {row[0]: row[5] for row in locks if row[3]}
        line, park = self._line(window, heads, runs, mine)
        return ordering.unordered(line[:limit], limit, most), park

    @staticmethod
    def _line(
        window: list[Candidate],
        heads: dict[str | None, Candidate],
        runs: dict[str | None, list[Candidate]],
        mine: dict[Any, int],
    ) -> tuple[list[Candidate], list[str]]:
        """Return all that could be taken, suspects at their places, and what to park."""
        rows = {row.id: row for row in (*window, *(row for run in runs.values() for row in run))}
        plain = {key: list(map(_unsuspected, run)) for key, run in runs.items()}
        line, park = ordering.choose(list(map(_unsuspected, window)), heads, plain, mine, len(rows), ANY_SIZE)
        return [rows[id_]._replace(size=mine[id_]) for id_ in line], park

    # Settles.

    def do_mine(self, transaction: Transaction, items: str, **_: Any) -> Rows:
        """MariaDB locks what is named before it looks whose it is, and lets go of what is another's."""
        for item in self._items(items):
            self.database.wait_for(transaction, item.id)
        return [[item.id] for item, _row in self._mine(transaction, items)]

    def do_settle(self, transaction: Transaction, items: Items, **_: Any) -> Rows:
        now, ids = self.database.now(), []
        for item, row in self._mine(transaction, items):
            row = self.database.change(transaction, item.id)
            row.status = item.status
            row.attempts -= item.given_back
            row.crashes = row.deaths + 1 if item.cut_off else row.deaths if item.seconds is None else 0
            if item.status != "pending":
                row.next_attempt_at = None
            elif item.seconds is not None:
                row.next_attempt_at = now + item.seconds
            row.delivered_at = now if item.status == "delivered" else None
            row.error = item.error if item.error is not None else row.error
            row.leased_until = row.token = row.owner = None
            ids.append([item.id])
        return ids

    def do_deliver(self, transaction: Transaction, ids: str, tokens: str, count: int) -> Rows:
        return _unless_all(self.do_settle(transaction, _delivered(ids, tokens)), count)

    def do_deliver_lease(self, transaction: Transaction, ids: str, token: UUID, count: int) -> Rows:
        return self.do_deliver(transaction, ids, _tokens(ids, token), count)

    def do_delete_lease(self, transaction: Transaction, ids: str, token: UUID, count: int) -> Rows:
        return self.do_delete(transaction, ids=ids, tokens=_tokens(ids, token), count=count)

    def do_lock_rows(self, transaction: Transaction, ids: str | list[str]) -> Rows:
        for id_ in _ids(ids):
            if self.database.row(transaction, id_) is not None:
                self.database.lock(transaction, id_)
        return []

    def do_rows_there(self, transaction: Transaction, ids: str | list[str]) -> Rows:
        return [[id_] for id_ in _ids(ids) if self.database.row(transaction, id_) is not None]

    def do_rows_free(self, transaction: Transaction, ids: str | list[str]) -> Rows:
        there = self.do_rows_there(transaction, ids)
        return [[id_] for [id_] in there if self.database.lockable(transaction, id_)]

    def do_next_of_keys(
        self, transaction: Transaction, destination: str, keys: str, block: bool, ids: str | list[str]
    ) -> Rows:
        settled = set(_ids(ids))
        rows: Rows = []
        for key in _names(keys):
            of_key = (id_ for _, id_ in self.database.open[destination, key] if id_ not in settled)
            found = ((id_, self.database.row(transaction, id_)) for id_ in of_key)
            others = (id_ for id_, row in found if row is not None and self._is_open(row, block))
            rows.append([key, next(others, None)])
        return rows

    def do_delete(
        self, transaction: Transaction, items: str = "", ids: str = "", tokens: str = "", count: int = 0
    ) -> Rows:
        given = items if items else _delivered(ids, tokens)
        mine = [item.id for item, _row in self._mine(transaction, given)]
        for id_ in mine:
            transaction.rows[id_] = None
        gone = [[id_] for id_ in mine]
        return gone if items else _unless_all(gone, count)

    def do_extend(
        self, transaction: Transaction, seconds: float, items: str = "", ids: Sequence[str] = ()
    ) -> Rows:
        """Extend leases but skip locked rows; if ``ids`` are given, they were found and locked before."""
        held, until = self._held(transaction, items), self.database.now() + seconds
        free = {id_ for [id_] in held if self.database.lockable(transaction, id_)}
        for id_ in [*ids, *(id_ for [id_] in held if id_ in free)]:
            self.database.change(transaction, id_).leased_until = until
        return [[id_, id_ in free] for [id_] in held]

    def do_mine_now(self, transaction: Transaction, items: str) -> Rows:
        return self._held(transaction, items)

    def do_mine_free(self, transaction: Transaction, items: str) -> Rows:
        held = self._held(transaction, items)
        return [[id_] for [id_] in held if self.database.lockable(transaction, id_)]

    def _held(self, transaction: Transaction, items: str) -> Rows:
        """Return the ids that have the given lease, locked or not."""
        rows = [(item, self.database.row(transaction, item.id)) for item in self._items(items or [])]
        return [[item.id] for item, row in rows if row is not None and self.holds(row, item)]

    def do_copy_failed(
        self, transaction: Transaction, items: str, dead_letter: str, max_attempts: int, ordered: bool
    ) -> Rows:
        failed = [(item, row) for item, row in self._mine(transaction, items) if item.copy is not None]
        for item, row in sorted(failed, key=lambda pair: pair[1].emitted.position):
            key = row.emitted.ordering_key if ordered else None
            values = {"destination": dead_letter, "ordering_key": key, "max_attempts": max_attempts}
            self.insert(transaction, row.emitted._replace(id=UUID(item.copy), **values))
        return []

    def do_make_heads_due(
        self, transaction: Transaction, destination: str, keys: str, block: bool, **_: Any
    ) -> Rows:
        database, now = self.database, self.database.now()
        if transaction.memo is None:
            heads = [self._head(transaction, destination, key, block) for key in _names(keys)]
            transaction.memo = sorted(head for head in heads if head is not None)
        changed, due = 0, False
        for id_ in transaction.memo:
            row = database.row(transaction, id_)
            due |= row is not None and row.next_attempt_at is not None and self._is_free(row, now, True)
            if row is None or row.status != "pending" or row.next_attempt_at is not None:
                continue
            database.lock(transaction, id_)
            row = database.change(transaction, id_)
            row.next_attempt_at = min(row.emitted.created, now)
            changed += 1
        transaction.changed = changed
        return [[due or bool(changed)]]

    def do_make_due(self, transaction: Transaction, ids: Sequence[str]) -> Rows:
        """MariaDB: what was found to be the heads, judged once more."""
        for id_ in ids:
            row = self.database.row(transaction, id_)
            if row is not None:
                self.database.wait_for(transaction, id_)
            if row is None or row.status != "pending" or row.next_attempt_at is not None:
                continue
            self.database.lock(transaction, id_)
            row = self.database.change(transaction, id_)
            row.next_attempt_at = min(row.emitted.created, self.database.now())
        return []

    def insert(self, transaction: Transaction, emitted: Emitted, due: float | None = None) -> None:
        now = self.database.now()
        emitted = emitted._replace(
            position=self.database.next_position(), created=now, created_at=to_datetime(now)
        )
        transaction.rows[emitted.id.hex] = Row(emitted, now if due is None else due, now)

    # Destinations.

    def do_open(
        self, transaction: Transaction, destination: str, state: str, seconds: float, reason: str
    ) -> Rows:
        until = self.database.now() + seconds
        change = {"circuit": "open", "circuit_until": until, "circuit_reason": reason}
        return self._change(transaction, destination, lambda place: place.circuit == state, change)

    def do_probe(self, transaction: Transaction, destination: str, seconds: float) -> Rows:
        now = self.database.now()

        def over(place: Place) -> bool:
            until = place.circuit_until
            return place.circuit != "closed" and until is not None and until <= now

        change = {"circuit": "half_open", "circuit_until": now + seconds}
        return self._change(transaction, destination, over, change)

    def do_close(self, transaction: Transaction, destination: str) -> Rows:
        change = {"circuit": "closed", "circuit_until": None, "circuit_reason": None}
        return self._change(transaction, destination, lambda place: place.circuit == "half_open", change)

    def do_pause(self, transaction: Transaction, destination: str, by: str, reason: str) -> Rows:
        now = self.database.now()
        change = {"paused_at": now, "paused_until": None, "pause_reason": reason}
        return self._change(transaction, destination, lambda place: not place.paused(now), change)

    def do_changed(self, transaction: Transaction) -> Rows:
        return [[transaction.changed]]

    def do_read_line(self, transaction: Transaction, destination: str) -> Rows:
        place = self._place(transaction, destination)
        if place is None:
            return []
        self.database.lock(transaction, (HELD_BY, destination))
        return [[place.rate_at, self.database.now()]]

    def do_move_line(self, transaction: Transaction, destination: str, at: float) -> Rows:
        return self._change(transaction, destination, lambda _: True, {"rate_at": at})

    def do_reserve(self, transaction: Transaction, destination: str, seconds: float) -> Rows:
        self.database.lock(transaction, (HELD_BY, destination))
        place, now = self._place(transaction, destination) or Place(), self.database.now()
        line = max(now if place.rate_at is None else place.rate_at, now) + seconds
        transaction.others[HELD_BY, destination] = replace(place, rate_at=line)
        return [[line - now]]

    # What they have in common.

    def _place(self, transaction: Transaction, destination: str) -> Place | None:
        return self.database.other(transaction, (HELD_BY, destination))  # type: ignore[no-any-return]

    def _change(
        self,
        transaction: Transaction,
        destination: str,
        where: Callable[[Place], bool],
        change: dict[str, Any],
    ) -> Rows:
        """Update a destination's row under its lock; RETURNING name."""
        transaction.changed = 0
        place = self._place(transaction, destination)
        if place is None or not where(place):
            return []
        self.database.lock(transaction, (HELD_BY, destination))
        transaction.others[HELD_BY, destination] = dataclasses.replace(place, **change)
        transaction.changed = 1
        return [[destination]]

    def _mine(self, transaction: Transaction, items: Items) -> list[tuple[Item, Row]]:
        """Lock and return the rows that still have the given lease."""
        database, mine = self.database, []
        for item in self._items(items):
            row = database.row(transaction, item.id)
            if row is None or not self.holds(row, item):
                continue
            # The holder of the lock may change it: it is judged again when that transaction ends.
            database.lock(transaction, item.id)
            mine.append((item, row))
        return mine

    def _items(self, items: Items) -> list[Item]:
        """Return the items, decoded once: the same text comes with each statement of a settle."""
        if isinstance(items, list):
            return items
        if items is not self._decoded[0]:
            self._decoded = items, _items(items)
        return self._decoded[1]

    def _token(self, token: str | None) -> UUID:
        """Return the token that all rows of a claim share."""
        assert token is not None
        if token != self._read_token[0]:
            self._read_token = token, UUID(token)
        return self._read_token[1]

    def holds(self, row: Row, item: Item) -> bool:
        return row.token == item.token and row.status == "pending"

    def _head(self, transaction: Transaction, destination: str, key: str, block: bool) -> str | None:
        for _, id_ in self.database.open[destination, key]:
            row = self.database.row(transaction, id_)
            if row is not None and self._is_open(row, block):
                return id_
        return None

    @staticmethod
    def _is_open(row: Row, block: bool) -> bool:
        return row.status == "pending" or (block and row.status == "failed")

    @staticmethod
    def _is_free(row: Row, now: float, suspects: bool) -> bool:
        return (
            row.status == "pending"
            and (row.next_attempt_at is None or row.next_attempt_at <= now)
            and (row.leased_until is None or row.leased_until <= now)
            and (suspects or not row.suspect)
        )


def _unsuspected(row: Candidate) -> Candidate:
    return row._replace(suspect=0) if row.suspect else row


class Term(NamedTuple):
    relay: str
    term: int
    leads_until: float


class UpkeepServer(UpkeepTables, Server):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.learned = {}

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
            self.keep_keys_of(transaction, [id_ for _, id_ in old])
            self.do_upkeep__remove(transaction, [id_ for _, id_ in old])
            return [[at] for at, _ in old]
        return [[*self._removed(id_), at] for at, id_ in old]

    def _removed(self, id_: str) -> list[Any]:
        row = self.database.rows[id_]
        emitted = row.emitted
        key = emitted.event_type, emitted.idempotency_key
        return [id_, emitted.event_id.hex, *key, emitted.created, row.updated_at]

    def do_upkeep__remove(self, transaction: Transaction, ids: Sequence[str]) -> Rows:
        for id_ in ids:
            transaction.rows[id_] = None
        return []

    def do_upkeep__nothing(self, transaction: Transaction, **_: Any) -> Rows:
        return []

    do_upkeep__now, do_upkeep__changed = Server.do_now, Server.do_changed
    do_upkeep__forget_members = do_upkeep__hide_leader = do_upkeep__forget_attempts = do_upkeep__nothing
    do_upkeep__walk_events = do_upkeep__walk_attempts = do_upkeep__nothing
    do_upkeep__inbox = do_upkeep__find_marks = do_upkeep__nothing

    def do_upkeep__stats(self, transaction: Transaction, **_: Any) -> Rows:
        transaction.changed = 0
        return []

    do_upkeep__audit = do_upkeep__stats

    def do_upkeep__parked(self, transaction: Transaction, destination: str, limit: int) -> Rows:
        return [
            [self.database.rows[id_].emitted.ordering_key] for _, id_ in self.database.parked[destination]
        ][:limit]

    def do_upkeep__next_keys(
        self, transaction: Transaction, destination: str, first: str, limit: int
    ) -> Rows:
        return [[key] for key, _ in self._lines(destination, first)[:limit]]

    def do_upkeep__keys_of_next_rows(
        self, transaction: Transaction, destination: str, first: str, limit: int
    ) -> Rows:
        rows = [key for key, rows in self._lines(destination, first) for _ in range(rows)]
        return [[key] for key in sorted(set(rows[:limit]))]

    def _lines(self, destination: str, first: str) -> list[tuple[str, int]]:
        """Yield the keys from the first one on, and how many open rows each of them has."""
        lines = self.database.open.items()
        return sorted(
            (key, len(rows)) for (name, key), rows in lines if rows and name == destination and key >= first
        )

    def do_upkeep__stuck(self, transaction: Transaction, destination: str, keys: str, block: bool) -> Rows:
        return [[key] for key in _names(keys) if self._stuck(transaction, destination, key, block)]

    def do_upkeep__make_stuck_due(
        self, transaction: Transaction, destination: str, keys: str, block: bool
    ) -> Rows:
        database, now, made = self.database, self.database.now(), []
        for key in _names(keys):
            id_ = self._stuck(transaction, destination, key, block)
            if id_ is not None and database.lockable(transaction, id_):
                row = database.change(transaction, id_)
                row.next_attempt_at = min(row.emitted.created, now)
                made.append([id_])
        transaction.changed = len(made)
        return made

    def do_upkeep__unpark(self, transaction: Transaction, destination: str, limit: int) -> Rows:
        database, now = self.database, self.database.now()
        found: list[str] = []
        for _, id_ in database.parked[destination]:
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
