"""The relay: a lane for each destination, run together and stopped together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from typing import Any, Self, TypeVar

from relaybox.errors import Locked, RelayboxError, StoreError
from relaybox.relay.lane import Lane
from relaybox.relay.shared import Shared
from relaybox.relay.upkeep.canary import Canary
from relaybox.relay.upkeep.caretaker import Caretaker, Chores

T = TypeVar("T")

SWEEPING = 0.25
"""The part of a drain's time that its sweep may take."""


class Relay:
    """Moves deliveries from a store to sinks. A relay runs, drains or does upkeep once, and is then closed.

    On the first SIGTERM or SIGINT it stops claiming, waits for running sends and gives the rest back. On the
    second it ends at once, and other relays take its deliveries when the leases expire.
    """

    def __init__(
        self,
        lanes: Sequence[Lane],
        shared: Shared,
        caretaker: Caretaker,
        serving: Callable[[], AbstractContextManager[None]],
        close: Callable[[], Awaitable[None]],
        patience: float,
    ) -> None:
        self._lanes = lanes
        self._shared = shared
        self._caretaker = caretaker
        self._serving = serving
        self._close = close
        self._patience = patience
        self._task: asyncio.Task[None] | None = None
        self._runs = False

    @property
    def name(self) -> str:
        """Return the name that its leased rows hold: host, process and a random part."""
        return self._shared.owner

    @property
    def canary(self) -> Canary | None:
        """Return the canary, which sends test events while this relay leads, or None if not configured."""
        return self._caretaker.canary

    def stop(self) -> None:
        """Claim nothing more; ``run`` and ``drain`` return when all deliveries in flight are settled."""
        self._stop_lanes()
        # ``run`` stops the caretaker after the lanes. There are no lanes if only Debezium sends.
        if not self._runs or not self._lanes:
            self._caretaker.stop()

    def _stop_lanes(self) -> None:
        for lane in self._lanes:
            lane.stop()

    async def run(self, *, signals: bool = True) -> None:
        """Deliver until stopped by ``stop`` or, with ``signals``, by a signal."""
        with _on_signals(self.stop) if signals else nullcontext():
            await self._run()

    async def drain(self, seconds: float | None = None, *, sweep: bool = False) -> bool:
        """Deliver what is due and return True; return False if stopped before, so that more may be due.

        After ``seconds`` it stops by itself, and waits for running sends as ``stop`` does. With ``sweep`` it
        sweeps first, as ``upkeep`` does, for at most a quarter of the time.
        """
        async with self._closing():
            since = await self._shared.store.now()
            self._caretaker.set_time(since)
            with _after(seconds, self._stop_lanes):
                if sweep:
                    with _after(None if seconds is None else SWEEPING * seconds, self._caretaker.stop):
                        await self._try("sweep", partial(self._caretaker.once, prune=False))
                ends = await _side_by_side(self._drain_lane(lane, since) for lane in self._lanes)
                for end in ends:
                    if isinstance(end, StoreError):
                        raise end
            await self._try("write statistics", self._caretaker.flush)
            return all(ends)

    async def upkeep(self, *, prune: bool = True, sweep: bool = True) -> Chores:
        """Run one round of upkeep, or until stopped; skip the leader's jobs if another relay leads.

        ``prune`` removes rows whose retention is over. ``sweep`` makes parked rows due that nothing blocks,
        and gives unrouted events to their destinations.
        """
        async with self._closing():
            self._caretaker.set_time(await self._shared.store.now())
            return await self._caretaker.once(prune=prune, sweep=sweep)

    async def run_once(self) -> int:
        """Run one round of every lane (claim, send, settle) and return the number of deliveries."""
        async with self._closing():
            return sum(await _side_by_side(lane.once(self._patience) for lane in self._lanes))

    async def __aenter__(self) -> Self:
        """Run beside the block, as in an ASGI application's lifespan. Signals are left to the application."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self.stop()
        await self._task

    async def _drain_lane(self, lane: Lane, since: datetime) -> bool | StoreError:
        """Return the error if the database refuses; the other lanes then stop, unless it is only a lock."""
        try:
            return await lane.drain(since, self._patience)
        except StoreError as error:
            if not isinstance(error, Locked):
                self._stop_lanes()
            return error

    async def _try(self, doing: str, work: Callable[[], Awaitable[object]]) -> None:
        """Run a job beside the deliveries, and report its errors without raising them."""
        try:
            await work()
        except Exception as error:
            self._shared.observer.trouble("", doing, error)

    async def _run(self) -> None:
        self._runs = True
        self._shared.share = self._caretaker.membership.share
        async with self._closing(), asyncio.TaskGroup() as upkeep:
            # Only ``run`` receives wake-ups: a drain may be about to end, and would keep them from others.
            upkeep.create_task(self._caretaker.run())
            with self._serving():
                async with asyncio.TaskGroup() as lanes:
                    for lane in self._lanes:
                        lanes.create_task(lane.run(self._patience))
            if self._lanes:
                self._caretaker.stop()

    @asynccontextmanager
    async def _closing(self) -> AsyncIterator[None]:
        try:
            yield
        except BaseExceptionGroup as group:
            raise first_of(group) from group
        finally:
            try:
                await self._close()
            finally:
                self._shared.observer.stopped()


@contextmanager
def _on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` on the first signal and cancel the task on the second, in the main thread's loop only."""
    loop, task, asked = asyncio.get_running_loop(), asyncio.current_task(), False

    def ask() -> None:
        nonlocal asked
        if not asked:
            asked = True
            stop()
        elif task is not None:
            task.cancel()

    handled = []
    for number in (signal.SIGTERM, signal.SIGINT):
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, ask)
            handled.append(number)
    try:
        yield
    finally:
        for number in handled:
            loop.remove_signal_handler(number)


async def _side_by_side(works: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of all; if one raises, cancel the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(work) for work in works]
    return [task.result() for task in tasks]


@contextmanager
def _after(seconds: float | None, stop: Callable[[], None]) -> Iterator[None]:
    """Call ``stop`` if the block takes longer than ``seconds``."""
    timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, stop)
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first ``RelayboxError`` in the group, or the group if there is none."""
    found: BaseException | None = group.subgroup(RelayboxError)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return group if found is None else found
