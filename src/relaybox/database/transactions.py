"""SQL for transactions, savepoints and locks, for connections without a driver call for them."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import NamedTuple, TypeVar

from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Steps

T = TypeVar("T")


class Block(NamedTuple):
    """The statements that begin, commit and roll back a transaction or savepoint."""

    begin: Query
    commit: Query
    rollback: Query


TRANSACTION = Block(*(Query(sql, ()) for sql in ("BEGIN", "COMMIT", "ROLLBACK")))
# Names must be unique: MySQL lets a savepoint replace an earlier one of the same name.
_numbers = count(1)


def savepoint() -> Block:
    """Return a savepoint with a unique name."""
    name = f"relaybox_{next(_numbers)}"
    sql = f"SAVEPOINT {name}", f"RELEASE SAVEPOINT {name}", f"ROLLBACK TO SAVEPOINT {name}"
    return Block(*(Query(words, ()) for words in sql))


def in_transaction(steps: Steps[T]) -> Steps[T]:
    """Run the steps in their own transaction, on a connection in autocommit."""
    try:
        # Inside the try: a BEGIN may run even if its caller was cancelled.
        yield [TRANSACTION.begin]
        result = yield from steps
        yield [TRANSACTION.commit]
    except BaseException:
        # A broken connection has nothing to roll back; report the first error.
        with suppress(Exception):
            yield [TRANSACTION.rollback]
        raise
    return result


BEGIN_WRITING = {
    "postgresql": ("BEGIN ISOLATION LEVEL READ COMMITTED",),
    "mysql": ("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "START TRANSACTION"),
    "sqlite": ("BEGIN IMMEDIATE",),
}
"""For other owners' connections: their isolation level may differ, and SQLite must know that it writes."""
REPEATABLE_READ = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_LOCK_WAIT = {
    "postgresql": "SET LOCAL lock_timeout = {milliseconds}",
    "mysql": "SET SESSION innodb_lock_wait_timeout = {seconds}",
}


def begin_on_sqlite(*, reads: bool) -> str:
    """Return BEGIN for a reader, or for a transaction that writes from the start."""
    return "BEGIN" if reads else "BEGIN IMMEDIATE"


def lock_wait(backend: str, seconds: float) -> str | None:
    """Return the statement that limits lock waits in a transaction; SQLite has only one writer."""
    text = _LOCK_WAIT.get(backend)
    return text and text.format(milliseconds=int(seconds * 1_000), seconds=int(seconds))


def lock_tables(names: str) -> str:
    """Return the statement that blocks writes to PostgreSQL tables until the transaction ends."""
    return f"LOCK TABLE {names} IN SHARE MODE"


def lock_file(table: str, column: str) -> str:
    """Return a statement that takes SQLite's write lock without changing a row."""
    return f"UPDATE {table} SET {column} = {column} WHERE 1 = 0"  # noqa: S608
