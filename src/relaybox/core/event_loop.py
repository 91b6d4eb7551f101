"""Run asynchronous work from synchronous code."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from relaybox.errors import ConfigError

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, on uvloop if it is installed."""
    if in_loop():
        work.close()
        raise ConfigError(
            "an event loop is running: await the method with an `a` before its name, such as `adrain()`"
        )
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(work)


def in_loop() -> bool:
    """True if an event loop runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
