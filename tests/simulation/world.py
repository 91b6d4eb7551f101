"""Time, chance and nodes: a seeded scheduler that runs the tasks of several event loops in virtual time.

A node is a process: it has an event loop of its own and a monotonic clock of its own. Among everything that
is ready, on whatever node, the scheduler picks at random. A crash forgets a node's tasks where they stand,
without running their ``finally``; a stalled node runs nothing until it is resumed.
"""

from __future__ import annotations

import asyncio
import contextvars
import sys
from asyncio.events import _set_running_loop
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from heapq import heapify, heappop, heappush
from random import Random
from typing import Any


class Handle(list[Any]):
    """What is to run on a node, once: the node, the callback and its arguments. A list is made quickly."""

    __slots__ = ()

    def cancel(self) -> None:
        self[1] = None


class SimTask(asyncio.Task):  # type: ignore[type-arg]
    """A task whose place in a set does not depend on where it lies in memory: runs can be repeated."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], *, loop: Any, number: int) -> None:
        self.number = number
        super().__init__(coroutine, loop=loop, name="sim")

    def __hash__(self) -> int:
        return self.number


class Node:
    """A process with an event loop, as far as asyncio needs one, and a clock that is not the others'."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.dead = False
        self.stalled = False
        self._stalled_at = 0.0
        self.troubled: list[tuple[float, float]] = []
        """From when to when something befell this node that may have made it repeat a delivery."""
        self.offset = world.random.uniform(0.0, 1000.0)
        self.rate = world.random.choice((1.0, 1.0, 0.99, 1.01))
        self.asleep = 0.0
        """Seconds for which its machine was suspended: its timers have not seen them."""
        self._asleep_until = 0.0
        self.at_crash: list[Callable[[], Any]] = []
        self.suspects: list[tuple[Any, asyncio.Future[Any]]] = []  # The suspects it sent, and their answers
        self._backlog: list[Handle] = []
        self._tasks: list[SimTask] = []
        self.create_future = partial(asyncio.Future, loop=self)

    def start(self, work: Coroutine[Any, Any, Any]) -> SimTask:
        return self.create_task(work)

    def crash(self) -> None:
        """Die on the spot. Whatever runs right now goes on to its next ``await`` and no further."""
        if not self.dead:
            self._asleep_until = 0.0
            self.resume()
            self.dead = True
            self.trouble()
            self.world.graves.append(self)
            for notice in self.at_crash:
                notice()

    def stall(self) -> None:
        if not self.stalled:
            self.stalled = True
            self._stalled_at = self.world.now

    def suspend(self, seconds: float) -> None:
        """Stall with the whole machine: what its loop waits for comes so much later."""
        if self.stalled:
            return
        self.stall()
        self.asleep += seconds
        self._asleep_until = self.world.now + seconds
        self.world.postpone(self, seconds)
        self.world.at(self._asleep_until, Handle((self.world.nature, self.resume, ())))

    def resume(self) -> None:
        if self.stalled and self.world.now >= self._asleep_until:
            self.stalled = False
            self.troubled.append((self._stalled_at, self.world.now))
            self.world.ready += self._backlog
            self._backlog = []

    def trouble(self, seconds: float = 0.0) -> None:
        self.troubled.append((self.world.now, self.world.now + seconds))

    def hold_back(self, handle: Handle) -> None:
        self._backlog.append(handle)

    def bury(self) -> None:
        """Let go of the tasks. What their ``finally`` does now is of no interest."""
        _set_running_loop(self)  # type: ignore[arg-type]
        for task in self._tasks:
            if task.done():
                continue
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            for _ in range(10):
                with suppress(RuntimeError, asyncio.CancelledError):
                    task.get_coro().close()  # type: ignore[union-attr]
                    break
        self._tasks.clear()
        self._backlog.clear()

    # What asyncio asks of an event loop.

    def time(self) -> float:
        return (self.world.now - self.asleep) * self.rate + self.offset

    def now(self) -> float:
        """Return the time of the clock that goes on while the machine is suspended."""
        return self.world.now * self.rate + self.offset

    def call_soon(
        self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> Handle:
        handle = Handle((self, callback, args))
        self.world.ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> Handle:
        when = self.world.now + delay / self.rate if delay > 0.0 else self.world.now
        return self.world.at(when, Handle((self, callback, args)))

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> Handle:
        moment = (when - self.offset) / self.rate + self.asleep
        return self.world.at(max(moment, self.world.now), Handle((self, callback, args)))

    def create_task(
        self, coroutine: Coroutine[Any, Any, Any], *, name: Any = None, context: Any = None
    ) -> Any:
        self.world.tasks += 1
        task = SimTask(coroutine, loop=self, number=self.world.tasks)
        self._tasks.append(task)
        if len(self._tasks) > 256:
            self._tasks = [task for task in self._tasks if not task.done()]
        return task

    # False; every future asks.
    get_debug = bool

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.world.errors.append(f"{self.name}: {context.get('message')}: {context.get('exception')!r}")


class World:
    """Runs everything. ``now`` is true time, which no node knows."""

    def __init__(self, seed: object) -> None:
        self.random = Random(seed)  # type: ignore[arg-type]
        self.now = 0.0
        self.ready: list[Handle] = []
        self.graves: list[Node] = []
        self.errors: list[str] = []
        self.tasks = 0
        self.steps = 0
        self.over = False
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = 0
        self.nature = Node(self, "nature")
        """What is not one of our nodes: receivers, the database, the application's transactions."""

    def at(self, when: float, handle: Handle) -> Handle:
        self._numbers += 1
        heappush(self._timers, (when, self._numbers, handle))
        return handle

    def after(self, seconds: float, callback: Callable[..., Any], *args: Any) -> None:
        self._numbers += 1
        heappush(self._timers, (self.now + seconds, self._numbers, Handle((self.nature, callback, args))))

    def postpone(self, node: Node, seconds: float) -> None:
        """Have a node's timers fire so much later."""
        own = [timer[2][0] is node for timer in self._timers]
        moved = (
            (when + seconds * mine, *rest) for (when, *rest), mine in zip(self._timers, own, strict=True)
        )
        self._timers[:] = moved
        heapify(self._timers)

    def run(self, until: float) -> None:
        ready, timers, random, running = self.ready, self._timers, self.random.random, None
        try:
            while not self.over:
                if not ready:
                    if not timers or timers[0][0] > until:
                        self.now = until
                        return
                    self.now = timers[0][0]
                    while timers and timers[0][0] <= self.now:
                        ready.append(heappop(timers)[2])
                count = len(ready)
                if count > 1:
                    index = int(random() * count)
                    handle, ready[index] = ready[index], ready[-1]
                    ready.pop()
                else:
                    handle = ready.pop()
                node, callback, args = handle
                if callback is None or node.dead:
                    continue
                if node.stalled:
                    node.hold_back(handle)
                    continue
                if node is not running:
                    running = node
                    _set_running_loop(node)  # type: ignore[arg-type]
                self.steps += 1
                callback(*args)
        finally:
            _set_running_loop(None)

    def end(self) -> None:
        """Forget all nodes. Coroutines that are closed in the midst of their work complain, to nobody."""
        hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
        try:
            for node in (*self.graves, self.nature):
                node.dead = True
                node.bury()
        finally:
            _set_running_loop(None)
            sys.unraisablehook = hook
        self.graves.clear()
        self.ready.clear()
        self._timers.clear()
