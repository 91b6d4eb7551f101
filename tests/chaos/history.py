"""What happened to every row, written down by the database itself.

A trigger on ``outbox_event`` appends each change to ``chaos_history`` inside the transaction that makes it:
what was rolled back is not there, and no process can die between doing a thing and recording it.

``seq`` is drawn while the changed row is locked and before its transaction commits. So the changes of one
row are in their true order, and whatever a statement saw committed has a lower ``seq`` than its own changes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple

import sqlalchemy as sa

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
    """A row as it was emitted, and the state it is in at the end."""

    id: str
    key: str
    position: int
    number: int
    """Which event of its key it is, counted under a lock on the key: the order of commits."""
    status: str


class Change(NamedTuple):
    """One update of one row: what it was, and what it became."""

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
        """Whether the row got a new lease."""
        return self.token is not None and self.token != self.old_token

    @property
    def is_settle(self) -> bool:
        """Whether a lease on the row ended by the hand of a relay."""
        return self.old_token is not None and self.token is None


class Answer(NamedTuple):
    """What a worker was told when it settled rows of one claim."""

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
