"""Transactions, savepoints and locks in words, for connections whose driver has no call for them."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import NamedTuple, TypeVar

from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Steps

T = TypeVar("T")


class Block(NamedTuple):
    """What begins a transaction or savepoint, and what ends it."""

    begin: Query
    commit: Query
    rollback: Query


TRANSACTION = Block(*(Query(sql, ()) for sql in ("BEGIN", "COMMIT", "ROLLBACK")))
# MySQL lets a savepoint replace an earlier one of its name.
_numbers = count(1)


def savepoint() -> Block:
    """Return a savepoint of a name that no other has."""
    name = f"relaybox_{next(_numbers)}"
    sql = f"SAVEPOINT {name}", f"RELEASE SAVEPOINT {name}", f"ROLLBACK TO SAVEPOINT {name}"
    return Block(*(Query(words, ()) for words in sql))


def in_transaction(steps: Steps[T]) -> Steps[T]:
    """Do the steps in a transaction of their own, for a connection in autocommit."""
    try:
        # Inside: a BEGIN whose caller was cancelled may have run all the same.
        yield [TRANSACTION.begin]
        result = yield from steps
        yield [TRANSACTION.commit]
    except BaseException:
        # Where the connection broke there is nothing to roll back; the error to see is the first one.
        with suppress(Exception):
            yield [TRANSACTION.rollback]
        raise
    return result


BEGIN_WRITING = {
    "postgresql": ("BEGIN ISOLATION LEVEL READ COMMITTED",),
    "mysql": ("SET TRANSACTION ISOLATION LEVEL READ COMMITTED", "START TRANSACTION"),
    "sqlite": ("BEGIN IMMEDIATE",),
}
"""What begins a transaction of ours on somebody else's connection: its level may be another, and SQLite must
know from the start that it writes.
"""
REPEATABLE_READ = "SET TRANSACTION ISOLATION LEVEL REPEATABLE READ"
_LOCK_WAIT = {
    "postgresql": "SET LOCAL lock_timeout = {milliseconds}",
    "mysql": "SET SESSION innodb_lock_wait_timeout = {seconds}",
}


def begin_on_sqlite(*, reads: bool) -> str:
    """Begin a transaction that is a writer from the start, unless it only reads."""
    return "BEGIN" if reads else "BEGIN IMMEDIATE"


def lock_wait(backend: str, seconds: float) -> str | None:
    """Say, inside a transaction, how long it waits for a lock; SQLite has one writer at a time."""
    text = _LOCK_WAIT.get(backend)
    return text and text.format(milliseconds=int(seconds * 1_000), seconds=int(seconds))


def lock_tables(names: str) -> str:
    """Keep others from writing to the tables until the end of the transaction (PostgreSQL)."""
    return f"LOCK TABLE {names} IN SHARE MODE"


def lock_file(table: str, column: str) -> str:
    """Become the writer of an SQLite file, without a change."""
    return f"UPDATE {table} SET {column} = {column} WHERE 1 = 0"  # noqa: S608
