"""Events that write again what differs, emitted through the outbox like all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relaybox.emit.row import Call
from relaybox.operate.pace import Pace
from relaybox.search.rows import Item, Rows
from relaybox.search.target import Target

REPAIR = {"relaybox-repair": "reconcile"}
"""The header by which such an event is known."""

AT_ONCE = 500

MANY = 10_000
"""Of an iterable, all of which is read for each time."""


class Repairs:
    """Emits for one destination, at a pace; ``headers`` are on every event besides the one of repairs."""

    def __init__(self, rows: Rows, target: Target, pace: Pace, headers: Mapping[str, str]) -> None:
        self._rows = rows
        self._target = target
        self._pace = pace
        self._headers = {**REPAIR, **headers}

    async def emit(self, ids: Sequence[str]) -> int:
        """An event for each, of what the database has of it then; how many were emitted before a stop."""
        size = self._pace.size(AT_ONCE if self._rows.guarded else MANY)
        emitted = 0
        for start in range(0, len(ids), size):
            part = ids[start : start + size]
            if not await self._pace.turn(len(part)):
                break
            emitted += await self._rows.emit_ids(part, self._calls)
        return emitted

    def _calls(self, found: Sequence[Item], missing: Sequence[str]) -> list[Call]:
        if missing:
            self._target.check_deletes()
        there = [self._call(item.id, self._target.event_type, item.payload) for item in found]
        gone = [self._call(id_, self._target.deleted_type, {"id": id_}) for id_ in missing]
        return there + gone

    def _call(self, id_: str, event_type: str, payload: Mapping[str, object]) -> Call:
        target = self._target
        return Call(
            target.aggregate_type,
            id_,
            event_type,
            payload,
            headers=self._headers,
            destinations=(target.destination.name,),
        )
