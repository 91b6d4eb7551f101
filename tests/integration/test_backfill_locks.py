"""Backfills and repairs neither block an application's transactions for long nor end them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox.errors import ConfigError, InvalidField
from relaybox.search import Source, abackfill
from relaybox.search.transactions import Busy
from relaybox.search.workspace import open_rows
from tests.databases import SERVERS
from tests.integration.backfilling import DOCUMENTS, SECONDS, Archive, Document, repairs, run
from tests.waiting import await_for

pytestmark = pytest.mark.full


@pytest.fixture(params=SERVERS)
def archive(request: pytest.FixtureRequest, migrated_database: Callable[[str], str]) -> Archive:
    return Archive(migrated_database(request.param), 120)


async def repair(archive: Archive, ids: Sequence[str]) -> int:
    async with asyncio.timeout(SECONDS), open_rows(archive.outbox, DOCUMENTS) as rows:
        return await rows.emit_ids(ids, repairs)


def update(archive: Archive, number: int, title: str) -> None:
    with archive.engine.begin() as connection:
        archive.change(connection, number, title)


async def test_while_a_row_is_held_all_others_can_be_changed(archive: Archive) -> None:
    """One row is being changed all the time; a page that would wait for it holds no other."""
    with archive.engine.begin() as writer:
        archive.change(writer, 60, "held")
        working = asyncio.create_task(abackfill(archive.outbox, "search", DOCUMENTS, batch=100))
        await await_for(lambda: 59 in archive.ids())
        # The page that begins with the row that is held can have no other.
        for number in (1, 59, 61, 120):
            await asyncio.to_thread(update, archive, number, "while it waits")
        assert not working.done()
    done = await working

    assert done.done == 120
    assert archive.indexed() | archive.state() == archive.indexed()


@contextmanager
def backwards(archive: Archive) -> Iterator[list[Exception]]:
    """Change documents from the last to the first in transactions; yield the errors that this gets."""
    ending = threading.Event()
    errors: list[Exception] = []
    began = threading.Event()

    def write() -> None:
        number = 0
        while not ending.is_set():
            number += 1
            try:
                with archive.engine.begin() as connection:
                    for at in (110, 80, 40, 3):
                        archive.change(connection, at, f"{number}")
                        ending.wait(0.01)
            except Exception as error:
                errors.append(error)
            began.set()

    thread = threading.Thread(target=write)
    thread.start()
    began.wait(SECONDS)
    try:
        yield errors
    finally:
        ending.set()
        thread.join(SECONDS)


def backfilled(archive: Archive) -> int:
    return run(archive, batch=120, max_pending=None).done


def repaired(archive: Archive) -> int:
    return asyncio.run(repair(archive, [str(number) for number in range(1, 121)]))


@pytest.mark.parametrize("work", [backfilled, repaired])
def test_a_writer_in_the_other_order_breaks_no_deadlock(
    archive: Archive, work: Callable[[Archive], int]
) -> None:
    with backwards(archive) as errors:
        for _ in range(5):
            assert work(archive) == 120

    assert errors == []
    assert archive.indexed() == archive.state()


@pytest.mark.parametrize("archive", ["postgresql-18"], indirect=True)
async def test_a_repair_does_not_stand_in_the_way_of_writers_behind_a_long_one(archive: Archive) -> None:
    """PostgreSQL lets no other transaction past one that waits for the table, so that must not last."""
    with archive.engine.begin() as writer:
        archive.change(writer, 5, "long")
        working = asyncio.create_task(repair(archive, ["900"]))
        waits = sa.text("SELECT count(*) FROM pg_locks WHERE mode = 'ShareLock' AND NOT granted")
        with archive.engine.connect() as looking:
            await await_for(lambda: looking.scalar(waits))
        # Ends while the long one goes on, and before the repair does.
        await asyncio.to_thread(update, archive, 7, "short")
        assert not working.done()
        with pytest.raises(Busy, match=r"other transactions hold the table for too long .*lock timeout"):
            await working

    assert sorted(archive.ids()) == [5, 7]
    assert await repair(archive, ["900"]) == 1


async def test_one_that_is_being_made_is_not_removed(archive: Archive) -> None:
    with archive.engine.begin() as writer:
        writer.execute(sa.insert(Document).values(id=500, title="new", author_id=1))
        archive.emit(writer, 500, "created", "new")
        working = asyncio.create_task(repair(archive, ["4", "500"]))
        await await_for(lambda: archive.ids() == [4])
        assert not working.done()
    assert await working == 2

    assert archive.indexed()["500"] == "new"
    about = [type_ for id_, type_, *_ in archive.events() if id_ == "500"]
    assert about == ["document.created", "document.updated"]


def test_objects_that_share_an_id_are_refused(archive: Archive) -> None:
    with pytest.raises(ConfigError, match="gives several rows of '1'"):
        run(archive, Source(sa.select(Document), id="author_id"))

    assert archive.events() == []


KILLS = {
    "postgresql": "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    "mariadb": "SELECT id FROM information_schema.processlist"
    " WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}


def test_connections_that_break_in_the_middle_of_a_page_lose_and_repeat_nothing(archive: Archive) -> None:
    read_ids: list[int] = []

    def document(one: Any) -> dict[str, Any]:
        read_ids.append(one.id)
        if len(read_ids) in (30, 90):
            kill(archive)
        return {"id": one.id, "title": one.title}

    done = run(archive, Source(sa.select(Document), document=document), batch=20)

    assert (done.done, done.stopped) == (120, False)
    assert archive.ids() == list(range(1, 121))
    assert len(read_ids) > 120


def kill(archive: Archive) -> None:
    """End every connection of the backfill."""
    with archive.engine.connect() as connection:
        ids = connection.scalars(sa.text(KILLS[archive.engine.dialect.name])).all()
        if archive.engine.dialect.name == "mariadb":
            for id_ in ids:
                connection.execute(sa.text(f"KILL {id_}"))


@pytest.mark.parametrize("archive", ["postgresql-18"], indirect=True)
def test_an_id_that_is_too_long_is_reported(archive: Archive) -> None:
    metadata = sa.MetaData()
    table = sa.Table("thing", metadata, sa.Column("id", sa.String(400), primary_key=True))
    metadata.create_all(archive.engine)
    with archive.engine.begin() as connection:
        connection.execute(table.insert(), [{"id": "x" * 300}])

    with pytest.raises(InvalidField, match="aggregate_id"):
        run(archive, Source(sa.select(table), aggregate_type="Thing"))
