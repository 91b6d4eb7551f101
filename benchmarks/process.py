"""Run everything that is measured in separate processes, ours and others alike.

As under ``relaybox relay``, they run on uvloop, unless their maker chooses asyncio's loop. The garbage
collector ignores what they set up before the work begins.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import importlib
import multiprocessing
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any, Literal, TypeAlias

Loop: TypeAlias = Literal["uvloop", "asyncio"]
Work: TypeAlias = Callable[..., Coroutine[Any, Any, Any]]

PATIENCE = 30.0
"""Seconds that a process may take on top of its work."""
SLOWEST = 50.0
"""Events per second that a drain is expected to reach."""


def begin() -> float:
    """Return the time at which the work begins, by the clock of all processes."""
    gc.collect()
    gc.freeze()
    return time.monotonic()


async def apart(work: Work, *args: Any, seconds: float, loop: Loop = "uvloop") -> Any:
    """Return what ``work`` returns in a new process, which ends after at most this many seconds."""
    async with asyncio.timeout(seconds), process(seconds, work, *args, loop=loop) as answers:
        return await answers.hear()


class Answers:
    """The answers of a process."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def hear(self) -> Any:
        """Return the next answer; raise an error of the process here."""
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), there.set)
        try:
            await there.wait()
        finally:
            loop.remove_reader(self._connection.fileno())
            # uvloop makes it non-blocking, and a long answer would be read in part.
            os.set_blocking(self._connection.fileno(), True)
        try:
            failed, answer = self._connection.recv()
        except EOFError:
            raise RuntimeError("the process ended without an answer") from None
        if failed:
            raise RuntimeError(answer)
        return answer


@asynccontextmanager
async def process(
    seconds: float, work: Work, *args: Any, tells: bool = False, loop: Loop = "uvloop"
) -> AsyncIterator[Answers]:
    """Start a process that does the work; one that ``tells`` gets a function to report that it begins."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    spawned = context.Process(target=_work, args=(its, seconds, work, args, tells, loop), daemon=True)
    spawned.start()
    its.close()
    try:
        yield Answers(mine)
    finally:
        spawned.kill()
        spawned.join()
        mine.close()


def _work(answers: Connection, seconds: float, work: Work, args: Any, tells: bool, loop: Loop) -> None:
    # It also ends if its parent was killed.
    faulthandler.dump_traceback_later(seconds, exit=True)

    def tell() -> None:
        begin()
        answers.send((False, None))

    try:
        with asyncio.Runner(loop_factory=importlib.import_module(loop).new_event_loop) as runner:
            answers.send((False, runner.run(work(*args, tell) if tells else work(*args))))
    except BaseException:
        answers.send((True, traceback.format_exc()))
