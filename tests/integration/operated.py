"""An outbox for tests of operators' work: rows in every state, and a direct view of the tables."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar
from uuid import UUID

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from relaybox.cli import app
from relaybox.core.outcome import Delivered, Failed, Outcome, Retried
from relaybox.core.settings import Destination, Settings
from relaybox.database.dialects import DIALECTS
from relaybox.database.migrations import migrate
from relaybox.database.schema import Tables, make_tables
from relaybox.database.statements.delivery import Statements
from relaybox.emit.row import Call, MarkedCall, RowBuilder
from relaybox.operate.admin import Admin
from relaybox.stores.journal import Operation
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.store import Claim, Settlement, Want
from tests.databases import sync_url

T = TypeVar("T")
DESTINATIONS = (
    Destination("shop", "console:", ordered=True),
    Destination("mail", "console:"),
    Destination("spare", "console:", ordered=True),
    Destination("web", "console:"),
)
CONFIGURATION = "".join(
    f"[destinations.{one.name}]\nsink = 'console:'\nordered = {str(one.ordered).lower()}\n"
    for one in DESTINATIONS
)
"""The same, as a file has it."""

GONE = Destination("gone", "console:")


def stop_counting_at(cap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Count and read windows of so many rows only."""
    for module in ("search", "expressions", "windows", "ledger.overview"):
        monkeypatch.setattr(f"relaybox.stores.sql.{module}.CAP", cap)


class Operated:
    """A database with an outbox, a store, and an operator."""

    def __init__(self, url: str) -> None:
        self.url = url
        migrate(url)
        self.tables: Tables = make_tables(sa.MetaData())
        self.engine = sa.create_engine(sync_url(url))
        with self.engine.connect() as connection:
            self.dialect = DIALECTS[connection.dialect.name]
        style = "qmark" if self.dialect.name == "sqlite" else "format"
        self.statements = Statements(self.tables, self.dialect, style)
        self._builder = RowBuilder(Settings(destinations=[*DESTINATIONS, GONE], unrouted="store"))
        store = open_store(url, self.tables)
        assert isinstance(store, SqlStore)
        self.store = store
        self.ledger = SqlLedger(store)
        self.admin = Admin(self.ledger, DESTINATIONS, "tester")

    async def close(self) -> None:
        await self.store.close()
        self.engine.dispose()

    def emit(self, *destinations: str, **options: Any) -> UUID:
        """Commit one event; its id, which is also that of its first delivery. No destination: no route."""
        arguments = {"aggregate_id": 1, "event_type": "order.paid", "payload": {"total": 42}, **options}
        kind = MarkedCall if "marks" in options else Call
        call = kind("Order", destinations=destinations or None, **arguments)
        emission = self._builder.build(call, self.dialect)
        self.insert(emission.rows)
        return emission.event_id

    def insert(self, rows: Sequence[tuple[Any, ...]]) -> None:
        query = self.statements.insert(rows)
        with self.engine.begin() as connection:
            connection.exec_driver_sql(query.sql, query.params)

    async def claim(self, destination: str, *, limit: int = 100, lease: float = 60.0) -> Claim:
        ordered = destination in ("shop", "spare")
        return await self.store.claim(Want(destination, "relay-1", limit, lease, ordered=ordered))

    async def settle(self, destination: str, outcome: Outcome, *, limit: int = 100) -> None:
        """Claim what is due there, and settle all of it alike."""
        claim = await self.claim(destination, limit=limit)
        assert claim.deliveries
        settlements = [Settlement(delivery, outcome) for delivery in claim.deliveries]
        assert not await self.store.settle(settlements)

    async def deliver(self, destination: str) -> None:
        await self.settle(destination, Delivered())

    async def fail(self, destination: str, error: str = "422 Unprocessable", *, limit: int = 100) -> None:
        await self.settle(destination, Failed(error), limit=limit)

    async def back_off(self, destination: str, error: str = "500 Internal Server Error") -> None:
        await self.settle(destination, Retried(3600.0, error))

    def row(self, id_: UUID) -> sa.Row[Any]:
        [row] = self.rows(id=id_)
        return row

    def rows(self, **equal: Any) -> Sequence[sa.Row[Any]]:
        event = self.tables.event
        columns = [column for column in event.c if "ddl" not in column.info or column.name == "position"]
        query = sa.select(*columns).filter_by(**equal).order_by(event.c.position)
        with self.engine.connect() as connection:
            return connection.execute(query).all()

    async def operation(self, id_: UUID) -> Operation:
        found = await self.admin.operation(id_)
        assert found is not None
        return found

    def audit(self) -> list[tuple[str, str, Any, int]]:
        table = self.tables.audit.c
        query = sa.select(table.actor, table.action, table.details, table.affected).order_by(table.id)
        with self.engine.connect() as connection:
            return [tuple(row) for row in connection.execute(query)]  # type: ignore[misc]

    def done(self) -> list[tuple[str, str, int]]:
        """Return who did what to how many rows."""
        return [(actor, action, affected) for actor, action, _, affected in self.audit()]

    def change(self, id_: UUID, **values: Any) -> None:
        event = self.tables.event
        with self.engine.begin() as connection:
            connection.execute(sa.update(event).where(event.c.id == id_).values(**values))

    def beat(self, name: str = "relay-1", *, ago: float = 0) -> None:
        """Write a relay's heartbeat of so many seconds ago."""
        seen = datetime.now(UTC) - timedelta(seconds=ago)
        values = {"name": name, "host": "here", "pid": 1, "version": "1", "seen_at": seen}
        with self.engine.begin() as connection:
            connection.execute(sa.insert(self.tables.relay).values(**values))

    async def kinds(self, id_: UUID) -> list[str]:
        return [reason.kind for reason in await self.admin.why(id_)]


def details(value: Any) -> Any:
    """Read the JSON that some databases give as text."""
    return json.loads(value) if isinstance(value, str) else value


def on(url: str, work: Callable[[Operated], Awaitable[T]]) -> T:
    """Work on the outbox while a command runs."""

    async def start() -> T:
        outbox = Operated(url)
        try:
            return await work(outbox)
        finally:
            await outbox.close()

    return asyncio.run(start())


def relaybox(*arguments: object, status: int = 0, **options: Any) -> str:
    """Run a command in this process; what it printed, or, with another status than 0, its complaint."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    assert done.exit_code == status, (done.stdout, done.stderr, done.exception)
    return done.stderr if status else done.stdout
