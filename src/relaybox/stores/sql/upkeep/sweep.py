"""Parked rows that nothing blocks, for ``relay/upkeep/sweep.py``."""

from __future__ import annotations

from collections.abc import Sequence

from relaybox.database.pools.places import UPKEEP
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row, Steps
from relaybox.stores.sql.claims import lock_lines
from relaybox.stores.sql.rows import to_json
from relaybox.stores.sql.store import Driver, Topic, driven
from relaybox.stores.upkeep import Slice

KEYS = 1000
ROWS_OF_A_KEY = 5
"""Rows read per key if the database cannot step from key to key."""


class SqlSweep(Topic):
    """Makes parked rows due, under the locks of claims and settles; any relay may."""

    def __init__(self, driver: Driver, sql: Statements, store_sql: Statements) -> None:
        super().__init__(driver, sql, UPKEEP)
        self._store_sql = store_sql

    @driven
    def make_due(self, destination: str, block: bool, after: str | None, limit: int) -> Steps[Slice[str]]:
        """Make the parked heads of the next ``limit`` keys due.

        If few rows are parked, check their keys; otherwise step from key to key.
        """
        page = min(limit, KEYS)
        if after is None:
            [rows] = yield [self.sql("parked", destination=destination, limit=page)]
            if len(rows) < page:
                keys = list({key: None for [key] in rows if key is not None})
                return Slice((yield from self._make_stuck_due(destination, block, keys)), None)
            after = ""
        for _ in range(0, limit, page):
            keys, after = yield from self._next_keys(destination, after, page)
            made = yield from self._make_stuck_due(destination, block, keys)
            if made or after is None:
                return Slice(made, after)
        return Slice(0, after)

    @driven
    def unpark(self, destination: str, limit: int) -> Steps[int]:
        """Make parked rows of an unordered destination due; return the number of rows."""
        [parked] = yield [self.sql("parked", destination=destination, limit=1)]
        if not parked:
            return 0
        find = self.sql("unpark", destination=destination, limit=limit)
        return (yield from self._make_due(destination, find))

    def _next_keys(self, destination: str, first: str, limit: int) -> Steps[tuple[list[str], str | None]]:
        words = {"destination": destination, "first": first}
        if self.dialect.returning:
            [rows] = yield [self.sql("next_keys", **words, limit=limit + 1)]
            keys = [key for [key] in rows]
            return keys[:limit], keys[limit] if len(keys) > limit else None
        [rows] = yield [self.sql("keys_of_next_rows", **words, limit=limit * ROWS_OF_A_KEY)]
        keys = [key for [key] in rows]
        # In the order of bytes, the next text after a text is that text with a NUL.
        return keys, f"{keys[-1]}\0" if keys else None

    def _make_stuck_due(self, destination: str, block: bool, keys: Sequence[str]) -> Steps[int]:
        """Take the locks only if a head is parked, and then check again."""
        words = {"destination": destination, "block": block}
        stuck: list[Row] = []
        if keys:
            [stuck] = yield [self.sql("stuck", **words, keys=to_json(keys))]
        if not stuck:
            return 0
        find = self.sql("make_stuck_due", **words, keys=to_json([key for [key] in stuck]))
        return (yield from self._make_due(destination, find))

    def _make_due(self, destination: str, find: Query) -> Steps[int]:
        """Make rows due; without a single statement for it, find and lock them first. Return their number."""
        *_, found = yield [*lock_lines(self._store_sql, [destination]), find]
        if found and not self.dialect.one_statement:
            yield [self.sql("make_due", ids=[row[0] for row in found])]
        return len(found)
