"""Backfills: with live writers, killed half-way, cancelled, twice at once, and of wrong sources."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from relaybox.errors import ConfigError, StoreError
from relaybox.search import Source, abackfill
from relaybox.search.checkpoint import Checkpoint, Lost
from relaybox.search.results import Backfilled
from relaybox.search.select_rows import SelectRows
from relaybox.search.workspace import open_rows
from tests.databases import KINDS, SERVERS
from tests.integration.backfilling import (
    DOCUMENTS,
    SECONDS,
    Archive,
    Author,
    Document,
    make_project,
    repairs,
    run,
    stop_after,
)
from tests.integration.project import Project
from tests.locks import waiters
from tests.waiting import await_for, cancel

WORDS = ("backfill", "--destination", "search", "--source", "shop:documents", "--batch", "10")
HELD = ("--max-pending", "15")
"""Nobody takes the events, so that it waits after two pages."""


@pytest.fixture(params=KINDS)
def archive(request: pytest.FixtureRequest, migrated_database: Callable[[str], str]) -> Archive:
    return Archive(migrated_database(request.param), 120)


@pytest.fixture
def project(tmp_path: Path, archive: Archive) -> Project:
    return make_project(tmp_path, archive)


def test_every_document_gets_an_event_of_its_own(archive: Archive) -> None:
    done = run(archive, batch=50)

    assert (done.done, done.total, done.skipped, done.stopped) == (120, 120, 0, False)
    assert archive.ids() == list(range(1, 121))
    id_, event_type, payload, headers = archive.events()[4]
    assert (id_, event_type) == ("5", "document.updated")
    assert payload == {"id": 5, "title": "title 5", "author_id": 1}
    assert headers == {"relaybox-backfill": "true"}
    [operation] = archive.operations()
    assert (operation.action, operation.state, operation.done) == ("backfill", "done", 120)


def test_the_columns_of_a_join_are_a_document_too(archive: Archive) -> None:
    joined = sa.select(Document.id, Document.title, Author.name.label("author")).join(
        Author, Author.id == Document.author_id, isouter=True
    )
    source = Source(joined.where(Document.id <= 7), aggregate_type="Page", event_type="page.seen")

    done = run(archive, source, batch=3, index="pages__building")

    assert done.done == done.total == 7
    assert archive.events()[6] == (
        "7",
        "page.seen",
        {"id": 7, "title": "title 7", "author": "Ann"},
        {"relaybox-backfill": "true", "relaybox-index": "pages__building"},
    )


def test_one_that_is_killed_goes_on_and_emits_each_document_once(archive: Archive, project: Project) -> None:
    with project.running(*WORDS, *HELD) as process:
        project.until(lambda: len(archive.ids()) == 20)
        process.send_signal(signal.SIGKILL)
        process.wait(60)

    report = json.loads(project.run(*WORDS, "--json"))

    assert (report["resumed_from"], report["done"]) == (20, 120)
    assert archive.ids() == list(range(1, 121))
    [operation] = archive.operations()
    assert operation.state == "done"


def test_one_that_is_interrupted_says_how_to_go_on(archive: Archive, project: Project) -> None:
    with project.running(*WORDS, *HELD) as process:
        project.until(lambda: len(archive.ids()) == 20)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1
    # The total was counted at the beginning, and there may be more documents at the end.
    assert " of about 120 documents; the same command goes on from there" in project.read("log")
    [operation] = archive.operations()
    assert operation.state == "cancelled"

    output = project.run(*WORDS)

    assert output.startswith("emitted 120 documents to search (went on after id ")
    assert archive.ids() == list(range(1, 121))


def test_beside_live_writers_the_events_in_order_are_the_database(archive: Archive) -> None:
    def slowly(document: Any) -> dict[str, Any]:
        # Between the read and the events of a page, so that writers come in between where they can.
        time.sleep(0.002)
        return {"id": document.id, "title": document.title}

    with archive.writers(4, 120):
        for _ in range(3):
            done = run(archive, Source(sa.select(Document), document=slowly), batch=7, max_pending=None)
            assert done.done >= 60

    assert len(archive.state()) > 60
    assert archive.indexed() == archive.state()


@pytest.mark.parametrize("archive", SERVERS, indirect=True)
async def test_a_row_that_is_being_changed_is_waited_for_with_what_is_joined_to_it(archive: Archive) -> None:
    joined = sa.select(Document.id, Document.title, Author.name).join(Author, Author.id == Document.author_id)
    with archive.engine.begin() as writer:
        archive.change(writer, 5, "new")
        writer.execute(sa.update(Author).values(name="Zoe"))
        working = asyncio.create_task(abackfill(archive.outbox, "search", Source(joined)))
        await await_for(lambda: waiters(archive.engine))
    await working

    fifth = [event for event in archive.events() if event[0] == "5"]
    assert [payload["title"] for _, _, payload, _ in fifth] == ["new", "new"]
    assert fifth[1][2]["name"] == "Zoe"


def test_after_a_stop_it_goes_on_and_after_its_end_it_begins_again(archive: Archive) -> None:
    first = run(archive, batch=20, stop=stop_after(2))
    assert first.stopped
    assert first.done == 40

    second = run(archive, batch=50)
    assert (second.resumed_from, second.done, second.operation) == (40, 120, first.operation)
    assert archive.ids() == list(range(1, 121))

    third = run(archive)
    assert third.operation != first.operation
    assert third.resumed_from is None
    assert len(archive.ids()) == 240


@pytest.mark.parametrize("archive", ["sqlite"], indirect=True)
def test_restart_leaves_what_was_interrupted(archive: Archive) -> None:
    assert run(archive, batch=4, stop=stop_after(1)).done == 4

    done = run(archive, resume=False)

    assert (done.done, done.resumed_from) == (120, None)
    assert [operation.state for operation in archive.operations()] == ["cancelled", "done"]


@asynccontextmanager
async def under_way(archive: Archive, **options: Any) -> AsyncIterator[asyncio.Task[Backfilled]]:
    """Run a backfill that has emitted a page."""
    begun = asyncio.Event()
    given = {"batch": 5, "progress": lambda _: begun.set(), **options}
    working = asyncio.create_task(abackfill(archive.outbox, "search", DOCUMENTS, **given))
    async with asyncio.timeout(SECONDS):
        await begun.wait()
        yield working


async def test_two_of_the_same_are_refused_and_others_are_not(archive: Archive) -> None:
    async with under_way(archive, max_pending=5) as working:
        with pytest.raises(ConfigError, match=r"is running .*wait for its end, or cancel it"):
            await abackfill(archive.outbox, "search", DOCUMENTS)
        other = await abackfill(archive.outbox, "search", DOCUMENTS, index="other")
        await cancel(working)

    assert other.done == 120
    assert [operation.state for operation in archive.operations()] == ["cancelled", "done"]


async def test_one_that_is_cancelled_ends_and_can_be_gone_on_with(archive: Archive) -> None:
    async with under_way(archive, max_pending=5) as working, archive.outbox.admin() as admin:
        [operation] = await admin.operations()
        assert await admin.cancel(operation.id)
        cancelled = await working
        [ended] = await admin.operations()
        rest = await abackfill(archive.outbox, "search", DOCUMENTS)

    assert cancelled.stopped
    assert (ended.state, ended.done) == ("cancelled", cancelled.done)
    assert ended.finished_at is not None
    assert rest.resumed_from == cancelled.done
    assert archive.ids() == list(range(1, 121))


async def test_one_that_is_interrupted_twice_is_on_record_as_cancelled(
    archive: Archive, monkeypatch: pytest.MonkeyPatch
) -> None:
    end = Checkpoint.end
    async with under_way(archive, max_pending=5) as working:

        def interrupted(self: Checkpoint, *given: Any) -> Any:
            working.cancel()
            return (yield from end(self, *given))

        monkeypatch.setattr(Checkpoint, "end", interrupted)
        await cancel(working)
        [operation] = archive.operations()

    assert operation.state == "cancelled"


async def test_one_taken_over_emits_nothing_more(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its next page comes before its next sign of life, and its last one long after the other has begun.
    async with under_way(archive, rate=10) as working:
        # As if it had been silent for long: another one takes it for dead.
        monkeypatch.setattr("relaybox.operate.runner.STALLED", -1.0)
        done = await abackfill(archive.outbox, "search", DOCUMENTS)
        with pytest.raises(Lost):
            await working

    assert done.done == 120
    assert archive.ids() == list(range(1, 121))
    assert [operation.state for operation in archive.operations()] == ["done"]


ADVANCES = {
    "postgresql": "UPDATE outbox_operation SET details = jsonb_set(details, '{key}', '10')",
    "mariadb": "UPDATE outbox_operation SET details = JSON_SET(details, '$.key', 10)",
}


@pytest.mark.parametrize("archive", SERVERS, indirect=True)
async def test_a_takeover_goes_on_after_a_page_that_just_commits(archive: Archive) -> None:
    stopped = await abackfill(archive.outbox, "search", DOCUMENTS, batch=5, stop=stop_after(1))
    assert stopped.done == 5
    with archive.engine.begin() as page:
        page.execute(sa.text(ADVANCES[archive.engine.dialect.name]))
        working = asyncio.create_task(abackfill(archive.outbox, "search", DOCUMENTS))
        await await_for(lambda: waiters(archive.engine))
    done = await working

    assert done.resumed_from == 10
    assert archive.ids() == [*range(1, 6), *range(11, 121)]


async def test_a_commit_in_doubt_is_not_repeated(archive: Archive, monkeypatch: pytest.MonkeyPatch) -> None:
    emit_after = SelectRows.emit_after
    lost = iter([False, True, False, True])

    async def lossy(self: SelectRows, *given: Any) -> Any:
        page = await emit_after(self, *given)
        if next(lost, False):
            raise StoreError("the connection was lost")
        return page

    monkeypatch.setattr(SelectRows, "emit_after", lossy)

    done = await abackfill(archive.outbox, "search", DOCUMENTS, batch=30)

    assert next(lost, None) is None
    assert done.done == 120
    assert archive.ids() == list(range(1, 121))


async def test_it_waits_while_too_much_is_pending(archive: Archive) -> None:
    counts: list[int | None] = []
    done: list[int] = []

    def progress(now: Any) -> None:
        counts.append(now.waiting)
        done.append(now.done)
        if now.waiting is not None:
            with archive.engine.begin() as connection:
                connection.execute(archive.outbox.tables.event.delete())

    await abackfill(archive.outbox, "search", DOCUMENTS, batch=20, max_pending=30, progress=progress)

    assert 31 in counts
    assert done[-1] == 120
    # Never more than one page above the limit.
    assert done[counts.index(31)] == 40


def test_a_dry_run_writes_nothing(archive: Archive) -> None:
    done = run(archive, dry_run=True)

    assert (done.done, done.total) == (0, 120)
    assert done.example is not None
    assert (done.example.aggregate_id, done.example.event_type) == ("1", "document.updated")
    assert archive.events() == []
    assert archive.operations() == []


def test_a_dry_run_tells_where_an_interrupted_one_goes_on(archive: Archive, project: Project) -> None:
    source = Source(DOCUMENTS.documents, aggregate_type="Document", name="shop:documents")
    run(archive, source, batch=10, stop=stop_after(3))

    lines = project.run(*WORDS, "--dry-run").splitlines()
    again = project.run(*WORDS, "--dry-run", "--restart").splitlines()

    assert lines[0].startswith("would emit 90 of 120 documents to search: goes on after id 30, ")
    assert lines[1] == "first: document.updated of Document 31"
    assert again[:2] == ["would emit 120 documents to search", "first: document.updated of Document 1"]
    assert len(archive.ids()) == 30


def test_a_document_that_cannot_be_an_event_is_passed_over_and_named(archive: Archive) -> None:
    def document(row: Any) -> dict[str, Any]:
        return {"id": row.id, "title": b"bytes" if row.id in (3, 60) else row.title}

    done = run(archive, Source(sa.select(Document), document=document), batch=50)

    assert (done.done, done.skipped, done.refusals) == (118, 2, 2)
    assert [one.id for one in done.refused] == ["3", "60"]
    assert "$.title" in done.refused[0].reason
    assert archive.ids() == [number for number in range(1, 121) if number not in (3, 60)]


@pytest.mark.full
def test_memory_does_not_grow_with_documents(tmp_path: Path, migrated_database: Callable[[str], str]) -> None:
    project = Project(tmp_path)
    project.write("measure.py", MEASURE)
    peaks = []
    for count in (2_000, 20_000):
        url = migrated_database("sqlite")
        Archive(url, count)
        peaks.append(int(project.run(url, str(count), command=(sys.executable, "measure.py"))))

    # Ten times the documents: held all at once they would take far more than this.
    assert peaks[1] < peaks[0] * 1.5


MEASURE = """
import sys, tracemalloc
import sqlalchemy as sa
from relaybox import Destination, Outbox
from relaybox.search import Source, backfill

