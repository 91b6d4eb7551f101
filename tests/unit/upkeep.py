"""Upkeep of a database that answers as a test wants, and a clock that a test moves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from relaybox.errors import StoreError
from relaybox.stores.upkeep import Beat, Member, Minute, Router, Slice, StoredEvent, Turn

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


class Clock:
    """Time passes when the test says so; sleeping takes a turn of the loop."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.time += seconds


class FakeUpkeep:
    """Remembers what it was asked for; what is in ``broken`` fails; walks get the next of ``slices``."""

    def __init__(self) -> None:
        self.members = self.reports = self.prune = self.sweep = self.unrouted = self
        self.calls: list[str] = []
        self.broken: set[str] = set()
        self.term: int | None = 1
        self.others: tuple[str, ...] = ()
        self.recorded: list[Minute] = []
        self.commits_and_fails = False
        self.meanwhile: Callable[[], None] | None = None
        self.slices: list[Slice[Any] | Exception | None] = []
        self.asked: list[Turn | None] = []
        self.terms: list[int] = []
        self.leads: int | None = None
        self.events: list[StoredEvent] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.broken:
            raise StoreError(f"no {name}")

    def _slice(self) -> Slice[Any] | None:
        answer = self.slices.pop(0) if self.slices else Slice(0, None)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def beat(self, member: Member, live: float, *, joins: bool = True) -> Beat:
        self._called("beat")
        return Beat((*self.others, member.name), NOON)

    async def lead(self, name: str, seconds: float) -> int | None:
        self._called("lead")
        return self.term

    async def current_term(self) -> int | None:
        return self.leads

    async def record(self, minutes: Sequence[Minute]) -> None:
        self._called("record")
        if self.meanwhile:
            self.meanwhile()
        self.recorded = list(minutes)
        if self.commits_and_fails:
            raise StoreError("nobody knows whether it was committed")

    async def kept(self) -> tuple[str, ...]:
        self._called("kept")
        return ("shop",)

    async def route(self, term: int, router: Router, after: Turn | None, limit: int) -> Slice[Turn] | None:
        """Ask the router for each of ``events``."""
        self.asked.append(after)
        self.terms.append(term)
        for event in self.events:
            router.targets(event)
        return self._slice()

    async def orphans(self, term: int, after: UUID | None, limit: int) -> Slice[UUID] | None:
        self._called("orphans")
        return self._slice()

    def __getattr__(self, name: str) -> Any:
        async def call(*args: Any, **options: Any) -> Any:
            self._called(name)
            if name in ("read", "known"):
                return {} if name == "known" else ()
            return Slice(0, None) if name in ("delivered", "discarded", "keys") else 0

        return call


async def going_on(seconds: float) -> bool:
    """Rest, and say that the work goes on."""
    return True
