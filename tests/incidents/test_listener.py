"""A connection that dies takes its LISTEN with it, and the next one must say it again."""

from __future__ import annotations

import asyncio
from typing import Any

from psycopg import AsyncConnection, sql

from relaybox.emit.wakes import postgres
from relaybox.emit.wakes.postgres import ListeningWake, Notifier
from tests.incidents.conftest import Case, variants
from tests.integration.shop import end_sessions
from tests.waiting import await_for

CHANNEL = "relaybox"


async def listen_once(self: Any) -> None:
    """Connect again whenever the connection is lost, but LISTEN the first time only."""
    connection: Any = await AsyncConnection.connect(**postgres._options(self._url))
    try:
        if not hasattr(self, "listened"):
            self.listened = True
            await connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(self._channel)))
        with postgres.Ear(connection, self._take) as ear:
            self._found()
            await ear.lost
    finally:
        self.alive = False
        await connection.close()


@variants("a connection that is made again, without LISTEN")
async def test_the_listener_is_not_registered_again_after_its_connection_died(case: Case) -> None:
    if case.broken:
        case.patch.setattr(ListeningWake, "_listen", listen_once)
    case.patch.setattr(postgres, "FIRST_PAUSE", 0.05)
    connected: list[ListeningWake] = []
    found = ListeningWake._found
    case.patch.setattr(ListeningWake, "_found", lambda self: (connected.append(self), found(self)))
    url = case.database("postgresql-18")
    wake, notifier = ListeningWake(url, CHANNEL), Notifier(url, CHANNEL)
    try:
        wake.start()
        await await_for(lambda: len(connected) == 1, "the first connection")
        await wake.wait("shop", 0)
        await asyncio.to_thread(end_sessions, url)
        await await_for(lambda: len(connected) == 2, "the next connection")
        await wake.wait("shop", 0)
        notifier.call(["shop"])
        with case.check("deaf for good"):
            assert await wake.wait("shop", case.seconds), "deaf for good"
    finally:
        notifier.close()
        await wake.close()
