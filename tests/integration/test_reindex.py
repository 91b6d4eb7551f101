"""``relaybox reindex``: a new index takes the place of the old one, or nothing changes."""

from __future__ import annotations

import json
import signal
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa

from relaybox.indexing.reconcile import reconcile
from tests.integration.library import DOCUMENT, SOURCE, Library
from tests.integration.project import Project
from tests.servers import meilisearch

CONFIGURATION = """
[relaybox]
database = "{database}"

[destinations.search]
sink = "{sink}"
poll_interval = "50ms"
backoff = {{ base = "50ms", cap = "200ms" }}
max_attempts = 100

[[routes]]
events = "document.*"
to = "search"
"""
WORDS = ("reindex", "--destination", "search", "--source", "tests.integration.library:SOURCE", "--yes")


class Site:
    """An application, its configuration in a directory, and its commands."""

    def __init__(self, library: Library, place: Path) -> None:
        self.library = library
        self.building = f"{library.index}__building"
        root = Path(__file__).resolve().parents[2]
        self._stack = ExitStack()
        self._relaying, self._working = (self._project(place, name, root) for name in ("relaying", "working"))

    def _project(self, place: Path, name: str, root: Path) -> Project:
        directory = place / name
        directory.mkdir()
        project = Project(directory)
        project.environment["PYTHONPATH"] = str(root)
        library = self.library
        database = library.outbox.settings.database
        text = CONFIGURATION.format(database=database, sink=library.destination.sink)
        project.write("relaybox.toml", text)
        return project

    @contextmanager
    def relay(self) -> Iterator[subprocess.Popen[bytes]]:
        """A relay in a process of its own."""
        with self._relaying.running("relay") as process:
            yield process

    @contextmanager
    def reindexing(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A reindex in a process of its own."""
        with self._working.running(*WORDS, *arguments) as process:
            yield process

    def reindex(self, *arguments: str, status: int = 0) -> str:
        """A reindex to its end: standard output, or standard error where it failed."""
        return self._working.run(*WORDS, *arguments, status=status)

    def abort(self, *arguments: str) -> str:
        return self._working.run("reindex", "--destination", "search", "--abort", *arguments)

    def said(self) -> str:
        """What the one that runs, or ran, in the background has said so far."""
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
        """How the reindexes ended, oldest first."""
        operation = self.library.outbox.tables.operation
        found = sa.select(operation.c.state, operation.c.error).where(operation.c.action == "reindex")
        return [(row.state, row.error) for row in self.library.execute(found.order_by(operation.c.id))]


@pytest.fixture(scope="module")
def server() -> Iterator[meilisearch.Server]:
    with meilisearch.imitation() as started:
        yield started


@pytest.fixture
def site(
    request: pytest.FixtureRequest,
    fresh_database: Callable[[str], str],
    server: meilisearch.Server,
    tmp_path: Path,
) -> Site:
    index = f"documents_{uuid4().hex[:8]}"
    sink = meilisearch.destination_url(server, index).replace("://", f"://:{server.key}@")
    library = Library(fresh_database(getattr(request, "param", "sqlite")), sink, index)
    library.make()
    return Site(library, tmp_path)


@pytest.fixture
def filled(site: Site) -> Site:
    """With documents, and an index that has fallen behind."""
    library = site.library
    library.add(range(1, 301))
    library.outbox.drain()
    library.write(("7", None), ("9", {"id": 9, "title": "stale"}), ("1001", {"id": 1001}))
    return site


def assert_served(site: Site) -> None:
    """The index has what the database has, and nothing is left of the build."""
    assert site.library.present() == {site.library.index}
    assert site.library.indexed() == site.library.rows()
    assert not {"pending", "failed"} & set(site.library.statuses())
    assert reconcile(site.library.outbox, "search", SOURCE).consistency == 100.0


def assert_as_before(site: Site) -> None:
    """The old index serves what it served, and nothing is left of the build."""
    assert site.library.present() == {site.library.index}
    indexed = site.library.indexed()
    assert len(indexed) == 300
    assert indexed["9"] == {"id": 9, "title": "stale"}
    assert not {"pending", "failed"} & set(site.library.statuses())


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
            process.kill()
            process.wait()
        served = filled.library.indexed()
        assert len(served) in (300, len(filled.library.rows()))
        filled.reindex()
        filled.until_delivered()

    assert_served(filled)
    assert [state for state, _ in filled.operations()] == ["failed", "done"]


def test_what_one_that_was_killed_leaves_is_cleared_away_by_abort(filled: Site) -> None:
    with filled.reindexing() as process:
        filled.until_said("documents emitted")
        process.kill()
        process.wait()
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
    output = filled.reindex("--patience", "7s", status=1)

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
    with filled.reindexing() as process:
        filled.until_said("documents emitted")
        output = filled.reindex(status=1)
        assert "a reindex of 'search' is running" in output
        assert filled.building in filled.library.present()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 1

    assert "interrupted" in filled.complained()
    assert_as_before(filled)
    assert [state for state, _ in filled.operations()] == ["cancelled", "failed"]


def test_one_that_runs_is_ended_by_abort(filled: Site) -> None:
    with filled.reindexing() as process:
        filled.until_said("documents emitted")
        filled.abort()
        assert process.wait(60) == 1

    assert "it was cancelled" in filled.complained()
    assert_as_before(filled)


def test_an_engine_that_is_away_for_a_while_is_waited_for(filled: Site, server: meilisearch.Server) -> None:
    with filled.reindexing() as process:
        filled.until_said("documents emitted")
        server.stop()
        with filled.relay():
            server.start()
            assert process.wait(60) == 0, filled.complained()

    assert_served(filled)


def test_an_engine_that_stays_away_ends_it(filled: Site, server: meilisearch.Server) -> None:
    with filled.reindexing("--patience", "3s") as process:
        filled.until_said("documents emitted")
        server.stop()
        try:
            assert process.wait(60) == 1
        finally:
            server.start()

    assert "may be left behind" in filled.complained()
    filled.abort()
    assert_as_before(filled)


def test_a_document_that_is_refused_ends_it_with_the_reason(filled: Site) -> None:
    """And holds up nothing: the live events of that document go on."""
    library = filled.library
    library.execute(sa.insert(DOCUMENT).values(id=-5, title="fine in the table", pages=1))
    source = "tests.integration.library:CROOKED"
    with filled.relay():
        output = filled.reindex("--source", source, status=1)
        assert "was dropped while it was built, because it cannot have all documents: document -5: " in output
        assert "the aggregate's id '-5'" in output
        library.change(-5, title="goes on")
        filled.until_delivered()

    assert library.present() == {library.index}
    assert library.indexed()["-5"]["title"] == "goes on"
    assert "failed" not in library.statuses()


def test_a_document_that_is_refused_after_a_kill_holds_up_no_live_event(filled: Site) -> None:
    library = filled.library
    library.execute(sa.insert(DOCUMENT).values(id=-5, title="fine in the table", pages=1))
    with filled.reindexing("--source", "tests.integration.library:CROOKED") as process:
        filled.until_said("documents emitted")
        process.kill()
        process.wait()
    library.change(-5, title="goes on")
    with filled.relay():
        filled.until_delivered()

    assert library.present() == {library.index}
    assert library.indexed()["-5"]["title"] == "goes on"
    assert "failed" not in library.statuses()


@pytest.mark.parametrize("site", ["postgresql-18", "mariadb", "sqlite"], indirect=True)
def test_an_event_that_failed_before_is_named(filled: Site) -> None:
    library = filled.library
    with library.database.begin() as connection:
        emitted = library.outbox.emit(connection, "Document", 5, "document.updated", "no document")
    library.outbox.drain()

    with filled.relay():
        output = filled.reindex(status=1)

    assert f"document 5 waits behind an event that failed: see `relaybox why {emitted.event_id}`" in output
    assert library.present() == {library.index}
    assert library.statuses().count("failed") == 1
    assert "pending" not in library.statuses()


@pytest.mark.parametrize("then", ["dropped", "another"])
def test_an_index_that_is_not_the_one_it_builds_ends_it(filled: Site, then: str) -> None:
    library = filled.library
    with filled.reindexing() as process:
        filled.until_said("documents emitted")
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

    assert "1 of the documents cannot be events: document 8: " in output
    assert_as_before(filled)


def test_a_source_without_documents_empties_no_index(filled: Site) -> None:
    with filled.relay():
        output = filled.reindex("--source", "tests.integration.library:NOTHING", status=1)

    assert "the source has no documents" in output
    assert_as_before(filled)


def test_again_and_again_also_after_a_failure(filled: Site, server: meilisearch.Server) -> None:
    with filled.relay(), filled.reindexing("--every", "200ms") as process:
        filled.until(lambda: filled.said().count("serves 300 documents") >= 1)
        filled.library.ask(lambda engine: engine.drop(filled.building))
        filled.until(lambda: filled.said().count("serves 300 documents") >= 2)
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
    server.stop()
    try:
        away = filled.reindex("--dry-run", status=1)
    finally:
        server.start()

    assert "does not exist on 127.0.0.1" in missing
    assert missing.splitlines()[-1] == real.splitlines()[-1]
    assert away.startswith("relaybox: the search engine at 127.0.0.1")
    assert len(away.splitlines()) == 1


class Writers:
    """Threads that change documents, each its own, until they are stopped; 1 to 500 are never removed."""

    def __init__(self, library: Library, count: int) -> None:
        self._library = library
        self._stop = threading.Event()
        self._errors: list[BaseException] = []
        self.changes = 0
        self._threads = [threading.Thread(target=self._work, args=(at,)) for at in range(count)]

    def __enter__(self) -> Writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        assert self._errors == []

    def _work(self, at: int) -> None:
        turn = 0
        try:
            while not self._stop.wait(0.05):
                turn += 1
                own = 10_000 * (at + 1) + turn
                self._library.add([own])
                self._library.change(1 + (turn * 7 + at * 167) % 500, pages=turn)
                if turn % 3 == 0:
                    self._library.remove(own - 2)
                self.changes += 1
        except BaseException as error:
            self._errors.append(error)


class Reader:
    """A thread that looks for the documents 1 to 500 all the time."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.fewest = 10**9
        self.reads = 0
        self._errors: list[BaseException] = []

    def __enter__(self) -> Reader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert self._errors == []

    def _read(self) -> None:
        ids = [str(number) for number in range(1, 501)]

        async def read(engine: Any) -> None:
            while not self._stop.is_set():
                found = await engine.get(self._library.index, ids)
                count = await engine.count(self._library.index)
                self.fewest = min(self.fewest, len(found), count)
                self.reads += 1

        try:
            self._library.ask(read)
        except BaseException as error:
            self._errors.append(error)


def rebuilt_under_traffic(site: Site) -> None:
    """Two reindexes, one after the other, while others write and read."""
    library = site.library
    library.add(range(1, 501))
    library.outbox.drain()
    library.write(("100000", {"id": 100000}))
    library.ask(lambda engine: engine.refresh(library.index))
    with site.relay(), Reader(library) as reader:
        with Writers(library, 3) as writers:
            site.until(lambda: reader.reads > 3 and writers.changes > 20)
            for _ in range(2):
                site.reindex("--batch", "50")
                during = reconcile(library.outbox, "search", SOURCE)
                assert (during.differences, during.consistency) == (0, 100.0), during
        site.until_delivered()

    assert reader.fewest >= 500
    assert_served(site)


@pytest.mark.parametrize("site", ["postgresql-18", "sqlite"], indirect=True)
def test_meilisearch_under_traffic_has_all_documents_all_the_time(site: Site) -> None:
    rebuilt_under_traffic(site)


def test_algolia_under_traffic_has_all_documents_all_the_time(
    fresh_database: Callable[[str], str], algolia_url: str, tmp_path: Path
) -> None:
    index = f"documents_{uuid4().hex[:8]}"
    address, _, query = algolia_url.partition("?")
    library = Library(fresh_database("sqlite"), f"{address.rstrip('/')}/{index}?{query}", index)
    library.make()

    rebuilt_under_traffic(Site(library, tmp_path))


@pytest.fixture
def opensearch_site(fresh_database: Callable[[str], str], opensearch_url: str, tmp_path: Path) -> Site:
    index = f"documents_{uuid4().hex[:8]}"
    library = Library(fresh_database("postgresql-18"), f"{opensearch_url}/{index}", index)
    library.make()
    return Site(library, tmp_path)


def test_opensearch_under_traffic_has_all_documents_all_the_time(opensearch_site: Site) -> None:
    rebuilt_under_traffic(opensearch_site)


def test_an_index_that_refuses_what_the_old_one_takes_is_given_up(opensearch_site: Site) -> None:
    """The live event arrives all the same."""
    site, library = opensearch_site, opensearch_site.library
    library.add(range(1, 51))
    library.outbox.drain()
    url = library.destination.sink.rpartition("/")[0].replace("opensearch://", "http://")
    # Before those of the build, which could else all arrive, and the index serve, before this one.
    with library.database.begin() as connection:
        library.outbox.emit(connection, "Document", 5, "document.updated", {"id": 5, "color": "red"})
    with site.reindexing() as process:
        site.until_said("documents emitted")
        body = json.dumps({"dynamic": "strict"}).encode()
        kind = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/{site.building}/_mapping", body, kind, method="PUT")
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert answer.status == 200
        with site.relay():
            assert process.wait(60) == 1
            site.until_delivered()

    assert "was dropped while it was built, because it cannot have all documents: document 5: " in (
        site.complained()
    )
    assert "strict" in site.complained()
    assert library.present() == {library.index}
    assert library.indexed()["5"] == {"id": 5, "color": "red"}
    assert "failed" not in library.statuses()
