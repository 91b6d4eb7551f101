"""A relay samples while it leads, and goes on delivering where the tables are of the version before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
import sqlalchemy as sa

from relaybox import Destination, Event, Outbox
from relaybox.database.migrations import MIGRATIONS, migrate
from tests.databases import KINDS, engine
from tests.waiting import await_for

each_database = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaybox.relay.upkeep.caretaker.SAMPLE", 0.05)


def outbox_of(url: str, taken: asyncio.Queue[Event]) -> Outbox:
    async def take(event: Event) -> None:
        await taken.put(event)

    return Outbox(url, destinations=[Destination("mail", "handler:")], handlers={"mail": take})


def emit(outbox: Outbox, url: str) -> None:
    with engine(url).begin() as connection:
        outbox.emit(connection, "Order", 1, "order.paid", {}, destinations=["mail"])


@each_database
async def test_a_relay_samples_while_it_leads(kind: str, migrated_database: Callable[[str], str]) -> None:
    url = migrated_database(kind)
    outbox = outbox_of(url, asyncio.Queue())
    emit(outbox, url)

    def sampled() -> set[str]:
        with engine(url).connect() as connection:
            return set(connection.scalars(sa.select(outbox.tables.sample.c.destination)))

    async with outbox.relay():
        assert await await_for(sampled) == {"", "mail"}
    async with outbox.admin() as admin:
        points = (await admin.series(1)).points
    assert any(point.pending is not None for point in points)


@each_database
async def test_on_the_tables_of_the_first_version_a_relay_delivers_and_says_what_is_missing(
    kind: str,
    fresh_database: Callable[[str], str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = fresh_database(kind)
    with monkeypatch.context() as patch:
        patch.setattr("relaybox.database.migrations.MIGRATIONS", MIGRATIONS[:1])
        assert migrate(url) == [1]
    taken: asyncio.Queue[Event] = asyncio.Queue()
    outbox = outbox_of(url, taken)
    emit(outbox, url)

    def said() -> list[str]:
        return [text for text in caplog.messages if "cannot sample" in text]

    with caplog.at_level(logging.WARNING):
        async with outbox.relay():
            [message] = await await_for(said)
            await asyncio.wait_for(taken.get(), 60)
    assert "too old for this version" in message
    assert "run `relaybox migrate`" in message
    assert len(said()) == 1
