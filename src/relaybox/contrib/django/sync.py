"""From synchronous Django code into the asynchronous relay, and back for every call of the database.

A relay's coroutines run in a loop beside the caller; whatever touches Django's connection, or is a
synchronous handler, comes back into the caller's own thread. So an eager task, a view and a test see their
own connection and what their transaction has written.

Where that is impossible (a loop runs in this thread already, or gevent or eventlet replaced the threads), one
helper thread does it all, with a connection of its own.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections

from relaybox.contrib.django.private import waiting_thread
from relaybox.database.connect import in_loop

T = TypeVar("T")
P = ParamSpec("P")

_helper = threading.local()


def enter(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` to its end."""
    alone = partial(copy_context().run, _alone, work)
    if (apply := _native_thread()) is not None:
        return apply(alone)
    if in_loop():
        with ThreadPoolExecutor(1, "relaybox-drain") as thread:
            return thread.submit(alone).result()
    entered = _Entered(work)
    try:
        return async_to_sync(entered.run)()
    except BaseException:
        entered.leave()
        raise


class _Entered(Generic[T]):
    """Work that a thread waits for; if that thread is interrupted, as by a time limit, the work ends too."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._work = work
        self._left = False
        self._ended: Future[None] = Future()
        self._begun: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any], Any] | None = None

    async def run(self) -> T:
        """Do the work."""
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._begun = (loop, task, waiting_thread(loop))
        try:
            if self._left:
                raise asyncio.CancelledError
            return await self._work()
        finally:
            self._ended.set_result(None)

    def leave(self) -> None:
        """Cancel it, and do for it what only this thread can, until it has ended."""
        self._left = True
        if self._begun is not None and not self._ended.done():
            loop, task, executor = self._begun
            loop.call_soon_threadsafe(task.cancel)
            executor.run_until_future(self._ended)


async def call(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a synchronous function in the thread that entered."""
    if getattr(_helper, "alone", False):
        return _outside_loop(function, *args, **kwargs)
    return await sync_to_async(function, thread_sensitive=True)(*args, **kwargs)


def enter_interruptibly(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work`` to its end, or to Ctrl-C: for commands, whose thread has nothing else to do."""
    if _native_thread() is not None or in_loop():
        return enter(work)
    return _here(work)


def _here(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    _helper.alone = True
    try:
        with asyncio.Runner() as runner:
            return runner.run(work())
    finally:
        _helper.alone = False


def _alone(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run it in this thread, which does nothing else."""
    try:
        return _here(work)
    finally:
        connections.close_all()


def _outside_loop(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call it as if no loop ran here; it may block, as this thread has nothing else to do."""
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        return function(*args, **kwargs)
    finally:
        asyncio._set_running_loop(loop)


def _native_thread() -> Callable[[Callable[[], T]], T] | None:
    """Return what runs a function in a real thread, if the threads of this process are greenlets."""
    if "gevent" in sys.modules:
        from gevent import get_hub, monkey

        if monkey.is_module_patched("threading"):
            return get_hub().threadpool.apply  # type: ignore[no-any-return]
    if "eventlet" in sys.modules:
        from eventlet import patcher, tpool

        if patcher.is_monkey_patched("thread"):
            return tpool.execute  # type: ignore[no-any-return]
    return None
