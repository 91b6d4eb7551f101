"""Measure another outbox: its relay and its emitters run in separate processes."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Protocol, TypeAlias

from benchmarks.harness import PAYLOAD, run
from benchmarks.process import PATIENCE, SLOWEST, Loop, apart, begin, process

Database: TypeAlias = Callable[[], AbstractContextManager[str]]
"""Creates a new database; returns its URL."""

LANE = 250.0
"""Transactions per second of one connection; more connections take turns."""
TRIAL_SECONDS = 1.5
"""Seconds for which a configuration for short waits is tried."""
TRIAL_PATIENCE = 5.0
"""Seconds after that until all emitted events have to be handled."""
FAILED = float("-inf")


class Peer(Protocol):
    """Another outbox in its best documented configuration; each URL is that of an empty database or its own.

    ``ordered`` is true if it can keep order per key. With ``keys`` it then does, and without it does not; a
    peer that cannot ignores them. ``keeps`` is true if delivered rows stay.
    """

    name: str
    ordered: bool
    keeps: bool

    def version(self) -> str:
        """Return the installed version."""

    def configuration(self) -> str:
        """Return the chosen configuration, for a table."""

    async def tune(self, url: str, *, keys: int) -> None:
        """Choose the documented configuration that drains fastest."""

    async def tune_waits(self, database: Database, rate: float) -> None:
        """Choose the documented configuration with the shortest waits; raise if none keeps up."""

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Return events per second into a handler that reads the payload and does nothing."""

    async def waits(self, url: str, rate: float, seconds: float) -> list[float]:
        """Return the seconds from the commit to the handler, of every event."""


class Setup(Protocol):
    """One configuration of a peer, which runs in a process of its own."""

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Fill the peer's table and drain it; return events per second."""

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        """Handle ``count`` events and return their times; ``ready`` is called before the first is awaited."""

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        """Emit by the peer's own means, one transaction per event; return the time of each commit."""


@dataclass
class MeasuredPeer:
    """A peer with the configurations that its documentation offers, and the loops it can run on."""

    name: str
    ordered: bool
    keeps: bool
    setups: Sequence[Setup]
    trial: int = 5_000
    loops: Sequence[Loop] = ("uvloop", "asyncio")

    def __post_init__(self) -> None:
        self.setup = self.setups[0]
        self.loop = self.loops[0]

    def version(self) -> str:
        """Return the installed version."""
        return version(self.name)

    def configuration(self) -> str:
        """Return the chosen configuration, for a table."""
        return f"{self.setup}, {self.loop}" if len(self.loops) > 1 else str(self.setup)

    async def tune(self, url: str, *, keys: int) -> None:
        """Choose the setup that drains ``trial`` rows fastest, and the loop that it is faster on."""
        await self._choose(lambda: self.drain(url, self.trial, keys))

    async def tune_waits(self, database: Database, rate: float) -> None:
        """Choose the setup, and the loop, with the shortest median wait."""
        failed: list[Exception] = []

        async def shortness() -> float:
            try:
                # Use a new one each time: a setup that did not keep up has left events behind.
                with database() as url:
                    return -statistics.median(await self.waits(url, rate, TRIAL_SECONDS, TRIAL_PATIENCE))
            except (TimeoutError, RuntimeError) as error:
                failed.append(error)
                return FAILED

        if await self._choose(shortness) == FAILED:
            raise failed[-1]

    async def _choose(self, measure: Callable[[], Awaitable[float]]) -> float:
        """Keep the setup with the highest measurement and its better loop; return the highest."""
        rates: dict[tuple[Setup, Loop], float] = {}

        async def trial(setup: Setup, loop: Loop) -> None:
            self.setup, self.loop = setup, loop
            rates[setup, loop] = await measure()

        for setup in self.setups:
            await trial(setup, self.loops[0])
        best, _ = max(rates, key=lambda tried: rates[tried])
        for loop in self.loops[1:]:
            await trial(best, loop)
        self.setup, self.loop = max(rates, key=lambda tried: rates[tried])
        return rates[self.setup, self.loop]

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Return events per second into a handler that reads the payload and does nothing."""
        limit = PATIENCE + rows / SLOWEST
        rate: float = await apart(self.setup.drain, url, rows, keys, seconds=limit, loop=self.loop)
        return rate

    async def waits(self, url: str, rate: float, seconds: float, patience: float = PATIENCE) -> list[float]:
        """Return the seconds from the commit to the handler, of every event."""
        count = round(rate * seconds)
        limit = PATIENCE + seconds + patience
        async with (
            process(limit, self.setup.receive, url, count, tells=True, loop=self.loop) as receiver,
            asyncio.timeout(limit),
        ):
            await receiver.hear()
            async with process(limit, self.setup.emit, url, rate, count, loop=self.loop) as emitter:
                commits = await emitter.hear()
                async with asyncio.timeout(patience):
                    arrivals = await receiver.hear()
        # The handler may run before the emitter has recorded the commit.
        return [max(0.0, arrivals[n] - commit) for n, commit in enumerate(commits)]


def body(n: int | None = None) -> bytes:
    """Return the payload, with the number of the event if it is waited for."""
    return json.dumps(PAYLOAD if n is None else {"n": n, **PAYLOAD}).encode()


def settle_down(url: str) -> None:
    """Do, after the INSERTs, what autovacuum and the checkpointer would do during a drain."""
    run(url, "VACUUM ANALYZE")
    run(url, "CHECKPOINT")


def check(seen: int, done: int, rows: int) -> None:
    """Check that every row was handled once, and that the peer recorded it."""
    if seen != rows or done != rows:
        raise RuntimeError(f"of {rows} rows, {seen} were handled and {done} are settled")


class Arrivals:
    """The time at which each event reached the handler."""

    def __init__(self, count: int) -> None:
        self.times: dict[int, float] = {}
        self.complete = asyncio.Event()
        self._count = count

    def note(self, n: int) -> bool:
        """Record one; return True if it was the last."""
        self.times.setdefault(n, time.monotonic())
        if len(self.times) == self._count:
            self.complete.set()
        return self.complete.is_set()


def lanes(rate: float) -> int:
    """Return the number of connections that emit."""
    return max(1, round(rate / LANE))


async def emit_steadily(
    rate: float, count: int, emitters: Sequence[Callable[[int], Awaitable[Any]]]
) -> list[float]:
    """Let the emitters take turns at a steady rate; return the time of each commit."""
    commits = [0.0] * count
    began = begin()

    async def lane(first: int, emit: Callable[[int], Awaitable[Any]]) -> None:
        for n in range(first, count, len(emitters)):
            await asyncio.sleep(max(0.0, began + n / rate - time.monotonic()))
            await emit(n)
            commits[n] = time.monotonic()

    async with asyncio.TaskGroup() as group:
        for first, emit in enumerate(emitters):
            group.create_task(lane(first, emit))
    return commits
