"""The outbox's own tables, for who compares or rebuilds: the operators' service, and what is under way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from relaybox.operate.admin import Admin
from relaybox.operate.open_relay import open_store
from relaybox.outbox import Outbox
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.undelivered import Undelivered


class Desk(NamedTuple):
    """Both on the same connections."""

    admin: Admin
    undelivered: Undelivered
    ledger: SqlLedger


@asynccontextmanager
async def open_desk(outbox: Outbox, actor: str) -> AsyncIterator[Desk]:
    """Hold a connection to the outbox's database, or two, until the end of the block."""
    store = open_store(outbox.settings.database, outbox.tables)
    try:
        ledger = SqlLedger(store)
        yield Desk(Admin(ledger, outbox.settings.destinations, actor), Undelivered(store), ledger)
    finally:
        await store.close()
