"""Make parked rows due that no earlier row of their key blocks.

Normally a settle does this, or an operator's retry, discard or move. The sweep finds the rows that they miss.
A configuration change leaves some (order, or blocking by a failed event, was switched off), and so does an
edit by hand. A relay of an older version leaves the next row of a key if it dies right after it settled an
event.
"""

from __future__ import annotations

from functools import partial

from relaybox.core.clock import Clock
from relaybox.relay.upkeep.agreement import Agreement
from relaybox.relay.upkeep.schedule import Rest, Round, Work, take_turns
from relaybox.stores.sql.upkeep.sweep import SqlSweep
from relaybox.stores.upkeep import Setting

BATCH = 5000
"""Keys checked before a rest."""
ROWS = 1000
"""Rows made due in one transaction if the destination is no longer ordered."""
BATCHES = 200
"""Batches in one round."""


class Sweep:
    """Sweeps round by round; a round continues where the last one stopped."""

    def __init__(self, rows: SqlSweep, agreement: Agreement, clock: Clock, rest: Rest) -> None:
        self._rows = rows
        self._agreement = agreement
        self._clock = clock
        self._rest = rest
        self._after: dict[str, str | None] = {}

    async def __call__(self) -> Round:
        """Run one round. Any relay may do it, at any time: it needs no leader."""
        works: list[Work] = [
            partial(self._ordered if setting.ordered else self._unordered, name, setting)
            for name, setting in (await self._agreement()).items()
        ]
        return await take_turns(0, works, self._clock, self._rest, BATCHES)

    async def _ordered(self, name: str, setting: Setting, _term: int) -> Round:
        swept = await self._rows.make_due(name, setting.on_failed == "block", self._after.get(name), BATCH)
        self._after[name] = swept.after
        return Round(swept.changed, done=swept.after is None)

    async def _unordered(self, name: str, _setting: Setting, _term: int) -> Round:
        changed = await self._rows.unpark(name, ROWS)
        return Round(changed, done=changed < ROWS)
