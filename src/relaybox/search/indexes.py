"""Find the indexes to write: the live one, and the one being built to replace it.

While ``NAME__building`` exists, every change goes to both; ``_reindex`` says why none is missed.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Retry, Unavailable
from relaybox.search.change import BUILDING
from relaybox.search.engine import Change, Engine
from relaybox.sinks.sink import DELIVERED, Answer, answer_of

LOOK = 1.0
"""Seconds for which the answer about existing indexes is cached."""

_KEPT = 1000
"""Indexes in that cache; there may be many if each tenant has its own."""

ON_RECORD = 2.0
"""Seconds before the event is tried again, in which the reindex can read why its index was dropped."""

log = logging.getLogger("relaybox.search")


class Spoilt(Retry):
    """A change that the build index refused; that index was dropped, so the next try can succeed."""


class Indexes:
    """The indexes of one destination."""

    def __init__(self, name: str, engine: Engine, *, create: bool) -> None:
        self._name = name
        self._engine = engine
        self._create = create
        self._seen: dict[str, tuple[float, bool]] = {}
        """When each live index was seen, and whether one was being built to replace it."""

    async def look(self, indexes: Collection[str]) -> dict[str, tuple[str, ...] | Answer]:
        """Return for each index the indexes to write, in this order, or the answer for its deliveries."""
        return dict(zip(indexes, await asyncio.gather(*map(self._written, indexes)), strict=True))

    async def write(self, written: Sequence[str], changes: Sequence[Change]) -> Sequence[Answer]:
        """Write the changes to all of these indexes; return an answer for each change."""
        if len(written) == 1:
            return await self._ask(written[0], changes)
        building, live = written
        built = await self._ask(building, changes)
        if not all(isinstance(answer, Delivered) for answer in built) and not await self._exists(building):
            # The build index has become the live one, or was dropped.
            built = [DELIVERED] * len(changes)
        # The live index comes last: the build index may replace it between the two writes.
        answers = await self._ask(live, changes)
        both = list(zip(changes, built, answers, strict=True))
        refused = {
            change.id: one.reason
            for change, one, answer in both
            if isinstance(one, Reject) and isinstance(answer, Delivered)
        }
        spoilt = await self._give_up(building, refused) if refused else {}
        return [
            spoilt.get(change.id, one) if isinstance(answer, Delivered) else answer
            for change, one, answer in both
        ]

    async def spare(
        self, building: str, deliveries: Sequence[Delivery], answers: Sequence[Answer]
    ) -> Sequence[Answer]:
        """Drop the build index before a delivery for it alone fails: live events would wait behind it."""
        refused = {
            delivery.aggregate_id: answer.reason
            for delivery, answer in zip(deliveries, answers, strict=True)
            if isinstance(answer, Reject) or (isinstance(answer, Retry) and is_last(delivery))
        }
        spoilt = await self._give_up(building, refused) if refused else {}
        return [spoilt.get(one.aggregate_id, answer) for one, answer in zip(deliveries, answers, strict=True)]

    async def check(self, index: str) -> None:
        """Raise ``Unavailable`` if the index does not exist and may not be created."""
        if not self._create and not await self._engine.present([index]):
            raise self._missing(index)

    async def _written(self, index: str) -> tuple[str, ...] | Answer:
        live = index.removesuffix(BUILDING)
        try:
            exists, is_built = await self._look(live)
            if index != live:
                return (index,) if is_built else ()
            if not exists:
                await self._make(live)
        except Reject as error:
            return answer_of(error)
        except Exception as error:
            return _no_events_fault(error)
        return (f"{live}{BUILDING}", live) if is_built else (live,)

    async def _look(self, live: str) -> tuple[bool, bool]:
        """Return whether the index exists, and whether one is being built to replace it."""
        now, building = time.monotonic(), f"{live}{BUILDING}"
        at, is_built = self._seen.get(live, (-math.inf, False))
        if now - at <= LOOK:
            return True, is_built
        present = await self._engine.present([live, building])
        if live in present:
            if len(self._seen) >= _KEPT:
                self._seen.clear()
            self._seen[live] = now, building in present
        else:
            self._seen.pop(live, None)
        return live in present, building in present

    async def _make(self, index: str) -> None:
        if not self._create:
            raise self._missing(index)
        try:
            await self._engine.create(index)
        except (Reject, Retry) as error:
            # Another relay may have created it first.
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

    async def _give_up(self, building: str, refused: Mapping[str, str]) -> Mapping[str, Answer]:
        """Drop the build index, which refused these ids for these reasons; return their answers."""
        [(first, reason), *_] = refused.items()
        log.error(
            "%s: %r cannot take the place of the index and is dropped, because %s document(s) cannot be"
            " written to it, such as %r: %s",
            self._name,
            building,
            len(refused),
            first,
            reason,
        )
        try:
            await self._engine.drop(building)
        except Exception as error:
            # The live index works, so only these events wait.
            trouble = str(error) or type(error).__name__
            problem = f"it cannot be written to {building!r}, which cannot be dropped ({trouble})"
            return {id_: Retry(f"{problem}: {reason}") for id_, reason in refused.items()}
        self._seen.pop(building.removesuffix(BUILDING), None)
        beginning = given_up(building)
        return {id_: Spoilt(f"{beginning}{reason}", after=ON_RECORD) for id_, reason in refused.items()}

    def _missing(self, index: str) -> Unavailable:
        fix = "create it, or set create_index = true"
        return Unavailable(f"the index {index!r} does not exist on {self._engine.where}: {fix}")


def given_up(building: str) -> str:
    """Return the error of events that caused a build index to be dropped, up to the reason."""
    return f"it cannot be written to the index {building!r}, which is dropped: "


def is_last(delivery: Delivery) -> bool:
    """True if this is the delivery's last attempt."""
    return delivery.attempts >= delivery.max_attempts


def _no_events_fault(error: Exception) -> Unavailable:
    """Return ``Unavailable``: a failure before any write is the engine's fault, or the settings'."""
    match answer_of(error):
        case Unavailable() as trouble:
            return trouble
        case Retry() as failure:
            return Unavailable(failure.reason, after=failure.after)
    return Unavailable(str(error))
