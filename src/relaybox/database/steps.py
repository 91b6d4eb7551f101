"""Drives generators that yield statements, receive their rows, and return a result.

They serve every driver, synchronous or not. A driver sends one yield in one round trip if it can.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, TypeAlias, TypeVar

from relaybox.database.statements.delivery import Query

T = TypeVar("T")
Row: TypeAlias = Sequence[Any]
Rows: TypeAlias = list[Row]
Steps: TypeAlias = Generator[list[Query], list[Rows], T]


def ask(queries: list[Query]) -> Steps[list[Rows]]:
    """Execute independent statements and return the rows of each."""
    return (yield queries)


def drive(steps: Steps[T], execute: Callable[[list[Query]], list[Rows]]) -> T:
    """Execute the statements that the steps yield until they return; the steps may catch errors."""
    try:
        queries = next(steps)
        while True:
            try:
                results = execute(queries)
            except BaseException as error:
                queries = steps.throw(error)
            else:
                queries = steps.send(results)
    except StopIteration as end:
        result: T = end.value
        return result


async def adrive(steps: Steps[T], execute: Callable[[list[Query]], Awaitable[list[Rows]]]) -> T:
    """Do what ``drive`` does, but await the statements of each yield."""
    try:
        queries = next(steps)
        while True:
            try:
                results = await execute(queries)
            except BaseException as error:
                queries = steps.throw(error)
            else:
                queries = steps.send(results)
    except StopIteration as end:
        result: T = end.value
        return result
