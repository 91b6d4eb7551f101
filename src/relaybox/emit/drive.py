"""Executing what ``write`` yields: once for synchronous drivers, once for asynchronous ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from relaybox.emit.driver import Rows, failed
from relaybox.emit.write import Writing
from relaybox.errors import SchemaError
from relaybox.stores.statements import Query

T = TypeVar("T")

# Undefined table, column and schema in PostgreSQL; table and column in MySQL, as states and as numbers.
_NO_TABLE = frozenset({"42P01", "42703", "3F000", "42S02", "42S22", 1146, 1054})
_NO_TABLE_IN_SQLITE = ("no such table", "has no column")
_FAILED_TRANSACTION = "25P02"


def drive(writing: Writing[T], execute: Callable[[Query], Rows]) -> T:
    """Execute each statement and send its rows back, until there is a result."""
    try:
        query = next(writing)
        while True:
            try:
                rows = execute(query)
            except BaseException as error:
                query = writing.throw(translated(error))
            else:
                query = writing.send(rows)
    except StopIteration as done:
        result: T = done.value
        return result


async def adrive(writing: Writing[T], execute: Callable[[Query], Awaitable[Rows]]) -> T:
    """``drive``, awaiting each statement."""
    try:
        query = next(writing)
        while True:
            try:
                rows = await execute(query)
            except BaseException as error:
                query = writing.throw(translated(error))
            else:
                query = writing.send(rows)
    except StopIteration as done:
        result: T = done.value
        return result


def translated(error: BaseException) -> BaseException:
    """Our own error where there is one; else the driver's, which callers know how to retry."""
    beneath: Any = getattr(error, "orig", None) or error
    code = getattr(beneath, "sqlstate", None) or getattr(beneath, "pgcode", None)
    if code is None and beneath.args:
        code = beneath.args[0]
    if code == _FAILED_TRANSACTION:
        return _caused(failed("PostgreSQL"), error)
    if isinstance(code, str | int) and (code in _NO_TABLE or _is_missing_in_sqlite(code)):
        problem = "a table is missing, or older than this version needs"
        fix = "run `relaybox migrate`, or call outbox.migrate()"
        return _caused(SchemaError(f"{problem}: {_summary(beneath)}; {fix}"), error)
    return error


def _summary(error: Any) -> str:
    """What went wrong, without the excerpt of the statement that PostgreSQL's drivers add in lines below."""
    primary = getattr(getattr(error, "diag", None), "message_primary", None)
    return primary or str(error).partition("\n")[0]


def _is_missing_in_sqlite(message: str | int) -> bool:
    return isinstance(message, str) and any(words in message for words in _NO_TABLE_IN_SQLITE)


def _caused(ours: Exception, error: BaseException) -> Exception:
    ours.__cause__ = error
    return ours
