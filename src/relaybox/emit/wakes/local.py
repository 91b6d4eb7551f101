"""Wakes within one process: a flag for each destination, and the bell that sets the flags of every relay."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

from relaybox.emit.wakes.wake import Caller, Wake


class _Flag:
    """Whether a destination was woken since its last wait, and who sleeps until it is.

    Both sides write first and look second: a sleeper shows itself before it looks at ``woken``, a waker sets
    ``woken`` before it looks for a sleeper. So one of them always sees the other, without a lock.
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
        """Whether it was woken; from now on it is not."""
        if not self.woken:
            return False
        self.woken = False
        return True

    def set(self) -> None:
        if self.woken:
            return  # whoever set it has roused the sleeper
        self.woken = True
        sleeper, loop = self.sleeper, self.loop
        if sleeper is not None and loop is not None:
            # A loop that was closed has no lanes any more.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_rouse, sleeper)


def _rouse(sleeper: asyncio.Future[None]) -> None:
    if not sleeper.done():
        sleeper.set_result(None)


class LocalWake:
    """A ``Wake`` (see there) for the lanes of one loop, woken from any thread of the process."""

    alive = False

    def __init__(self) -> None:
        self._flags: dict[str, _Flag] = {}
        self._all_woken = False

    async def wait(self, destination: str, seconds: float) -> bool:
        """Sleep for ``seconds``, or until the destination was woken since the last wait; whether it was."""
        flag = self._flag(destination)
        if not flag.woken and seconds > 0:
            await flag.sleep(seconds)
        return flag.take()

    def wake(self, destination: str | None = None) -> None:
        """Wake one destination, or all; from any thread."""
        if destination is not None:
            self._flag(destination).set()
            return
        # For lanes that have not waited yet.
        self._all_woken = True
        for flag in list(self._flags.values()):
            flag.set()

    def knows(self, destination: str) -> bool:
        """Whether the destination was ever waited for or woken."""
        return destination in self._flags

    async def close(self) -> None:
        """Nothing is held."""

    def _flag(self, destination: str) -> _Flag:
        return self._flags.get(destination) or self._flags.setdefault(destination, _Flag(self._all_woken))


class Bell:
    """A ``Caller`` (see there) that an outbox owns: wakes the relays of this process, and calls the others.

    ``beyond`` is told of the destinations that no relay of this process serves: one that is here looks at
    once, and the others would come for nothing.
    """

    def __init__(self, beyond: Caller | None = None) -> None:
        self._beyond = beyond
        # Weak: one that was dropped without a word must not keep the others from being called.
        self._relays: WeakKeyDictionary[Wake, frozenset[str]] = WeakKeyDictionary()
        renew_after_fork(self)

    def add(self, wake: Wake, destinations: Iterable[str]) -> None:
        """A relay of this process runs and serves these destinations."""
        self._relays[wake] = frozenset(destinations)

    def remove(self, wake: Wake) -> None:
        """The relay has stopped."""
        self._relays.pop(wake, None)

    @contextmanager
    def serving(self, wake: Wake, destinations: Iterable[str]) -> Iterator[None]:
        """A relay of this process serves these destinations for the time of the block."""
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
        if left and self._beyond is not None:
            self._beyond.call(left)

    def _snapshot(self) -> list[tuple[Wake, frozenset[str]]]:
        """Relays come and go in other threads, also in the midst of a copy."""
        while True:
            with suppress(RuntimeError):
                return list(self._relays.items())

    def close(self) -> None:
        """Close what calls the relays beyond."""
        if self._beyond is not None:
            self._beyond.close()

    def after_fork(self) -> None:
        """The parent's relays do not run here."""
        self._relays = WeakKeyDictionary()


class Renewed(Protocol):
    """Something with threads, locks or loops, which a fork copies in whatever state they are."""

    def after_fork(self) -> None:
        """Begin anew; called in the child before anything else runs there."""
        ...


_all: WeakSet[Renewed] = WeakSet()


def renew_after_fork(one: Renewed) -> None:
    """Call its ``after_fork`` in every child of this process, for as long as it lives."""
    _all.add(one)


def _after_fork() -> None:
    for one in list(_all):
        one.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
