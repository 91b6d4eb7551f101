"""Transactions and savepoints in words, for connections whose driver has no call for them."""

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