outbox = Outbox(sys.argv[1], destinations=[Destination("search", "console:")])
document = sa.table("document", sa.column("id", sa.Integer), sa.column("title", sa.String))
tracemalloc.start()
done = backfill(outbox, "search", Source(sa.select(document.c.id, document.c.title)), max_pending=None)
assert done.done == int(sys.argv[2]), done
print(tracemalloc.get_traced_memory()[1])
"""


async def test_some_are_read_by_their_ids_and_repaired(archive: Archive) -> None:
    async with open_rows(archive.outbox, DOCUMENTS) as rows:
        assert set(await rows.existing(["5", "7", "700", "x", "007"])) == {"5", "7"}
        assert await rows.emit_ids(["5", "700", "x"], repairs) == 3
        pages = [page async for page in rows.read(50, after=10)]

    emitted = [(id_, type_.removeprefix("document.")) for id_, type_, *_ in archive.events()]
    assert emitted == [("5", "updated"), ("700", "deleted"), ("x", "deleted")]
    assert [len(page) for page in pages] == [50, 50, 10]
    assert pages[0][0].key == 11


async def test_ids_that_are_uuids_are_keys(archive: Archive) -> None:
    metadata = sa.MetaData()
    table = sa.Table("thing", metadata, sa.Column("id", sa.Uuid, primary_key=True))
    metadata.create_all(archive.engine)
    ids = [UUID(int=number << 64 | 5) for number in range(1, 26)]
    with archive.engine.begin() as connection:
        connection.execute(table.insert(), [{"id": id_} for id_ in ids])
    source = Source(sa.select(table), aggregate_type="Thing")
    stopped = await abackfill(archive.outbox, "search", source, batch=10, stop=stop_after(2))

    done = await abackfill(archive.outbox, "search", source, batch=10)

    assert (stopped.done, done.resumed_from) == (20, str(ids[19]))
    assert [id_ for id_, *_ in archive.events()] == [str(id_) for id_ in ids]
