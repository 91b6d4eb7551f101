"""``relaybox reindex``: a new index takes the place of the old one, or nothing changes."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox.core.outcome import Unavailable
from relaybox.errors import StoreError
from relaybox.search._reconcile import reconcile
from relaybox.search._reindex import aabort, areindex
from relaybox.search.meilisearch.engine import MeilisearchEngine
from relaybox.search.reindex_operation import Leftovers, ReindexFailed, alone
from relaybox.search.results import Reindexed
from relaybox.search.workspace import open_records
from relaybox.stores.sql.ledger.journal import SqlJournal
from tests.databases import KINDS
from tests.integration.library import DOCUMENT, SOURCE, Library, key_in_url
from tests.integration.project import Project
from tests.servers import meilisearch
from tests.waiting import await_for, wait_for

pytestmark = pytest.mark.full

WORDS = ("reindex", "--destination", "search", "--source", "tests.integration.library:SOURCE", "--yes")


class Site:
    """An application, its configuration in a directory, and its commands."""

    def __init__(self, library: Library, place: Path) -> None:
        self.library = library
        self.building = f"{library.index}__building"
        self._relaying, self._working = (self._project(place / name) for name in ("relaying", "working"))

    def _project(self, directory: Path) -> Project:
        directory.mkdir()
        project = Project(directory)
        project.environment["PYTHONPATH"] = str(Path(__file__).resolve().parents[2])
        project.write("relaybox.toml", self.library.configuration())
        return project

    def relay(self) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Run a relay in a process of its own."""
        return self._relaying.running("relay")

    def reindexing(self, *arguments: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        """Run a reindex in a process of its own."""
        return self._working.running(*WORDS, *arguments)

    @contextmanager
    def emitted(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a reindex that has emitted its events, which no relay sends yet."""
        with self.reindexing(*arguments) as process:
            self.until_said("documents emitted")
            yield process

    def reindex(self, *arguments: str, status: int = 0) -> str:
        """Run a reindex to its end: standard output, or standard error where it failed."""
        return self._working.run(*WORDS, *arguments, status=status)

    def abort(self, *arguments: str) -> str:
        return self._working.run("reindex", "--destination", "search", "--abort", *arguments)

    def said(self) -> str:
        """Return what the one that runs, or ran, in the background has said so far."""
        return self._working.read("out")

    def complained(self) -> str:
        return self._working.read("log")

    def until(self, reached: Callable[[], bool]) -> None:
        self._working.until(reached)

    def until_said(self, words: str) -> None:
        self.until(lambda: words in self.said())

    def until_delivered(self) -> None:
        self.until(lambda: "pending" not in self.library.statuses())

    def operations(self) -> list[tuple[str, str | None]]:
        """Return how the reindexes ended, oldest first."""
        operation = self.library.outbox.tables.operation
        found = sa.select(operation.c.state, operation.c.error).where(operation.c.action == "reindex")
        return [(row.state, row.error) for row in self.library.execute(found.order_by(operation.c.id))]


def end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[meilisearch.Server]:
    with meilisearch.imitation() as started:
        yield started


@contextmanager
def stopped(server: meilisearch.Server) -> Iterator[None]:
    server.stop()
    try:
        yield
    finally:
        server.start()


@pytest.fixture
def site(
    request: pytest.FixtureRequest,
    migrated_database: Callable[[str], str],
    server: meilisearch.Server,
    tmp_path: Path,
) -> Site:
    database = migrated_database(getattr(request, "param", "sqlite"))
    return Site(Library(database, key_in_url(server)), tmp_path)


@pytest.fixture
def filled(site: Site) -> Site:
    """Fill the library, and let the index fall behind."""
    site.library.fill(range(1, 301))
    site.library.write(("7", None), ("9", {"id": 9, "title": "stale"}), ("1001", {"id": 1001}))
    return site


def assert_served(site: Site) -> None:
    """Check that the index has what the database has, and that nothing is left of the build."""
    assert site.library.present() == {site.library.index}
    assert site.library.indexed() == site.library.rows()
    assert not {"pending", "failed"} & set(site.library.statuses())
    assert reconcile(site.library.outbox, "search", SOURCE).consistency == 100.0


def assert_as_before(site: Site) -> None:
    """Check that the old index serves what it served, and that nothing is left of the build."""
    assert site.library.present() == {site.library.index}
    indexed = site.library.indexed()
    assert len(indexed) == 300
    assert indexed["9"] == {"id": 9, "title": "stale"}
    assert not {"pending", "failed"} & set(site.library.statuses())


@pytest.mark.fast
@pytest.mark.parametrize("site", ["mariadb", "sqlite"], indirect=True)
def test_a_new_index_takes_the_place_of_the_old_one(filled: Site) -> None:
    with filled.relay():
        output = filled.reindex()

    assert_served(filled)
    building = filled.building
    steps = [f"creating {building}", "reading the database", "300 documents emitted"]
    steps += [f"comparing {building} with the database", f"{building} takes the place of"]
    at = [output.index(step) for step in steps]
    assert at == sorted(at)
    assert "serves 300 documents" in output.splitlines()[-1]
    assert filled.operations() == [("done", None)]
    audit = filled.library.outbox.tables.audit
    [noted] = filled.library.execute(sa.select(audit.c.details).where(audit.c.action == "reindex"))
    assert noted.details["documents"] == 300


@pytest.mark.parametrize(
    "step", ["creating", "reading the database", "documents emitted", "comparing", "takes the place"]
)
def test_one_that_is_killed_leaves_the_old_index_and_the_next_clears_up(filled: Site, step: str) -> None:
    with filled.relay():
        with filled.reindexing() as process:
            filled.until_said(step)
            end(process)
        # The engine may be about to put the new one in its place.
        filled.until(lambda: len(filled.library.indexed()) == 300)
        filled.reindex()
        filled.until_delivered()

    assert_served(filled)
    assert [state for state, _ in filled.operations()] == ["failed", "done"]


def test_what_one_that_was_killed_leaves_is_cleared_away_by_abort(filled: Site) -> None:
    with filled.emitted() as process:
        end(process)
    assert filled.building in filled.library.present()
    before = filled.library.statuses()

    would = filled.abort("--dry-run")

    assert would.splitlines() == [
        f"would drop {filled.building}",
        f"would discard 300 events for {filled.building}",
        "search: 1 would be ended",
    ]
    assert filled.building in filled.library.present()
    assert filled.library.statuses() == before
    assert [state for state, _ in filled.operations()] == ["running"]

    output = filled.abort()

    assert "nothing is left of a build" in output
    assert_as_before(filled)


def test_without_a_relay_it_says_so_and_gives_up(filled: Site) -> None:
    output = filled.reindex("--patience", "1s", status=1)

    assert "no relay runs: start one with `relaybox relay`" in output
    assert_as_before(filled)
    [(state, error)] = filled.operations()
    assert state == "failed"
    assert "no relay runs" in str(error)


def test_a_relay_that_comes_late_is_waited_for(filled: Site) -> None:
    with filled.reindexing() as process:
        filled.until_said("waiting for 300 events: no relay runs")
        with filled.relay():
            assert process.wait(60) == 0

    assert_served(filled)


def test_two_at_once_are_refused_and_one_that_is_interrupted_clears_up(filled: Site) -> None:
    with filled.emitted() as process:
        output = filled.reindex(status=1)
        assert "a reindex of 'search' is running" in output
        assert filled.building in filled.library.present()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1

    assert "interrupted" in filled.complained()
    assert_as_before(filled)
    assert [state for state, _ in filled.operations()] == ["cancelled", "failed"]


def test_one_that_runs_is_ended_by_abort(filled: Site) -> None:
    with filled.emitted() as process:
        filled.abort()
        assert process.wait(60) == 1

    assert "it was cancelled" in filled.complained()
    assert_as_before(filled)


def test_an_engine_that_is_away_for_a_while_is_waited_for(filled: Site, server: meilisearch.Server) -> None:
    with filled.emitted() as process:
        server.stop()
        with filled.relay():
            server.start()
            assert process.wait(60) == 0, filled.complained()

    assert_served(filled)


def test_an_engine_that_stays_away_ends_it(filled: Site, server: meilisearch.Server) -> None:
    with filled.emitted("--patience", "1s") as process, stopped(server):
        assert process.wait(60) == 1

    assert "may be left behind" in filled.complained()
    filled.abort()
    assert_as_before(filled)


CROOKED = ("--source", "tests.integration.library:CROOKED")


def assert_goes_on(library: Library) -> None:
    """Check that the live events of a document that the build could not take arrive."""
    assert library.present() == {library.index}
    assert library.indexed()["-5"]["title"] == "goes on"
    assert "failed" not in library.statuses()


def test_a_document_that_is_refused_ends_it_with_the_reason(filled: Site) -> None:
    """And holds up nothing: the live events of that document go on."""
    library = filled.library
    library.execute(sa.insert(DOCUMENT).values(id=-5, title="fine in the table", pages=1))
    with filled.relay():
        output = filled.reindex(*CROOKED, status=1)
        assert "was dropped while it was built, because it cannot have all documents: document -5: " in output
        assert "the aggregate's id '-5'" in output
        library.change(-5, title="goes on")
        filled.until_delivered()

    assert_goes_on(library)


def test_a_document_that_is_refused_after_a_kill_holds_up_no_live_event(filled: Site) -> None:
    library = filled.library
    library.execute(sa.insert(DOCUMENT).values(id=-5, title="fine in the table", pages=1))
    with filled.emitted(*CROOKED) as process:
        end(process)
    library.change(-5, title="goes on")
    with filled.relay():
        filled.until_delivered()

    assert_goes_on(library)


@pytest.mark.parametrize("site", KINDS, indirect=True)
def test_an_event_that_failed_before_is_named(filled: Site) -> None:
    library = filled.library
    emitted = library.emit_bad(5)
    library.outbox.drain()

    with filled.relay():
        output = filled.reindex(status=1)

    assert f"document 5 waits behind an event that failed: see `relaybox why {emitted}`" in output
    assert library.present() == {library.index}
    assert library.statuses().count("failed") == 1
    assert "pending" not in library.statuses()


@pytest.mark.parametrize("then", ["dropped", "another"])
def test_an_index_that_is_not_the_one_it_builds_ends_it(filled: Site, then: str) -> None:
    library = filled.library
    with filled.emitted() as process:
        library.ask(lambda engine: engine.drop(filled.building))
        if then == "another":
            library.ask(lambda engine: engine.create(filled.building))
        assert process.wait(60) == 1

    if then == "another":
        assert "no longer the index that this reindex created" in filled.complained()
        assert library.present() == {library.index, filled.building}
        filled.abort()
    else:
        assert "was dropped while it was built" in filled.complained()
    assert_as_before(filled)


def test_a_document_that_can_be_no_event_ends_it_with_the_reason(filled: Site) -> None:
    filled.library.execute(sa.update(DOCUMENT).where(DOCUMENT.c.id == 8).values(pages=13))
    output = filled.reindex("--source", "tests.integration.library:BROKEN", status=1)

    assert "cannot emit events for 1 of the documents: document 8: " in output
    assert_as_before(filled)


def test_a_source_without_documents_empties_no_index(filled: Site) -> None:
    with filled.relay():
        output = filled.reindex("--source", "tests.integration.library:NOTHING", status=1)

    assert "the source has no documents" in output
    assert_as_before(filled)


def test_again_and_again_also_after_a_failure(filled: Site) -> None:
    with filled.relay(), filled.reindexing("--every", "200ms") as process:
        filled.until_said("serves 300 documents")
        filled.library.ask(lambda engine: engine.drop(filled.building))
        # After up to three whole reindexes, each of which waits for the relays more than once.
        wait_for(lambda: filled.said().count("serves 300 documents") >= 2, filled.complained, 180)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 1

    assert filled.library.present() == {filled.library.index}
    filled.library.outbox.drain()
    assert_served(filled)


def test_again_and_again_begins_with_no_wrong_setting(filled: Site) -> None:
    output = filled.reindex("--every", "1h", "--destination", "serach", status=2)

    assert "did you mean 'search'" in output


def test_the_new_index_can_be_like_another_one(filled: Site, server: meilisearch.Server) -> None:
    library, other = filled.library, f"{filled.library.index}_other"
    library.ask(lambda engine: engine.create(other))
    server.ask("PATCH", f"/indexes/{other}/settings", {"searchableAttributes": ["title"]})

    def settings(index: str) -> Any:
        return server.ask("GET", f"/indexes/{index}/settings")["searchableAttributes"]

    filled.until(lambda: bool(settings(other) == ["title"]))
    with filled.relay():
        assert "like = 'nowhere': there is no such index" in filled.reindex("--like", "nowhere", status=1)
        filled.reindex("--like", other)

    assert settings(library.index) == ["title"]
    assert_served(filled)


def test_a_dry_run_changes_nothing(filled: Site) -> None:
    output = filled.reindex("--dry-run")

    assert output == f"would have rebuilt {filled.library.index} from 300 documents\n"
    assert filled.operations() == []
    assert_as_before(filled)


def test_a_dry_run_is_refused_as_the_real_one_is(filled: Site, server: meilisearch.Server) -> None:
    filled.library.ask(lambda engine: engine.drop(filled.library.index))

    missing = filled.reindex("--dry-run", status=1)
    real = filled.reindex(status=1)
    with stopped(server):
        away = filled.reindex("--dry-run", status=1)

    assert "does not exist on 127.0.0.1" in missing
    assert missing.splitlines()[-1] == real.splitlines()[-1]
    assert away.startswith("relaybox: the search engine at 127.0.0.1")
    assert len(away.splitlines()) == 1


class Traffic:
    """Threads that write and read until the end of the block; documents 1 to 500 are never removed."""

    def __init__(self, library: Library, writers: int) -> None:
        self._library = library
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self.changes = self.reads = 0
        self.fewest = 10**9
        works = [self._read, *(partial(self._write, at) for at in range(writers))]
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)
        assert self._errors == []

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._errors.append(error)

    def _write(self, at: int) -> None:
        """Change documents, each writer its own."""
        turn = 0
        while not self._stop.wait(0.05):
            turn += 1
            own = 10_000 * (at + 1) + turn
            self._library.add([own])
            self._library.change(1 + (turn * 7 + at * 167) % 500, pages=turn)
            if turn % 3 == 0:
                self._library.remove(own - 2)
            self.changes += 1

    def _read(self) -> None:
        """Look for the documents 1 to 500 all the time."""
        ids = [str(number) for number in range(1, 501)]

        async def read(engine: Any) -> None:
            while not self._stop.is_set():
                found = await engine.get(self._library.index, ids)
                count = await engine.count(self._library.index)
                self.fewest = min(self.fewest, len(found), count)
                self.reads += 1

        self._library.ask(read)


def rebuilt_under_traffic(site: Site) -> None:
    """Two reindexes, one after the other, while others write and read."""
    library = site.library
    library.fill(range(1, 501))
    library.write(("100000", {"id": 100000}))
    library.ask(lambda engine: engine.refresh(library.index))
    with site.relay():
        with Traffic(library, 3) as traffic:
            site.until(lambda: traffic.reads > 3 and traffic.changes > 20)
            for _ in range(2):
                site.reindex("--batch", "50")
                during = reconcile(library.outbox, "search", SOURCE)
                assert (during.differences, during.consistency) == (0, 100.0), during
        site.until_delivered()

    assert traffic.fewest >= 500
    assert_served(site)


@pytest.mark.parametrize("site", ["postgresql-18", "sqlite"], indirect=True)
def test_meilisearch_under_traffic_has_all_documents_all_the_time(site: Site) -> None:
    rebuilt_under_traffic(site)


@pytest.fixture
def elsewhere(
    request: pytest.FixtureRequest, migrated_database: Callable[[str], str], tmp_path: Path
) -> Site:
    """Use another search engine than Meilisearch."""
    kind, engine = request.param
    return Site(Library(migrated_database(kind), request.getfixturevalue(f"{engine}_url")), tmp_path)


@pytest.mark.parametrize("elsewhere", [("sqlite", "algolia"), ("postgresql-18", "opensearch")], indirect=True)
def test_other_engines_under_traffic_have_all_documents_all_the_time(elsewhere: Site) -> None:
    rebuilt_under_traffic(elsewhere)


@pytest.mark.parametrize("elsewhere", [("postgresql-18", "opensearch")], indirect=True)
def test_an_index_that_refuses_what_the_old_one_takes_is_given_up(elsewhere: Site) -> None:
    """The live event arrives all the same."""
    site, library = elsewhere, elsewhere.library
    library.fill(range(1, 51))
    url = library.destination.sink.rpartition("/")[0].replace("opensearch://", "http://")
    # Before those of the build, which could else all arrive, and the index serve, before this one.
    with library.database.begin() as connection:
        library.outbox.emit(connection, "Document", 5, "document.updated", {"id": 5, "color": "red"})
    with site.emitted() as process:
        body = json.dumps({"dynamic": "strict"}).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/{site.building}/_mapping", body, kind, method="PUT")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200
        with site.relay():
            assert process.wait(60) == 1
            site.until_delivered()

    complained = site.complained()
    assert "was dropped while it was built, because it cannot have all documents: document 5: " in complained
    assert "strict" in complained
    assert library.present() == {library.index}
    assert library.indexed()["5"] == {"id": 5, "color": "red"}
    assert "failed" not in library.statuses()


@pytest.fixture
def library(migrated_database: Callable[[str], str], server: meilisearch.Server) -> Library:
    library = Library(migrated_database("sqlite"), key_in_url(server))
    library.fill(range(1, 31))
    library.write(("7", None), ("1001", {"id": 1001}))
    return library


def rebuild(library: Library, **options: Any) -> Reindexed:
    async def main() -> Reindexed:
        async with library.outbox.relay():
            return await areindex(library.outbox, "search", SOURCE, **options)

    return asyncio.run(main())


def operations(library: Library) -> list[str]:
    operation = library.outbox.tables.operation
    found = sa.select(operation.c.state).where(operation.c.action == "reindex")
    return [row.state for row in library.execute(found)]


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide unmarked builds, as Algolia does: they exist, but must not be written to."""
    present = MeilisearchEngine.present

    async def hiding(self: MeilisearchEngine, names: Sequence[str]) -> Mapping[str, str]:
        found = await present(self, names)
        return {name: one for name, one in found.items() if not name.endswith("__building")}

    monkeypatch.setattr(MeilisearchEngine, "present", hiding)


def test_a_reindex_that_serves_did_not_fail(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    async def replace(self: MeilisearchEngine, live: str, fresh: str) -> None:
        await self._swap(live, fresh)
        raise Unavailable("the old one is not dropped")

    monkeypatch.setattr(MeilisearchEngine, "replace", replace)

    assert rebuild(library).documents == 30
    assert library.indexed() == library.rows()
    assert library.present() == {library.index}
    assert operations(library) == ["done"]


def test_a_database_that_is_down_after_the_swap_is_not_a_failure(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def sweep(self: Leftovers) -> None:
        raise StoreError("the database is away")

    monkeypatch.setattr(Leftovers, "sweep", sweep)

    assert rebuild(library).documents == 30
    assert library.indexed() == library.rows()
    assert operations(library) == ["done"]
    assert "may be left behind (the database is away)" in caplog.text


def test_it_gives_signs_of_life_while_it_replaces(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = library.outbox.tables.operation
    replace = MeilisearchEngine.replace
    seen: set[Any] = set()

    def has_beaten() -> bool:
        [[at]] = library.execute(sa.select(operation.c.updated_at).where(operation.c.action == "reindex"))
        seen.add(at)
        return len(seen) == 3

    async def slow(self: MeilisearchEngine, live: str, fresh: str) -> None:
        await await_for(has_beaten)
        await replace(self, live, fresh)

    monkeypatch.setattr(MeilisearchEngine, "replace", slow)

    assert rebuild(library).documents == 30


def test_a_replacement_ends_though_the_reindex_is_cancelled_twice(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace = MeilisearchEngine.replace
    replacing, going_on = asyncio.Event(), asyncio.Event()

    async def slow(self: MeilisearchEngine, live: str, fresh: str) -> None:
        replacing.set()
        await going_on.wait()
        await replace(self, live, fresh)

    async def main() -> None:
        async with library.outbox.relay():
            rebuilding = asyncio.ensure_future(areindex(library.outbox, "search", SOURCE))
            await replacing.wait()
            for _ in range(2):
                rebuilding.cancel()
                await asyncio.sleep(0.1)
            going_on.set()
            await asyncio.wait([rebuilding])
            assert rebuilding.cancelled()

    monkeypatch.setattr(MeilisearchEngine, "replace", slow)
    asyncio.run(main())

    assert library.indexed() == library.rows()
    assert library.present() == {library.index}
    assert operations(library) == ["cancelled"]


async def ended_badly(library: Library, end: Callable[[asyncio.Task[None]], object]) -> None:
    """Begin a reindex, and end it when it has begun."""
    begun = asyncio.Event()

    async def work() -> None:
        async with open_records(library.outbox, "ann") as records, alone(records, "ann", "search", {}):
            begun.set()
            await asyncio.Event().wait()

    working = asyncio.create_task(work())
    await begun.wait()
    end(working)
    await asyncio.wait([working])


def test_how_it_ended_is_on_record_though_it_was_cancelled_twice(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = SqlJournal.finish

    def end(working: asyncio.Task[None]) -> None:
        async def cancelled_again(*arguments: Any) -> None:
            working.cancel()
            await asyncio.sleep(0)
            await finish(*arguments)

        monkeypatch.setattr(SqlJournal, "finish", cancelled_again)
        working.cancel()

    asyncio.run(ended_badly(library, end))
    assert operations(library) == ["cancelled"]


def test_how_it_ended_is_on_record_though_the_database_was_away(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, away = SqlJournal.finish, iter([True])

    async def away_at_first(*arguments: Any) -> None:
        if next(away, False):
            raise StoreError("server closed the connection")
        await finish(*arguments)

    monkeypatch.setattr(SqlJournal, "finish", away_at_first)
    asyncio.run(ended_badly(library, asyncio.Task.cancel))
    assert operations(library) == ["cancelled"]


def test_one_whose_creation_is_not_seen_is_dropped(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    create = MeilisearchEngine.create

    async def interrupted(self: MeilisearchEngine, name: str, *, like: str | None = None) -> None:
        await create(self, name, like=like)
        raise Unavailable("the answer was lost")

    with monkeypatch.context() as patch:
        hide(patch)
        patch.setattr(MeilisearchEngine, "create", interrupted)
        with pytest.raises(ReindexFailed, match="the answer was lost"):
            rebuild(library)
    assert library.present() == {library.index}
    assert "7" not in library.indexed()


def test_one_that_is_hidden_is_cleared_away(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.ask(lambda engine: engine.create(f"{library.index}__building"))
    with monkeypatch.context() as patch:
        hide(patch)
        assert asyncio.run(aabort(library.outbox, "search")) == 0
    assert library.present() == {library.index}


def test_a_backfill_that_is_cancelled_ends_it(library: Library) -> None:
    async def main() -> None:
        rebuilding = asyncio.ensure_future(areindex(library.outbox, "search", SOURCE, rate=1, batch=1))
        async with open_records(library.outbox, "operator") as records:

            async def begun() -> list[Any]:
                known = await records.admin.journal.operations(10)
                return [one for one in known if one.action == "backfill" and one.done]

            [backfill] = await await_for(begun)
            await records.admin.cancel(backfill.id)
        with pytest.raises(ReindexFailed, match="its backfill was cancelled"):
            await rebuilding

    asyncio.run(main())
    assert library.present() == {library.index}
    assert not {"pending", "failed"} & set(library.statuses())
