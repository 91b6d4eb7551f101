"""Why events wait, as an operator asks, and what an operator does about those that failed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from uuid import UUID

import sqlalchemy as sa

from relaybox.admin import Admin
from relaybox.parts import open_store
from relaybox.stores.ledger import SqlLedger
from tests.chaos.drivers import engine
from tests.chaos.workload import BROKER, Place

T = TypeVar("T")
SEVERAL = 5


class Operator:
    """Somebody with the command line, and no knowledge of what was done to the broker."""

    def __init__(self, place: Place) -> None:
        self._url = place.url
        self._outbox = place.outbox()

    def waiting(self) -> list[UUID]:
        """The first rows for the broker that did not get there yet."""
        event = self._outbox.tables.event.c
        query = sa.select(event.id).where(
            event.destination == BROKER, event.status.in_(("pending", "failed"))
        )
        return [row.id for row in self._rows(query.order_by(event.position).limit(SEVERAL))]

    def why(self, rows: list[UUID]) -> list[str]:
        """What is said of each."""

        async def ask(admin: Admin) -> list[str]:
            return [reason.text for id_ in rows for reason in await admin.why(id_)]

        return self._do(ask)

    def retry(self, said: str) -> int:
        """Retry what failed for the broker with an error like this; how many it were."""
        event = self._outbox.tables.event.c
        query = sa.select(event.id, event.error_message)
        failed = [
            row.id
            for row in self._rows(query.where(event.destination == BROKER, event.status == "failed"))
            if re.search(said, row.error_message or "")
        ]

        async def act(admin: Admin) -> None:
            await admin.retry(failed)

        if failed:
            self._do(act)
        return len(failed)

    def _do(self, work: Callable[[Admin], Awaitable[T]]) -> T:
        async def doing() -> T:
            store = open_store(self._url, self._outbox.tables)
            try:
                return await work(Admin(SqlLedger(store), self._outbox.settings.destinations, "operator"))
            finally:
                await store.close()

        return asyncio.run(doing())

    def _rows(self, query: sa.Select[Any]) -> list[Any]:
        with engine(self._url).connect() as connection:
            return list(connection.execute(query).all())
