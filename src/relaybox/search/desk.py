"""The outbox's own tables, for who compares or rebuilds: the operators' service, and what is under way."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

from relaybox.operate.admin import Admin
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.undelivered import Undelivered

if TYPE_CHECKING:
    from relaybox.outbox import Outbox


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
