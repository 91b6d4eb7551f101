"""What is asked of a database: each item is a round trip with its queries."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch


@contextmanager
def counted(driver: Any) -> Iterator[list[Any]]:
    """Count all round trips meanwhile of a driver, or of every driver of a class."""
    asked: list[Any] = []
    run = driver.run

    async def counting(*arguments: Any, **options: Any) -> Any:
        *driver, begin = arguments
        return await run(*driver, lambda: _noted(begin(), asked), **options)

    with patch.object(driver, "run", counting):
        yield asked


def _noted(steps: Generator[Any, Any, Any], asked: list[Any]) -> Generator[Any, Any, Any]:
    answers = None
    while True:
        try:
            queries = steps.send(answers)
        except StopIteration as end:
            return end.value
        asked.append(queries)
        answers = yield queries
