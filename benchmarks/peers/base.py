"""How another outbox is measured: its relay and what emits to it run in processes of their own."""

from __future__ import annotations

import asyncio
import faulthandler
import json
import multiprocessing
import time
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing.connection import Connection
from typing import Any, Protocol

from benchmarks.harness import PAYLOAD, run

PATIENCE = 30.0
"""Seconds that a process may take on top of its work."""
SLOWEST = 50.0
"""Events a second that a drain may be expected to reach."""
LANE = 250.0
"""Transactions a second that one connection is asked for; more connections take turns."""


class Peer(Protocol):
    """Another outbox in its best documented configuration; each URL is that of an empty database or its own.

    ``ordered`` says whether it can keep order per key: with ``keys`` it then does, without it does not, and
    one that cannot ignores them. ``keeps`` says whether delivered rows stay.
    """

    name: str
    ordered: bool
    keeps: bool

    def version(self) -> str:
        """The installed one."""

    def configuration(self) -> str:
        """The chosen one, for a table."""

    async def tune(self, url: str, *, keys: int) -> None:
        """Choose the fastest of its documented configurations."""

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Events a second into a handler that reads the payload and does nothing."""

    async def waits(self, url: str, rate: float, seconds: float) -> list[float]:
        """Seconds from the commit to the handler, of every event."""


class Setup(Protocol):
    """One configuration of a peer; what it does, it does in a process of its own."""

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Fill the peer's table and drain it; events a second."""

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        """Handle ``count`` events and say when each came; ``ready`` is called before the first is awaited."""

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        """Emit by the peer's own means, one transaction an event; when each was committed."""


@dataclass
class MeasuredPeer:
    """A peer with the configurations that its documentation lets one choose."""

    name: str
    ordered: bool
    keeps: bool
    setups: Sequence[Setup]
    trial: int = 5_000

    def __post_init__(self) -> None:
        self.setup = self.setups[0]

    def version(self) -> str:
        """The installed one."""
        return version(self.name)

    def configuration(self) -> str:
        """The chosen one, for a table."""
        return str(self.setup)

    async def tune(self, url: str, *, keys: int) -> None:
        """Choose the setup that drains ``trial`` rows fastest."""
        rates = [await _drain(setup, url, self.trial, keys) for setup in self.setups]
        self.setup = self.setups[rates.index(max(rates))]

    async def drain(self, url: str, rows: int, keys: int) -> float:
        """Events a second into a handler that reads the payload and does nothing."""
        return await _drain(self.setup, url, rows, keys)

    async def waits(self, url: str, rate: float, seconds: float) -> list[float]:
        """Seconds from the commit to the handler, of every event."""
        count = round(rate * seconds)
        limit = PATIENCE + 3 * seconds
        async with (
            asyncio.timeout(limit),
            _process(limit, self.setup.receive, url, count, tells=True) as receiver,
        ):
            await receiver.hear()
            async with _process(limit, self.setup.emit, url, rate, count) as emitter:
                commits = await emitter.hear()
                arrivals = await receiver.hear()
        # The handler may run before the emitter has noted that the commit is done.
        return [max(0.0, arrivals[n] - commit) for n, commit in enumerate(commits)]


async def _drain(setup: Setup, url: str, rows: int, keys: int) -> float:
    return await apart(setup.drain, url, rows, keys, seconds=PATIENCE + rows / SLOWEST)


async def apart(work: Callable[..., Coroutine[Any, Any, Any]], *args: Any, seconds: float) -> Any:
    """What ``work`` returns in a new process, which ends after so many seconds at the latest."""
    async with asyncio.timeout(seconds), _process(seconds, work, *args) as process:
        return await process.hear()


class _Answers:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def hear(self) -> Any:
        """The next answer; an error there is an error here."""
        loop, there = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._connection.fileno(), there.set)
        try:
            await there.wait()
        finally:
            loop.remove_reader(self._connection.fileno())
        try:
            failed, answer = self._connection.recv()
        except EOFError:
            raise RuntimeError("the process ended without an answer") from None
        if failed:
            raise RuntimeError(answer)
        return answer


@asynccontextmanager
async def _process(
    seconds: float, work: Callable[..., Coroutine[Any, Any, Any]], *args: Any, tells: bool = False
) -> AsyncIterator[_Answers]:
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=_work, args=(its, seconds, work, args, tells), daemon=True)
    process.start()
    its.close()
    try:
        yield _Answers(mine)
    finally:
        process.kill()
        process.join()
        mine.close()


def _work(
    answers: Connection, seconds: float, work: Callable[..., Coroutine[Any, Any, Any]], args: Any, tells: bool
) -> None:
    # Also a process whose parent was killed ends.
    faulthandler.dump_traceback_later(seconds, exit=True)
    if tells:
        args = (*args, lambda: answers.send((False, None)))
    # Imported here for the sake of those that run without the peers.
    import uvloop

    try:
        # The command lines of PgQueuer and FastStream run on uvloop; the others get it to be on a par.
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            answers.send((False, runner.run(work(*args))))
    except BaseException:
        answers.send((True, traceback.format_exc()))


def body(n: int | None = None) -> bytes:
    """The payload, with the number of the event where it is waited for."""
    return json.dumps(PAYLOAD if n is None else {"n": n, **PAYLOAD}).encode()


def settle_down(url: str) -> None:
    """After the rows were inserted: what autovacuum and the checkpointer would do in the midst of a drain."""
    run(url, "VACUUM ANALYZE")
    run(url, "CHECKPOINT")


def check(seen: int, done: int, rows: int) -> None:
    """Every row has to be handled once, and the peer has to have noted it."""
    if seen != rows or done != rows:
        raise RuntimeError(f"of {rows} rows, {seen} were handled and {done} are settled")


class Arrivals:
    """When each event came to the handler."""

    def __init__(self, count: int) -> None:
        self.times: dict[int, float] = {}
        self.complete = asyncio.Event()
        self._count = count

    def note(self, n: int) -> bool:
        """Note one; whether it was the last."""
        self.times.setdefault(n, time.monotonic())
        if len(self.times) == self._count:
            self.complete.set()
        return self.complete.is_set()


def lanes(rate: float) -> int:
    """How many connections emit."""
    return max(1, round(rate / LANE))


async def emit_steadily(
    rate: float, count: int, emitters: Sequence[Callable[[int], Awaitable[Any]]]
) -> list[float]:
    """Let the emitters take turns at a steady rate; when each event was committed."""
    commits = [0.0] * count
    begin = time.monotonic()

    async def lane(first: int, emit: Callable[[int], Awaitable[Any]]) -> None:
        for n in range(first, count, len(emitters)):
            await asyncio.sleep(max(0.0, begin + n / rate - time.monotonic()))
            await emit(n)
            commits[n] = time.monotonic()

    async with asyncio.TaskGroup() as group:
        for first, emit in enumerate(emitters):
            group.create_task(lane(first, emit))
    return commits
