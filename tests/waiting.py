"""Wait until a condition holds. Tests wait here, never with a sleep or a deadline of their own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from inspect import isawaitable
from typing import Any

PATIENCE = 60.0
"""Seconds until a test gives up. Nothing is measured by it: it only ends a test that would never end."""
STEP = 0.02

What = str | Callable[[], str]


def wait_for(condition: Callable[[], Any], what: What = "the condition", seconds: float = PATIENCE) -> Any:
    """Return the condition's value as soon as it is true; ``what`` explains a wait in vain."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        _check(deadline, what, seconds)
        time.sleep(STEP)
    return value


async def await_for(
    condition: Callable[[], Any], what: What = "the condition", seconds: float = PATIENCE
) -> Any:
    """Return the condition's value, awaited if need be, as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (value := await _value(condition)):
        _check(deadline, what, seconds)
        await asyncio.sleep(STEP)
    return value


async def cancel(task: asyncio.Future[Any]) -> None:
    """Cancel the task, which must end as cancelled."""
    task.cancel()
    await asyncio.wait([task], timeout=PATIENCE)
    assert task.cancelled()


async def _value(condition: Callable[[], Any]) -> Any:
    value = condition()
    return await value if isawaitable(value) else value


def _check(deadline: float, what: What, seconds: float) -> None:
    if time.monotonic() > deadline:
        raise AssertionError(f"not after {seconds:g} s: {what if isinstance(what, str) else what()}")
