"""The fake database and a real one side by side: the same is done to both, and every answer compared."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeAlias, TypeVar
from uuid import UUID

from relaybox.config import Destination, Settings
from relaybox.emit.row import Call, RowBuilder
from relaybox.event import Delivery
from tests.simulation.database import Transaction
from tests.simulation.twins import FLAVOURS, Fake, Real, Seen, Twin
from tests.simulation.upkeep_statements import UpkeepServer

T = TypeVar("T")
TOLERANCE = 2.0
"""Seconds by which times may differ."""
PATIENCE = 20.0
"""Seconds after which the real one is taken to wait for something."""
A_WHILE = 0.05
"""Seconds in which the real one would have been done, did it not wait as the fake does."""

NAMES = ("shop", "other", "dead")
BUILDER = RowBuilder(Settings(destinations=[Destination(name, "console:", ordered=True) for name in NAMES]))


class Disagreement(AssertionError):
    """The fake and the real database did not answer alike."""


class New(NamedTuple):
    """An event to emit."""

    destinations: list[str]
    key: str | None
    delay: float
    max_attempts: int


class Pair(NamedTuple):
    """The same delivery, as each of the two leased it."""

    fake: Delivery
    real: Delivery


@dataclass(eq=False)
class Open:
    """A transaction of an application that is not over yet, on both."""

    fake: Transaction
    real: Any
    written: list[UUID] = field(default_factory=list)
    locked: bool = False


Label: TypeAlias = tuple[int, str, int]
"""A row's name on both: the number of its event, the destination, and which of these it is."""


class Pairing:
    """Both databases, how rows are called, and the comparison."""

    def __init__(self, real: Real, server: type[UpkeepServer] = UpkeepServer) -> None:
        self.real = real
        self.runner = asyncio.Runner()
        self.compared: Counter[str] = Counter()
        self.met: Counter[str] = Counter()
        """What came up how often; what never does was not compared."""
        self._server = server
        self.clear()

    def clear(self) -> None:
        """Begin anew, with empty tables."""
        self.real.clear()
        self.fake = Fake(FLAVOURS[self.real.kind], self._server)
        self.open: list[Open] = []
        self.rows: list[tuple[Label, UUID, UUID]] = []
        self._events: dict[UUID, int] = {}
        self._labels: dict[tuple[str, UUID], Label] = {}

    def close(self) -> None:
        self.runner.run(self.real.close())
        self.runner.close()

    def new_event(self, event: New) -> list[tuple[Any, ...]]:
        later = datetime.now(UTC) + timedelta(seconds=event.delay) if event.delay else None
        call = Call(
            "Order", 1, "order.paid", {}, key=event.key, max_attempts=event.max_attempts, deliver_at=later,
            destinations=event.destinations,
        )  # fmt: skip
        emission = BUILDER.build(call, self.real.dialect)
        self._events[emission.event_id] = len(self._events)
        return emission.rows

    def do(self, what: str, act: Callable[[Twin], Awaitable[T]], end: bool = True) -> tuple[T, T]:
        """Do it to both, where a transaction has to end first, end that; what they answered."""
        tick()
        self.compared[what] += 1
        return self.runner.run(self._both(act, end))

    async def _both(self, act: Callable[[Twin], Awaitable[T]], end: bool) -> tuple[T, T]:
        fake = asyncio.ensure_future(act(self.fake))
        await self._moves(fake)
        real = asyncio.ensure_future(act(self.real))
        waits = not fake.done()
        if waits:
            self.met["waited"] += 1
            done, _ = await asyncio.wait([real], timeout=A_WHILE)
            while not fake.done():
                self.end(next(o for o in self.open if o.fake is self.fake.driver.waits_for), commit=end)
                await self._moves(fake)
            if done:
                raise Disagreement(f"the fake waited, and the real one did not and answered {real.result()}")
        done, _ = await asyncio.wait([real], timeout=PATIENCE)
        if not done:
            for transaction in list(self.open):
                self.end(transaction, commit=False)
            raise Disagreement(f"the real one waits, and the fake answered {fake.result()}; {await real}")
        return await fake, await real

    async def _moves(self, fake: asyncio.Future[Any]) -> None:
        """Until the fake is done or has to wait."""
        while not fake.done() and (self.fake.driver.waits_for is None or self.fake.driver.waits_for.over):
            await asyncio.wait([fake], timeout=0.0)

    def end(self, transaction: Open, *, commit: bool) -> None:
        self.open.remove(transaction)
        self.fake.end(transaction.fake, commit=commit)
        self.real.end(transaction.real, commit=commit)

    def label(self, side: str, id_: UUID) -> Label:
        return self._labels[side, id_]

    def compare(self, what: str, fake: Any, real: Any) -> None:
        """See that both are the same, but for a little time."""
        if not alike(fake, real):
            raise Disagreement(f"{what}:\n  fake: {fake}\n  real: {real}")

    def look(self) -> None:
        """Compare all that is committed."""
        fake, real = self._named("fake", self.fake.see()), self._named("real", self.real.see())
        for part, of_fake, of_real in zip(("rows", "places", "leader"), fake, real, strict=True):
            self.compare(part, of_fake, of_real)
        self.rows = [(label, a, b) for (label, a, *_), (_, b, *_) in zip(fake[0], real[0], strict=True)]

    def _named(self, side: str, seen: Seen) -> tuple[list[Any], list[Any], Any]:
        """Rows by their names; the ids, which differ for copies, count as alike."""
        times: Counter[tuple[int, str]] = Counter()
        rows = []
        for row in seen.rows:
            name = self._events[row.event_id], row.destination
            label = self._labels[side, row.id] = (*name, times[name])
            times[name] += 1
            rows.append((label, row.id, *row[3:]))
        return rows, seen.places, seen.leader


def alike(fake: Any, real: Any) -> bool:
    """Whether they are equal, times within the tolerance."""
    if isinstance(fake, UUID) and isinstance(real, UUID):
        return True
    if isinstance(fake, float) and isinstance(real, float):
        return abs(fake - real) < TOLERANCE
    if isinstance(fake, tuple | list) and isinstance(real, tuple | list):
        return len(fake) == len(real) and all(map(alike, fake, real))
    return bool(fake == real)


def tick() -> None:
    """Until the next millisecond: SQLite's clock knows no shorter time."""
    began = time.time_ns() // 1_000_000
    while time.time_ns() // 1_000_000 == began:
        pass
