"""A shop whose handler keeps what it took, and what its relays promise of that."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any
from uuid import UUID

import sqlalchemy as sa

from relaybox import Event, Outbox
from relaybox.testing.checker import Committed, Received, check
from tests.integration.shop import Shop

KEYS = 10
OPTIONS: dict[str, Any] = {
    "ordered": True,
    # So long that no busy moment of the machine ends a lease or a send.
    "lease": "20s",
    "timeout": "20s",
    "concurrency": 5,
    "batch_size": 10,
    "poll_interval": "20ms",
}


class Scene:
    """Its events are numbered, and have the keys ``n % KEYS``."""

    def __init__(self, url: str, **options: Any) -> None:
        self.shop = Shop(url)
        self.taken: list[int] = []
        self.shop.outbox.handler("*", name="on_order", **{**OPTIONS, **options})(self._take)

    async def _take(self, event: Event) -> None:
        self.taken.append(event.payload["n"])
        await asyncio.sleep(0.02)

    def numbers(self, *conditions: Any) -> set[int]:
        query = sa.select(self.shop.outbox.tables.event.c.payload).where(*conditions)
        with self.shop.engine.connect() as connection:
            return {payload["n"] for payload in connection.scalars(query)}

    def repeated(self, emitted: Iterable[int]) -> set[int]:
        """Return what was delivered twice; check that nothing is lost, left over or out of order."""
        assert self.shop.leases() == 0
        return repeated(self.taken, emitted, KEYS)


def repeated(taken: list[int], emitted: Iterable[int], keys: int) -> set[int]:
    """Return what came twice; check that all came, none came more often, and each key is in order."""
    committed = [Committed("", UUID(int=n), str(n % keys), n) for n in sorted(emitted)]
    received = [Received("", UUID(int=n)) for n in taken]
    report = check(committed, received, in_flight={row[:2]: 1 for row in committed})
    assert report.ok, str(report)
    return {n for n, count in Counter(taken).items() if count > 1}


def stored(engine: sa.Engine, outbox: Outbox) -> list[Any]:
    """Return every row in order, without the columns that not every database has."""
    event = outbox.tables.event
    columns = [column for column in event.c if not column.name.endswith("_destination")]
    with engine.connect() as connection:
        return list(connection.execute(sa.select(*columns).order_by(event.c.position)))
