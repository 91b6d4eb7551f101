"""Whether a history kept the promises of a claim. Knows nothing of how claims are made.

It sees leases and settles, not deliveries: ``relaybox.testing.checker`` judges what consumers received.

The changes are gone through in order. Before each, ``Replay`` holds what every row was; each rule looks at
one change and says what is wrong with it:

- ``claimed twice``: the row's lease was live, or the row was final.
- ``claimed early``: the row was backing off.
- ``out of turn``: an earlier row of the key was open and not part of the same claim. The text says what that
  row was at the time: leased by another claim, backing off, parked, or due and not claimed yet. Two claims
  of one key that race end up here whichever of them commits first.
- ``delivered out of order``: an earlier row of the key was open, and the worker that delivered this
  one had not held that one before it, or had given it back.
- ``settled by another``: a row was settled on the connection of a process that did not hold its lease.
- ``miscounted``: attempts or crashes did not follow the rules for crashed claims.
- ``changed after its end``: a final row changed.
- ``untrue answer``: a worker heard that a settle held when it did not, or the other way round.
- ``not delivered``: at the end the row is not in the state that was expected.
- ``not in commit order``: positions of a key do not follow its commits.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NamedTuple

import sqlalchemy as sa

from relaybox.core.ordering import ALONE

TABLE = """CREATE TABLE chaos_history (
    seq bigint {identity} PRIMARY KEY, connection bigint, id {uuid}, owner varchar(200),
    old_status varchar(20), status varchar(20), old_token {uuid}, token {uuid},
    old_leased_until {moment}, leased_until {moment},
    old_next_attempt_at {moment}, next_attempt_at {moment}, claimed_at {moment},
    old_attempts int, attempts int, old_crashes int, crashes int)"""
RECORD = """INSERT INTO chaos_history (connection, id, owner, old_status, status, old_token, token,
        old_leased_until, leased_until, old_next_attempt_at, next_attempt_at, claimed_at,
        old_attempts, attempts, old_crashes, crashes)
    VALUES ({session}, new.id, coalesce(new.lease_owner, old.lease_owner),
        old.status, new.status, old.lease_token, new.lease_token,
        old.leased_until, new.leased_until, old.next_attempt_at, new.next_attempt_at, new.last_attempt_at,
        old.attempts, new.attempts, old.crashes, new.crashes)"""
TRIGGER = "CREATE TRIGGER chaos_witness AFTER UPDATE ON outbox_event FOR EACH ROW "
WITNESSES = {
    "postgresql": (
        TABLE.format(identity="GENERATED ALWAYS AS IDENTITY", uuid="uuid", moment="timestamptz"),
        "CREATE FUNCTION chaos_witness() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        + RECORD.format(session="pg_backend_pid()")
        + "; RETURN NULL; END $$",
        TRIGGER + "EXECUTE FUNCTION chaos_witness()",
    ),
    "mysql": (
        TABLE.format(identity="AUTO_INCREMENT", uuid="char(32)", moment="datetime(6)"),
        TRIGGER + RECORD.format(session="connection_id()"),
    ),
}


class Row(NamedTuple):
    id: str
    key: str
    position: int
    number: int  # Which event of its key it is, counted under a lock on the key: the order of commits
    status: str


class Change(NamedTuple):
    seq: int
    connection: int
    id: str
    owner: str | None
    old_status: str
    status: str
    old_token: str | None
    token: str | None
    old_leased_until: datetime | None
    leased_until: datetime | None
    old_next_attempt_at: datetime | None
    next_attempt_at: datetime | None
    claimed_at: datetime | None
    old_attempts: int
    attempts: int
    old_crashes: int
    crashes: int

    @property
    def is_claim(self) -> bool:
        return self.token is not None and self.token != self.old_token

    @property
    def is_settle(self) -> bool:
        """True if a relay ended its lease on the row."""
        return self.old_token is not None and self.token is None


class Answer(NamedTuple):
    """The answer that a worker got when it settled rows of one claim."""

    owner: str
    token: str
    settled: list[str]
    lost: list[str]


def install(connection: sa.Connection) -> None:
    name = "postgresql" if connection.dialect.name == "postgresql" else "mysql"
    for statement in WITNESSES[name]:
        connection.exec_driver_sql(statement)


def changes(connection: sa.Connection) -> list[Change]:
    columns: list[sa.ColumnClause[Any]] = [sa.column(name) for name in Change._fields]
    rows = connection.execute(sa.select(*columns).select_from(sa.table("chaos_history")).order_by("seq"))
    found = map(Change._make, rows)
    return [c._replace(id=_hex(c.id), old_token=_hex(c.old_token), token=_hex(c.token)) for c in found]


def rows(connection: sa.Connection, event: sa.Table) -> list[Row]:
    number = event.c.payload["n"].as_integer()
    found = connection.execute(
        sa.select(event.c.id, event.c.ordering_key, event.c.position, number, event.c.status)
    )
    return [Row(_hex(id_), *rest) for id_, *rest in found]


def _hex(value: object) -> str:
    return None if value is None else str(value).replace("-", "")  # type: ignore[return-value]


FINAL = ("delivered", "failed")


class Violation(NamedTuple):
    rule: str
    text: str


class Disorder(AssertionError):
    def __init__(self, violations: Sequence[Violation]) -> None:
        counts = Counter(violation.rule for violation in violations)
        lines = [f"{count} × {rule}" for rule, count in counts.most_common()]
        first = [f"{violation.rule}: {violation.text}" for violation in violations[:20]]
        super().__init__("\n".join([f"{len(violations)} violations", *lines, *first]))
        self.violations = violations


def prove(
    rows: Sequence[Row], changes: Sequence[Change], answers: Iterable[Answer], expect: Iterable[str]
) -> None:
    """Raise ``Disorder`` unless every promise was kept; ``expect`` are the states a row may end in."""
    violations = [
        *Replay(rows, changes).violations(),
        *_answers(changes, answers),
        *_ends(rows, frozenset(expect)),
        *_positions(rows),
    ]
    if violations:
        raise Disorder(violations)


class Replay:
    def __init__(self, rows: Sequence[Row], changes: Sequence[Change]) -> None:
        self._changes = changes
        self._rows = {row.id: row for row in rows}
        self._open: dict[str, dict[str, Row]] = defaultdict(dict)
        for row in sorted(rows, key=lambda row: row.position):
            self._open[row.key][row.id] = row
        self._last: dict[str, Change] = {}
        self._owners: dict[int, str | None] = {}
        self._held: dict[str, set[str]] = defaultdict(set)
        self._given_back: dict[str, set[str]] = defaultdict(set)
        self._claims: dict[str, list[Change]] = defaultdict(list)
        for change in changes:
            if change.is_claim:
                self._claims[change.token or ""].append(change)

    def violations(self) -> Iterator[Violation]:
        for change in self._changes:
            self._is_whole(change)
            if change.old_status in FINAL:
                yield self._violation("changed after its end", change, f"it was {change.old_status}")
            if change.is_claim:
                yield from self._claim(change)
            elif change.is_settle:
                yield from self._settle(change)
            self._apply(change)

    def _is_whole(self, change: Change) -> None:
        """Check that each change goes on where the last one ended: otherwise the history is not reliable."""
        last = self._last.get(change.id)
        if last is not None:
            then = (last.status, last.token, last.leased_until, last.next_attempt_at, last.attempts)
            now = (change.old_status, change.old_token, change.old_leased_until)
            assert then == (*now, change.old_next_attempt_at, change.old_attempts), (last, change)

    def _claim(self, change: Change) -> Iterator[Violation]:
        assert change.claimed_at is not None
        self._owners[change.connection] = change.owner
        if change.old_leased_until is not None and change.old_leased_until > change.claimed_at:
            yield self._violation("claimed twice", change, f"leased until {change.old_leased_until}")
        if change.old_next_attempt_at is not None and change.old_next_attempt_at > change.claimed_at:
            yield self._violation("claimed early", change, f"due at {change.old_next_attempt_at}")
        if change.token not in self._held:
            yield from self._turn(change.token or "")
        # A claim of many that died gives its attempt back; so the next one does not count another.
        died = change.old_token is not None
        counted = 0 if died and change.old_crashes < ALONE else 1
        yield from self._count(change, attempts=counted, crashes=change.old_crashes % ALONE + died)

    def _turn(self, token: str) -> Iterator[Violation]:
        """Check a claim as a whole at its first change: statements write the rows of a claim in any order."""
        claim = {change.id: change for change in self._claims[token]}
        self._held[token] = set(claim)
        for key, wanted in Counter(self._rows[id_].key for id_ in claim).items():
            earlier: Row | None = None
            for row in self._open[key].values():
                if row.id not in claim:
                    earlier = earlier or row
                    continue
                if earlier:
                    text = f"position {earlier.position} was {self._state(earlier, claim[row.id])}"
                    yield self._violation("out of turn", claim[row.id], text)
                wanted -= 1
                if not wanted:
                    break

    def _state(self, row: Row, claim: Change) -> str:
        last = self._last.get(row.id)
        if last is None:
            return "not claimed yet"
        assert claim.claimed_at is not None
        if last.leased_until is not None:
            alive = "leased" if last.leased_until > claim.claimed_at else "left behind"
            return f"{alive} by {last.owner}"
        if last.next_attempt_at is None:
            return "parked"
        return "backing off" if last.next_attempt_at > claim.claimed_at else "due and not claimed yet"

    def _settle(self, change: Change) -> Iterator[Violation]:
        holder = self._last[change.id].owner
        if self._owners.get(change.connection) != holder:
            by = self._owners.get(change.connection)
            yield self._violation("settled by another", change, f"held by {holder}, settled by {by}")
        if change.status == "delivered":
            yield from self._delivery(change)
        # A settle that gives the attempt back takes one off; only a backoff or a release keeps a row pending.
        given_back = change.attempts - change.old_attempts
        if given_back not in ((-1, 0) if change.status == "pending" else (0,)):
            yield self._violation("miscounted", change, f"attempts changed by {given_back} in a settle")

    def _delivery(self, change: Change) -> Iterator[Violation]:
        token = change.old_token or ""
        for row in self._open[self._rows[change.id].key].values():
            if row.id == change.id:
                return
            if row.id not in self._held[token]:
                yield self._violation("delivered out of order", change, f"before position {row.position}")
            elif row.id in self._given_back[token]:
                text = f"after position {row.position} was given back"
                yield self._violation("delivered out of order", change, text)

    def _count(self, change: Change, *, attempts: int, crashes: int) -> Iterator[Violation]:
        if (change.attempts - change.old_attempts, change.crashes) != (attempts, crashes):
            text = f"attempts {change.old_attempts} → {change.attempts}, crashes {change.old_crashes} → "
            yield self._violation("miscounted", change, f"{text}{change.crashes}")

    def _apply(self, change: Change) -> None:
        self._last[change.id] = change
        if change.is_settle and change.status == "pending":
            self._given_back[change.old_token or ""].add(change.id)
        if change.status in FINAL:
            self._open[self._rows[change.id].key].pop(change.id, None)

    def _violation(self, rule: str, change: Change, text: str) -> Violation:
        row = self._rows[change.id]
        return Violation(rule, f"#{change.seq} {row.key} position {row.position} by {change.owner}: {text}")


def _answers(changes: Iterable[Change], answers: Iterable[Answer]) -> Iterator[Violation]:
    """Check that every settle that a worker heard of is in the history, and no other."""
    happened = {(change.old_token, change.id) for change in changes if change.is_settle}
    answered: set[tuple[str | None, str]] = set()
    for answer in answers:
        lost = set(answer.lost)
        for id_ in answer.settled:
            if ((answer.token, id_) in happened) == (id_ in lost):
                yield Violation("untrue answer", f"{answer.owner}, row {id_}: lost = {id_ in lost}")
            answered.add((answer.token, id_))
    for token, id_ in happened - answered:
        yield Violation("untrue answer", f"row {id_} was settled under {token} and no worker heard of it")


def _ends(rows: Iterable[Row], expect: frozenset[str]) -> Iterator[Violation]:
    for row in rows:
        if row.status not in expect:
            yield Violation("not delivered", f"{row.key} position {row.position} is {row.status}")


def _positions(rows: Iterable[Row]) -> Iterator[Violation]:
    keys: dict[str, list[Row]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: row.position):
        keys[row.key].append(row)
    for key, members in keys.items():
        for one, next_ in pairwise(members):
            if next_.number != one.number + 1:
                yield Violation("not in commit order", f"{key}: {next_.number} follows {one.number}")
