"""Roll-ups and samples for the charts, the flow of deliveries, and failed rows by error."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from relaybox.database.steps import Row, Steps, ask
from relaybox.stores.journal import Failure, Flow, Level, Settled
from relaybox.stores.sql.rows import shown
from relaybox.stores.sql.store import Topic, driven, walk_names

LEAST = 500
"""Failed rows to read per destination, however many destinations there are."""


class SqlHistory(Topic):
    """Reads what relays recorded, each time a bounded part of it."""

    @driven
    def steps(
        self, seconds: float, step: int, destination: str | None
    ) -> Steps[tuple[datetime, dict[int, Settled], dict[int, Level]]]:
        """Return the database's time, and what was settled and sampled in the last ``seconds``.

        Both are counted in steps of ``step`` seconds since 1970.
        """
        # One more step, as the base of the first difference.
        words: dict[str, Any] = {"seconds": -(seconds + 2 * step), "step": step}
        words |= {"anywhere": destination is None, "destination": destination or ""}
        names = ("moment", "settled", "lags", "levels")
        [[[now]], settled, lags, levels] = yield [self.sql(name, **words) for name in names]
        buckets: dict[int, dict[int, int]] = defaultdict(dict)
        for number, bucket, times in lags:
            buckets[int(number)][int(bucket)] = int(times)
        return (
            self.dialect.from_time(now),
            {
                int(number): Settled(int(delivered), int(retried), int(failed), buckets[int(number)])
                for number, delivered, retried, failed in settled
            },
            {int(number): self._level(row) for number, *row in levels},
        )

    async def flows(self, seconds: Mapping[str, float]) -> Mapping[str, Flow]:
        """Return what is due at these destinations, and whether anything settled in the given seconds."""
        # A minute counts from its start, and is written a little later.
        lately = sorted({time + 60.0 for time in seconds.values()})
        results = await self.run(partial(ask, [self.sql("settling", seconds=-time) for time in lately]))
        settling = {time: {row[0] for row in rows} for time, rows in zip(lately, results, strict=True)}
        return {name: await self._flow(name, name in settling[time + 60.0]) for name, time in seconds.items()}

    @driven
    def _flow(self, name: str, settles: bool) -> Steps[Flow]:
        [[[pending, since, now]]] = yield [self.sql("flow", destination=name)]
        due = None if since is None else self.dialect.from_time(now) - self.dialect.from_time(since)
        return Flow(bool(pending), None if due is None else max(0.0, due.total_seconds()), settles)

    async def failed_rows(self, destination: str | None, limit: int) -> tuple[list[Failure], bool]:
        """Return the newest failed rows by error, at most ``limit``, and whether there may be more."""
        every = partial(walk_names, self.sql, "next_failed")
        names = [destination] if destination is not None else await self.run(every)
        share = max(LEAST, limit // max(1, len(names)))
        failures: list[Failure] = []
        capped = False
        for name in names:
            rows = await self._failed(name, share)
            failures += [self._failure(name, row) for row in rows]
            capped |= sum(row[2] for row in rows) >= share
        return failures, capped

    @driven
    def _failed(self, name: Any, limit: int) -> Steps[list[Row]]:
        [rows] = yield [self.sql("failed_rows", destination=name, limit=limit)]
        return rows

    def _failure(self, destination: Any, row: Row) -> Failure:
        event_type, error, count, first, last, example = row
        return Failure(
            destination=shown(destination) or "",
            event_type=shown(event_type) or "",
            error=shown(error) or "",
            count=count,
            first_at=self.dialect.from_time(first),
            last_at=self.dialect.from_time(last),
            example=_uuid(example),
        )

    def _level(self, row: Row) -> Level:
        pending, oldest, position, at = row
        return Level(
            int(pending),
            None if oldest is None else float(oldest),
            None if position is None else int(position),
            self.dialect.from_time(at),
        )


def _uuid(value: Any) -> UUID:
    try:
        return UUID(shown(value))
    except (ValueError, TypeError):
        return UUID(int=0)
