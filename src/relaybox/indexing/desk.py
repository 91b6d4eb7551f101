"""The outbox's own tables, for who compares or rebuilds: the operators' service, and what is under way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from relaybox.admin import Admin
from relaybox.app import Outbox
from relaybox.parts import open_store
from relaybox.stores.ledger import SqlLedger
from relaybox.stores.undelivered import Undelivered


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
