"""SQLite: an operation that is cancelled while another writer holds the file leaves the store usable."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest
import sqlalchemy as sa

from relaybox.migrations import migrate
from relaybox.schema import make_tables
from relaybox.store import Claim, Want
from relaybox.stores import sqlite
from tests.integration.shop import Databases


async def test_a_claim_that_is_cancelled_while_it_waits_for_the_writer(migrated_database: Databases) -> None:
    database = migrated_database("sqlite")
    migrate(database)
    path = str(sa.make_url(database).database)
    store = sqlite.open_store(path, make_tables(sa.MetaData()))
    want = Want("shop", "relay-1")
    assert await store.claim(want) == Claim()
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    waiting = asyncio.create_task(store.claim(want))
    await asyncio.sleep(0.1)  # until its BEGIN is in the driver's thread, which gives no sign
    waiting.cancel()
    writer.execute("COMMIT")
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await store.claim(want) == Claim()
    writer.execute("BEGIN IMMEDIATE")
    writer.execute("ROLLBACK")
    writer.close()
    await store.close()
