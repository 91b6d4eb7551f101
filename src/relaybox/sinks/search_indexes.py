"""Which indexes there are: the one that is searched, and the one that is being built to take its place.

While ``NAME__building`` exists, every change goes to both. Whoever builds knows when that holds: a send that
begins more than ``LOOK`` after the creation has seen it, and what was sent before was committed before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from relaybox.engine import Change, Engine
from relaybox.outcome import Delivered, Reject, Retry, Unavailable
from relaybox.sink import DELIVERED, Answer, answer_of
from relaybox.sinks.search_change import BUILDING

LOOK = 1.0
"""Seconds for which it is known which indexes exist."""

_KEPT = 1000
"""Indexes of which it is kept; where tenants have their own there may be many."""

log = logging.getLogger("relaybox.search")


class Seen(NamedTuple):
    """Which of the two were there, and when somebody looked."""

    at: float
    live: bool
    building: bool


class Indexes:
    """The indexes of one destination."""

    def __init__(self, name: str, engine: Engine, *, create: bool) -> None:
        self._name = name
        self._engine = engine
        self._create = create
        self._seen: dict[str, Seen] = {}

    async def look(self, indexes: Collection[str]) -> dict[str, tuple[str, ...] | Answer]:
        """By index, all that have to be written where it is meant, in this order; or what it is answered."""
        return dict(zip(indexes, await asyncio.gather(*map(self._written, indexes)), strict=True))

    async def write(self, written: Sequence[str], changes: Sequence[Change]) -> Sequence[Answer]:
        """Write the changes to all of these indexes: an answer for each."""
        if not written:
            return [DELIVERED] * len(changes)
        if len(written) == 1:
            return await self._ask(written[0], changes)
        building, live = written
        built = await self._ask(building, changes)
        if not all(isinstance(answer, Delivered) for answer in built) and not await self._exists(building):
            # It has taken its place in the meantime, or was given up.
            built = [DELIVERED] * len(changes)
        # Not before: it may take the place of the other between the two.
        answers = await self._ask(live, changes)
        both = list(zip(built, answers, strict=True))
        refusals = [one for one, answer in both if isinstance(one, Reject) and isinstance(answer, Delivered)]
        spoilt = await self._give_up(building, refusals[0]) if refusals else None
        return [_of_both(one, answer, spoilt) for one, answer in both]

    async def check(self, index: str) -> None:
        """Raises ``Unavailable`` where it does not exist and is not to be created."""
        if not self._create and not await self._engine.present([index]):
            raise self._missing(index)

    async def _written(self, index: str) -> tuple[str, ...] | Answer:
        live = index.removesuffix(BUILDING)
        try:
            seen = await self._look(live)
            if index != live:
                return (index,) if seen.building else ()
            if not seen.live:
                await self._make(live)
        except Reject as error:
            return answer_of(error)
        except Exception as error:
            return _no_events_fault(error)
        return (f"{live}{BUILDING}", live) if seen.building else (live,)

    async def _look(self, live: str) -> Seen:
        now = time.monotonic()
        seen = self._seen.get(live)
        if seen is not None and seen.live and now - seen.at <= LOOK:
            return seen
        building = f"{live}{BUILDING}"
        present = await self._engine.present([live, building])
        seen = Seen(now, live in present, building in present)
        if len(self._seen) >= _KEPT:
            self._seen.clear()
        self._seen[live] = seen
        return seen

    async def _make(self, index: str) -> None:
        if not self._create:
            raise self._missing(index)
        try:
            await self._engine.create(index)
        except (Reject, Retry) as error:
            # Another relay may have been faster.
            if not await self._exists(index):
                raise _no_events_fault(error) from None
        self._seen.pop(index, None)

    async def _ask(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        try:
            answers = await self._engine.write(index, changes)
        except Exception as error:
            answers = [answer_of(error)] * len(changes)
        if any(isinstance(answer, Retry | Unavailable) for answer in answers):
            self._seen.pop(index.removesuffix(BUILDING), None)
        return answers

    async def _exists(self, index: str) -> bool:
        try:
            return index in await self._engine.present([index])
        except Exception:
            return True

    async def _give_up(self, building: str, refusal: Reject) -> Answer:
        """Drop what is being built; what those are answered that it refused and the other index took."""
        log.error(
            "%s: %r refuses what the index takes, so it cannot take its place and is dropped: %s",
            self._name,
            building,
            refusal.reason,
        )
        try:
            await self._engine.drop(building)
        except Exception as error:
            return answer_of(error)
        self._seen.pop(building.removesuffix(BUILDING), None)
        return Retry(f"the index {building!r} refuses it and is dropped: {refusal.reason}")

    def _missing(self, index: str) -> Unavailable:
        fix = "create it, or set create_index = true"
        return Unavailable(f"the index {index!r} does not exist on {self._engine.where}: {fix}")


def _of_both(built: Answer, answer: Answer, spoilt: Answer | None) -> Answer:
    """What a change is answered that was written to both; ``spoilt``: what was built is given up."""
    if not isinstance(answer, Delivered):
        return answer
    return spoilt if spoilt is not None and isinstance(built, Reject) else built


def _no_events_fault(error: Exception) -> Unavailable:
    """What goes wrong before any document is written is the engine's trouble, or its settings'."""
    match answer_of(error):
        case Unavailable() as trouble:
            return trouble
        case Retry() as told:
            return Unavailable(told.reason, after=told.after)
    return Unavailable(str(error))
