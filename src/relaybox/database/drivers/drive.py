"""Executing what ``write`` yields: once for synchronous drivers, once for asynchronous ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from relaybox.database.dialects import missing_tables
from relaybox.database.drivers.driver import Rows, Writing, failed
from relaybox.database.statements.delivery import Query
from relaybox.errors import SchemaError

T = TypeVar("T")

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
    if _FAILED_TRANSACTION in (getattr(beneath, "sqlstate", None), getattr(beneath, "pgcode", None)):
        return _caused(failed("PostgreSQL"), error)
    if missing := missing_tables(beneath):
        return _caused(SchemaError(missing), error)
    return error


def _caused(ours: Exception, error: BaseException) -> Exception:
    ours.__cause__ = error
    return ours
