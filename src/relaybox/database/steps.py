"""Work in a database as generators: each yields statements, is sent their rows, and returns a result.

So the same steps serve every driver, synchronous or not. The statements of one yield belong together: a
driver sends them in one round trip where it can.
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
    """Execute the statements, which need nothing of each other; return the rows of each."""
    return (yield queries)


def drive(steps: Steps[T], execute: Callable[[list[Query]], list[Rows]]) -> T:
    """Execute what the steps yield until they return. They may catch an error of their statements."""
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
    """Do what ``drive`` does, awaiting the statements of each yield."""
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
