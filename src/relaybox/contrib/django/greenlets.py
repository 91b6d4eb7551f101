"""Event loops among the greenlets of gevent and eventlet, which share one thread.

A loop does not get a real thread of its own: neither gevent's nor eventlet's locks are safe between threads.
A log record that both wrote at the wrong moment stopped both for good.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary, WeakSet


def has_greenlets() -> bool:
    """True if gevent or eventlet replaced the threads of this process by greenlets."""
    return bool(_hubs())


def _hubs() -> list[Any]:
    """Return the greenlets of this thread that wake the others."""
    hubs: list[Any] = []
    if "gevent" in sys.modules:
        from gevent import get_hub, monkey

        if monkey.is_module_patched("threading"):
            hubs.append(get_hub())
    if "eventlet" in sys.modules:
        from eventlet import hubs as eventlet_hubs
        from eventlet import patcher

        if patcher.is_monkey_patched("thread"):
            hubs.append(eventlet_hubs.get_hub().greenlet)
    return hubs


@contextmanager
def without_loop() -> Iterator[None]:
    """Hide the loop that runs here during the block; after it, each greenlet sees only its own loop."""
    _separate()
    before = _get()
    _set(_NO_LOOP)
    try:
        yield
    finally:
        _set(before)


_Running = tuple[asyncio.AbstractEventLoop | None, Any, Any]
_NO_LOOP: _Running = (None, None, None)
_separated: WeakSet[Any] = WeakSet()
"""The main greenlets of the threads whose greenlets have separate loops."""


def _get() -> _Running:
    """Return what asyncio keeps for a thread: the running loop, and its hooks for generators."""
    return (asyncio._get_running_loop(), *sys.get_asyncgen_hooks())


def _set(running: _Running) -> None:
    asyncio._set_running_loop(running[0])
    sys.set_asyncgen_hooks(*running[1:])


def _separate() -> None:
    """Give each greenlet of this thread a running loop of its own, from now on."""
    import greenlet

    main = greenlet.getcurrent()
    while main.parent is not None:
        main = main.parent
    if main not in _separated:
        _separated.add(main)
        greenlet.settrace(_swapping(greenlet.gettrace()))


def _swapping(outer: Callable[[str, Any], Any] | None) -> Callable[[str, Any], None]:
    running: WeakKeyDictionary[Any, _Running] = WeakKeyDictionary(dict.fromkeys(_hubs(), _NO_LOOP))
    # Perhaps of a greenlet that waits now, so those not seen yet see it until it ends.
    unclaimed = _get()

    def first_seen(entered: Any) -> _Running:
        # SQLAlchemy calls synchronous code in a child of the greenlet that runs the loop.
        inherited = running.get(entered.parent, _NO_LOOP) if entered.parent is not None else _NO_LOOP
        if inherited[0] is None and unclaimed[0] is not None and unclaimed[0].is_running():
            return unclaimed
        return inherited

    def switch(event: str, between: tuple[Any, Any]) -> None:
        left, entered = between
        running[left] = _get()
        _set(running.get(entered) or first_seen(entered))
        if outer is not None:
            outer(event, between)

    return switch
