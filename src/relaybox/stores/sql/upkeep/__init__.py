"""Upkeep in any SQL database: one module for each job of ``relay/upkeep``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from relaybox.database.pools.places import UPKEEP
from relaybox.database.statements.upkeep import texts
from relaybox.database.steps import Steps
from relaybox.stores.sql.rows import to_json
from relaybox.stores.sql.store import SqlStore, Topic, driven
from relaybox.stores.sql.upkeep.agreement import SqlReports
from relaybox.stores.sql.upkeep.membership import SqlMembers
from relaybox.stores.sql.upkeep.prune import SqlPrune
from relaybox.stores.sql.upkeep.route import SqlRoute
from relaybox.stores.sql.upkeep.sweep import SqlSweep
from relaybox.stores.upkeep import Minute


class SqlUpkeep(Topic):
    """Upkeep in a store's database; ``stores/upkeep.py`` has the contract."""

    def __init__(self, store: SqlStore) -> None:
        own = store.steps.statements
        sql = own.others(texts(own.dialect.name))
        super().__init__(store.driver, sql, UPKEEP)
        # A late heartbeat makes a relay count as dead.
        self.members = SqlMembers(store.vital, sql)
        self.reports = SqlReports(store.driver, sql, UPKEEP)
        self.prune = SqlPrune(store.driver, sql, UPKEEP)
        self.sweep = SqlSweep(store.driver, sql, own)
        self.unrouted = SqlRoute(store.driver, sql)

    @driven
    def record(self, minutes: Sequence[Minute]) -> Steps[None]:
        """Write the counts over those of the same relay and minute."""
        yield [
            self.sql(
                "record",
                **asdict(row) | {"minute": self.dialect.to_time(row.minute), "lag": to_json(row.lag)},
            )
            for row in minutes
        ]
