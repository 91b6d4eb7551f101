"""Wake relays within one process: a flag for each destination, and the bell that sets the flags.

A wake tells a relay to look now instead of at the next poll. It is only a hint: a lost one delays an event
until the next poll, a needless one costs an empty claim.
"""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet


class Wake(Protocol):
    """Lets the lanes of a relay sleep until there may be something to do."""

    @property
    def alive(self) -> bool:
        """True if it hears of events that other processes commit."""
        ...

    async def wait(self, destination: str, seconds: float) -> bool:
        """Sleep until woken, at most ``seconds``; True if woken since the last wait. One lane at a time."""
        ...

    def wake(self, destination: str | None = None) -> None:
        """Wake the lane of one destination, or all lanes, from any thread; never raise."""
        ...

    async def close(self) -> None:
        """Stop listening and release connections."""
        ...


class Caller(Protocol):
    """The emitter's side: tells relays in any process that events for destinations are committed."""

    def call(self, destinations: Iterable[str]) -> None:
        """Tell the relays; return at once and never raise."""
        ...

    def close(self) -> None:
        """Release connections; a call just made still goes out if that takes no more than a second."""
        ...


class _Flag:
    """Holds whether a destination was woken since its last wait, and the sleeper to wake, without a lock.

    A sleeper registers before it reads ``woken``; a waker sets ``woken`` before it looks for a sleeper. So
    one of them always sees the other.
    """

    __slots__ = ("loop", "sleeper", "woken")

    def __init__(self, woken: bool) -> None:
        self.woken = woken
        self.sleeper: asyncio.Future[None] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None

    async def sleep(self, seconds: float) -> None:
        self.loop = loop = asyncio.get_running_loop()
        self.sleeper = sleeper = loop.create_future()
        timer = loop.call_later(seconds, _rouse, sleeper)
        try:
            if not self.woken:
                await sleeper
        finally:
            timer.cancel()
            self.sleeper = None

    def take(self) -> bool:
        if not self.woken:
            return False
        self.woken = False
        return True

    def set(self) -> None:
        if self.woken:
            return  # the waker that set it has roused the sleeper
        self.woken = True
        sleeper, loop = self.sleeper, self.loop
        if sleeper is not None and loop is not None:
            # A closed loop has no lanes any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_rouse, sleeper)


def _rouse(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


class LocalWake:
    """A ``Wake`` for the lanes of one loop, woken from any thread of the process."""

    alive = False

    def __init__(self) -> None:
        self._flags: dict[str, _Flag] = {}
        self._all_woken = False

    async def wait(self, destination: str, seconds: float) -> bool:
        """Sleep until woken, at most ``seconds``; True if woken since the last wait."""
        flag = self._flag(destination)
        if not flag.woken and seconds > 0:
            await flag.sleep(seconds)
        return flag.take()

    def wake(self, destination: str | None = None) -> None:
        """Wake one destination, or all, from any thread."""
        if destination is not None:
            self._flag(destination).set()
            return
        # This is for lanes that have not waited yet.
        self._all_woken = True
        for flag in list(self._flags.values()):
            flag.set()

    def knows(self, destination: str) -> bool:
        """True if the destination was ever waited for or woken."""
        return destination in self._flags

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def _flag(self, destination: str) -> _Flag:
        return self._flags.get(destination) or self._flags.setdefault(destination, _Flag(self._all_woken))


def _no_caller() -> None:
    return None


class Bell:
    """Wakes the relays of this process, and calls beyond it for destinations that none of them serves.

    The caller beyond is opened when it is first needed: code that only reads an outbox needs no driver.
    """

    def __init__(self, open_beyond: Callable[[], Caller | None] = _no_caller) -> None:
        self._open_beyond = open_beyond
        # Weak: a relay dropped without ``remove`` must not keep the others from being called.
        self._relays: WeakKeyDictionary[Wake, frozenset[str]] = WeakKeyDictionary()
        renew_after_fork(self)

    def add(self, wake: Wake, destinations: Iterable[str]) -> None:
        """Register a relay of this process and the destinations it serves."""
        self._relays[wake] = frozenset(destinations)

    def remove(self, wake: Wake) -> None:
        """Remove a relay that has stopped."""
        self._relays.pop(wake, None)

    @contextmanager
    def serving(self, wake: Wake, destinations: Iterable[str]) -> Iterator[None]:
        """Register a relay of this process for the duration of the block."""
        self.add(wake, destinations)
        try:
            yield
        finally:
            self.remove(wake)

    def call(self, destinations: Iterable[str]) -> None:
        """Wake the relays that serve these destinations."""
        left = called = frozenset(destinations)
        for wake, served in self._snapshot():
            for name in served & called:
                wake.wake(name)
            left -= served
        if left and (beyond := self._beyond) is not None:
            beyond.call(left)

    @functools.cached_property
    def _beyond(self) -> Caller | None:
        return self._open_beyond()

    def _snapshot(self) -> list[tuple[Wake, frozenset[str]]]:
        """Copy the relays; try again if another thread changes them during the copy."""
        while True:
            with suppress(RuntimeError):
                return list(self._relays.items())

    def close(self) -> None:
        """Close the caller beyond this process."""
        if self._beyond is not None:
            self._beyond.close()

    def after_fork(self) -> None:
        """Forget the parent's relays: they do not run in this process."""
        self._relays = WeakKeyDictionary()


class Renewed(Protocol):
    """An object with threads, locks or loops, which a fork copies in an undefined state."""

    def after_fork(self) -> None:
        """Reset it; called in the child before any other code."""
        ...


_all: WeakSet[Renewed] = WeakSet()


def renew_after_fork(one: Renewed) -> None:
    """Call its ``after_fork`` in every child of this process, as long as the object lives."""
    _all.add(one)


def _after_fork() -> None:
    for one in list(_all):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
