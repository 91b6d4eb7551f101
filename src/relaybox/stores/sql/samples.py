"""Samples the backlog in any SQL database, on the connections of a relay's store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from functools import partial

from relaybox.database.pools.places import UPKEEP
from relaybox.database.statements.journal import sample_texts
from relaybox.database.steps import Steps, ask
from relaybox.stores.sql.store import SqlStore, walk_names
from relaybox.stores.upkeep import Sample, Sampled


class SqlSamples:
    """Measures the backlog with one bounded query each, and stores the results."""

    def __init__(self, store: SqlStore) -> None:
        self._run = partial(store.driver.run, lane=UPKEEP)
        statements = store.steps.statements
        self._dialect = statements.dialect
        self._sql = statements.others(sample_texts(self._dialect.name, statements.tables))
        event = statements.tables.event
        self._table = ".".join(f'"{part}"' for part in (event.schema, event.name) if part)

    async def names(self) -> tuple[str, ...]:
        """Return the destinations with pending or failed rows, configured or not."""
        names = await self._run(partial(walk_names, self._sql, "next_pending", "next_failed"))
        # A row edited by hand may have a name that is not text.
        return tuple(sorted(name for name in names if isinstance(name, str)))

    async def measure(self, destination: str, cap: int) -> Sample:
        """Count pending and failed rows, up to ``cap``, and return the age of the oldest."""
        [[row]] = await self._run(partial(ask, [self._sql("measure", destination=destination, cap=cap)]))
        pending, failed, *born, now = row
        times = [self._dialect.from_time(time) for time in born if time is not None]
        oldest = max(0.0, (self._dialect.from_time(now) - min(times)).total_seconds()) if times else None
        return Sample(destination, pending, failed, oldest)

    async def position(self) -> tuple[int | None, datetime]:
        """Return the newest known position and the database's time."""
        words = {"table": self._table} if self._dialect.name == "postgresql" else {}
        [[[position, now]]] = await self._run(partial(ask, [self._sql("position", **words)]))
        return position, self._dialect.from_time(now)

    async def keep(self, term: int, minute: datetime, samples: Sequence[Sample]) -> int | None:
        """Write the samples of a minute over existing ones; return their number."""
        return await self._run(lambda: self._keep(term, minute, samples))

    async def prune(self, term: int, what: Sampled, age: float, limit: int) -> int | None:
        """Remove rows older than ``age`` seconds; return the number of rows."""
        return await self._run(lambda: self._prune(term, what, age, limit))

    def _keep(self, term: int, minute: datetime, samples: Sequence[Sample]) -> Steps[int | None]:
        # If the term ends in between, two leaders write the same samples: harmless.
        [led] = yield [self._sql("fence", term=term)]
        if not led:
            return None
        at = self._dialect.to_time(minute)
        yield [self._sql("keep", minute=at, **asdict(one)) for one in samples]
        return len(samples)

    def _prune(self, term: int, what: Sampled, age: float, limit: int) -> Steps[int | None]:
        if self._dialect.one_statement:
            prune = self._sql(what, term=term, seconds=-age, limit=limit)
            led, gone = yield [self._sql("fence", term=term), prune]
            return len(gone) if led else None
        [led] = yield [self._sql("fence", term=term)]
        if not led:
            return None
        _, [[changed]] = yield [self._sql(what, seconds=-age, limit=limit), self._sql("changed")]
        return int(changed)
