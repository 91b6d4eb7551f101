"""The relay: a lane for each destination, run together and stopped together."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from types import TracebackType
from typing import Self

from relaybox.errors import RelayboxError
from relaybox.maintenance.caretaker import Caretaker
from relaybox.relay.lane import Lane
from relaybox.relay.shared import Shared


class Relay:
    """Moves deliveries from a store to sinks. One relay runs once.

    The first SIGTERM or SIGINT stops claiming, waits for what is being sent and gives the rest back; the
    second leaves at once, and what was held is taken over when its leases run out.
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

    @property
    def name(self) -> str:
        """What its rows call it: host, process and a random part."""
        return self._shared.owner

    def stop(self) -> None:
        """Claim nothing more; ``run`` returns when what is in flight is settled."""
        for lane in self._lanes:
            lane.stop()

    async def run(self, *, signals: bool = True) -> None:
        """Deliver until stopped, by ``stop`` or by a signal unless somebody else listens to ``signals``."""
        with self._signals() if signals else nullcontext():
            await self._run()

    async def drain(self) -> None:
        """Deliver what is due, then return."""
        async with self._closing():
            since = await self._shared.store.now()
            async with asyncio.TaskGroup() as group:
                for lane in self._lanes:
                    group.create_task(lane.drain(since))

    async def run_once(self) -> int:
        """One round of every lane: claim, send, settle. How many deliveries it was."""
        async with self._closing():
            async with asyncio.TaskGroup() as group:
                rounds = [group.create_task(lane.once()) for lane in self._lanes]
            return sum(task.result() for task in rounds)

    async def __aenter__(self) -> Self:
        """Run beside the block, as in the lifespan of an ASGI application, whose signals are its own."""
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self.stop()
        await self._task

    async def _run(self) -> None:
        self._shared.share = self._caretaker.share
        async with self._closing(), asyncio.TaskGroup() as upkeep:
            # A drain does not serve: it may be about to end, and others would not be woken.
            upkeep.create_task(self._caretaker.run())
            with self._serving():
                async with asyncio.TaskGroup() as lanes:
                    for lane in self._lanes:
                        lanes.create_task(lane.run(self._patience))
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
    def _signals(self) -> Iterator[None]:
        """Only the main thread's loop can listen to signals; elsewhere somebody else decides."""
        loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        asked = 0

        def ask() -> None:
            nonlocal asked
            asked += 1
            if asked == 1:
                self.stop()
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


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Our own error among those of several tasks, else the group as it is."""
    found: BaseException | None = group.subgroup(RelayboxError)
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return group if found is None else found
