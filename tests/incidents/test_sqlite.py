"""SQLite: what it refuses at once, however patient the connection is."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from typing import Any
from unittest.mock import Mock

from relaybox.database.pools import sqlite
from relaybox.database.pools.sqlite import Sqlite3
from relaybox.database.statements.delivery import Query
from relaybox.stores.store import Want
from tests.incidents.conftest import Case, make_shop, variants
from tests.integration.shop import Shop
from tests.waiting import PATIENCE


class Deferred:
    """A connection whose transactions begin as readers."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    def execute(self, statement: str, *params: Any) -> sqlite3.Cursor:
        return self._connection.execute(statement.replace("BEGIN IMMEDIATE", "BEGIN DEFERRED"), *params)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


class Emitter:
    """Emits an event from another thread as soon as the relay has read something; once."""

    def __init__(self, shop: Shop) -> None:
        self._thread = threading.Thread(target=shop.emit, args=(1,), kwargs={"first": 1})
        self._fetch = sqlite._fetch

    def fetch(self, connection: sqlite3.Connection, query: Query) -> Any:
        rows = self._fetch(connection, query)
        if self._thread.ident is None:
            self._thread.start()
            # Where the relay is the only writer, this one waits for its end.
            self._thread.join(0.3)
        return rows

    def end(self) -> None:
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


@variants("transactions that begin as readers")
async def test_a_reader_that_becomes_a_writer_is_refused_because_its_snapshot_is_old(case: Case) -> None:
    if case.broken:
        connect = Sqlite3._connect
        case.patch.setattr(Sqlite3, "_connect", lambda self: Deferred(connect(self)))
    shop = make_shop(case.database("sqlite"))
    shop.emit(1)
    emitter = Emitter(shop)
    case.patch.setattr(sqlite, "_fetch", emitter.fetch)
    async with shop.store() as store:
        with case.check("database is locked"):
            claim = await store.claim(Want("shop", "relay"))
            assert [delivery.attempts for delivery in claim.deliveries] == [1]
    emitter.end()
    assert shop.states() == {"pending": 2}


@variants("a switch that gives up")
async def test_a_store_that_opens_a_new_file_while_another_writes_waits_for_it(case: Case) -> None:
    refused = threading.Event()

    if case.broken:
        case.patch.setattr(sqlite, "_switch_to_wal", lambda file: file.execute("PRAGMA journal_mode = WAL"))
    pausing = Mock(wraps=time, **{"sleep.side_effect": lambda seconds: refused.set()})
    case.patch.setattr(sqlite, "time", pausing)
    shop = make_shop(case.database("sqlite"))
    with shop.engine.connect() as connection:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
        async with shop.store() as store:
            with case.check("database is locked"):
                claim = asyncio.create_task(store.claim(Want("shop", "relay")))
                await asyncio.to_thread(refused.wait, case.seconds)
                connection.rollback()
                assert (await claim).deliveries == ()
