"""Samples of the backlog, for ``relay/upkeep/sample.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

from relaybox.database.pools.places import UPKEEP
from relaybox.database.statements.journal import sample_texts
from relaybox.database.steps import Steps
from relaybox.stores.sql.store import SqlStore, Topic, driven, walk_names
from relaybox.stores.sql.upkeep.term import prune_by_age
from relaybox.stores.upkeep import Sample, Sampled


class SqlSamples(Topic):
    """Measures the backlog with one bounded query each, and stores the results."""

    def __init__(self, store: SqlStore) -> None:
        own = store.steps.statements
        sql = own.others(sample_texts(own.dialect.name, own.tables))
        super().__init__(store.driver, sql, UPKEEP)
        event = own.tables.event
        self._table = ".".join(f'"{part}"' for part in (event.schema, event.name) if part)

    @driven
    def names(self) -> Steps[tuple[str, ...]]:
        """Return the destinations with pending or failed rows, configured or not."""
        names = yield from walk_names(self.sql, "next_pending", "next_failed")
        # A row edited by hand may have a name that is not text.
        return tuple(sorted(name for name in names if isinstance(name, str)))

    @driven
    def measure(self, destination: str, cap: int) -> Steps[Sample]:
        """Count pending and failed rows, up to ``cap``, and return the age of the oldest."""
        [[row]] = yield [self.sql("measure", destination=destination, cap=cap)]
        pending, failed, *born, now = row
        times = [self.dialect.from_time(time) for time in born if time is not None]
        oldest = max(0.0, (self.dialect.from_time(now) - min(times)).total_seconds()) if times else None
        return Sample(destination, pending, failed, oldest)

    @driven
    def position(self) -> Steps[tuple[int | None, datetime]]:
        """Return the newest known position and the database's time."""
        words = {"table": self._table} if self.dialect.name == "postgresql" else {}
        [[[position, now]]] = yield [self.sql("position", **words)]
        return position, self.dialect.from_time(now)

    @driven
    def keep(self, term: int, minute: datetime, samples: Sequence[Sample]) -> Steps[int | None]:
        """Write the samples of a minute over existing ones; return their number."""
        # If the term ends in between, two leaders write the same samples: harmless.
        [led] = yield [self.sql("fence", term=term)]
        if not led:
            return None
        at = self.dialect.to_time(minute)
        yield [self.sql("keep", minute=at, **asdict(one)) for one in samples]
        return len(samples)

    @driven
    def prune(self, term: int, what: Sampled, age: float, limit: int) -> Steps[int | None]:
        """Remove rows older than ``age`` seconds; return the number of rows."""
        return (yield from prune_by_age(self.sql, term, what, age, limit))
