"""What the demo's parts wrote: journals on disk, and rows in the database."""

from __future__ import annotations

import sqlalchemy as sa

from relaybox.database.schema import Tables
from relaybox.demo.shop import changes, metadata
from relaybox.demo.workspace import DESTINATIONS, RECEIVERS, Change, Placed, Reader, Receipt, Workspace

MOST_REASONS = 5


class Journals:
    """What the shop placed, and what destinations acknowledged or refused, read as it grows."""

    def __init__(self, workspace: Workspace) -> None:
        self.placed = Reader(workspace.journal("shop", Placed), Placed)
        self.receipts = {name: Reader(workspace.journal(name, Receipt), Receipt) for name in DESTINATIONS}
        self.faults = {name: Reader(workspace.journal(name, str), str) for name in RECEIVERS}
        self._refs: dict[str, set[str]] = {name: set() for name in DESTINATIONS}

    def read(self) -> None:
        """Read what is new."""
        self.placed.read()
        for faults in self.faults.values():
            faults.read()
        for name, receipts in self.receipts.items():
            self._refs[name].update(receipt.change.ref for receipt in receipts.read())

    def count(self, destination: str) -> tuple[int, int]:
        """Return the number of events that a destination acknowledged, and that of its duplicates."""
        arrived = len(self._refs[destination])
        return arrived, len(self.receipts[destination].records) - arrived


class Rows:
    """The shop's changes, and the state of their deliveries."""

    def __init__(self, engine: sa.Engine, tables: Tables) -> None:
        self._engine = engine
        self._event = tables.event.c
        self._destination = tables.destination.c
        metadata.create_all(engine)

    def close(self) -> None:
        """Disconnect."""
        self._engine.dispose()

    def changes(self) -> list[Change]:
        """Return every committed change."""
        with self._engine.connect() as connection:
            return [Change(*row) for row in connection.execute(sa.select(changes))]

    def circuits(self) -> dict[str, str]:
        """Return the state of each destination's circuit."""
        query = sa.select(self._destination.name, self._destination.circuit)
        with self._engine.connect() as connection:
            return {row.name: row.circuit for row in connection.execute(query)}

    def pending(self, *conditions: sa.ColumnElement[bool]) -> int:
        """Return the number of unfinished deliveries."""
        query = sa.select(sa.func.count()).where(self._event.status == "pending", *conditions)
        with self._engine.connect() as connection:
            return connection.execute(query).scalar_one()

    def held_by(self, pid: int | None) -> int:
        """Return the number of unfinished deliveries that a relay holds, or held when it died."""
        return self.pending(self._event.lease_owner.contains(f":{pid}:"))

    def suspects(self) -> int:
        """Return the number of unfinished deliveries that a dead relay held."""
        return self.pending(self._event.crashes > 0)

    def reasons(self) -> list[str]:
        """Return why deliveries are unfinished, the most frequent reasons first."""
        event, count = self._event, sa.func.count()
        query = (
            sa.select(count, event.destination, event.status, event.error_message)
            .where(event.status != "delivered")
            .group_by(event.destination, event.status, event.error_message)
            .order_by(count.desc())
            .limit(MOST_REASONS)
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        return [
            f"{number} × {name}, {status}: {error or 'not tried'}" for number, name, status, error in rows
        ]
