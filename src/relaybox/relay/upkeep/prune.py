"""Remove rows after their retention: delivered and discarded deliveries, and rows of the side tables."""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Generic, TypeVar

from relaybox.core.clock import Clock
from relaybox.database.connect import denied
from relaybox.database.statements.upkeep import PROMPT
from relaybox.errors import StoreError
from relaybox.receive.inbox import WINDOW
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.schedule import Rest, Round, Work, take_turns
from relaybox.stores.sql.upkeep.prune import SqlPrune
from relaybox.stores.upkeep import History, Setting, Slice

At = TypeVar("At")

BATCH = 1000
"""Rows removed or checked in one transaction."""
BATCHES = 500
"""Batches in one round: with its rests, the round ends before the next one is due."""
STEPS = 10
"""Steps in one round of each walk through a table without a suitable index."""
DAY = 86_400.0
IDEMPOTENCY_WINDOW = 30 * DAY
UNROUTED = 7 * DAY
"""Seconds to keep events that were discarded unrouted."""
HISTORY: dict[History, float] = {"stats": 30 * DAY, "audit": 365 * DAY}
"""Seconds to keep rows that no setting covers."""

log = logging.getLogger(__name__)


class Prune:
    """Prunes round by round; each walk continues where the last round left it."""

    def __init__(
        self,
        rows: SqlPrune,
        agreement: Agreement,
        clock: Clock,
        rest: Rest,
        inbox_window: float = WINDOW,
        idempotency_window: float = IDEMPOTENCY_WINDOW,
    ) -> None:
        self._rows = rows
        self._agreement = agreement
        self._history = HISTORY | {"inbox": inbox_window}
        self._key_age = idempotency_window + PROMPT
        self._denied: set[History] = set()
        self._known: Mapping[str, Setting] = {}
        self._clock = clock
        self._rest = rest
        self._discarded = _Walk(partial(rows.discarded, age=self._age, limit=BATCH))
        self._orphans = _Walk(partial(rows.orphans, limit=BATCH))

    async def __call__(self, term: int) -> Round:
        """Run one round under this term."""
        self._known = await self._agreement()
        kept = [name for name in await self._rows.kept() if name in self._known]
        delivered = partial(self._rows.delivered, limit=BATCH)
        walks = [_Walk(partial(delivered, destination=name, age=self._age(name))) for name in kept]
        walks.append(_Walk(partial(self._rows.keys, age=self._key_age, limit=BATCH)))
        works = [walk.begin(BATCHES) for walk in walks]
        works += [partial(self._prune_history, history, age) for history, age in self._history.items()]
        works += [self._discarded.begin(STEPS), self._orphans.begin(STEPS)]
        return await take_turns(term, works, self._clock, self._rest, BATCHES)

    def _age(self, destination: str) -> float:
        """Return the seconds to keep a destination's rows: forever if no relay knows it."""
        if not destination:
            return UNROUTED
        known = self._known.get(destination)
        return math.inf if known is None else known.retention

    async def _prune_history(self, history: History, age: float, term: int) -> Round | None:
        if history in self._denied:
            return Round(0, done=True)
        try:
            changed = await self._rows.history(term, history, age, BATCH)
        except StoreError as error:
            if history != "audit" or not denied(error.__cause__):
                raise
            self._denied.add(history)
            log.info("the audit is kept: this relay's role may not delete from it")
            return Round(0, done=True)
        return None if changed is None else Round(changed, done=changed < BATCH)


class _Walk(Generic[At]):
    """Goes through rows step by step, round after round; after the end it starts again."""

    def __init__(self, step: Callable[..., Awaitable[Slice[At] | None]]) -> None:
        self._step = step
        self._after: At | None = None
        self._steps = 0

    def begin(self, steps: int) -> Work:
        """Return the work of one round."""
        self._steps = steps
        return self._work

    async def _work(self, term: int) -> Round | None:
        slice_ = await self._step(term, after=self._after)
        if slice_ is None:
            return None
        self._after = slice_.after
        self._steps -= 1
        return Round(slice_.changed, done=self._after is None or self._steps <= 0)
