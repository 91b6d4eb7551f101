"""``relaybox reconcile``: what the index has against what the database has."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from relaybox import Event
from relaybox.cli import app
from relaybox.errors import ConfigError, UnknownDestination
from relaybox.indexing.failure import EngineFailed
from relaybox.indexing.reconcile import reconcile
from relaybox.indexing.source import Source
from relaybox.sinks.meilisearch import MeilisearchEngine
from tests.integration.library import DOCUMENT, SOURCE, Library
from tests.servers import meilisearch

KINDS = ["postgresql-18", "mariadb", "sqlite"]


@pytest.fixture(scope="module")
def server() -> Iterator[meilisearch.Server]:
    with meilisearch.imitation() as started:
        yield started


@pytest.fixture
def library(
    request: pytest.FixtureRequest, fresh_database: Callable[[str], str], server: meilisearch.Server
) -> Library:
    return opened(fresh_database(getattr(request, "param", "sqlite")), server)


def opened(database: str, server: meilisearch.Server, path: str | None = None, **options: Any) -> Library:
    index = f"documents_{uuid4().hex[:8]}"
    sink = meilisearch.destination_url(server, path or index).replace("://", f"://:{server.key}@")
    library = Library(database, sink, index, **options)
    library.make()
    return library


def refusing(event: Event) -> dict[str, Any] | None:
    """A document function: what has no pages is not searched, and page 13 cannot be."""
    if event.payload["pages"] == 13:
        raise ValueError("unlucky")
    return {"name": event.payload["title"]} if event.payload["pages"] else None


def made(event: Event) -> dict[str, Any]:
    """A document with whatever JSON knows."""
    numbers = {"whole": 2.0, "half": 0.5, "large": 2**53 + 1, "negative": -0.0}
    others = {"tags": ["a", None, "b"], "good": True, "nothing": None, "empty": {}, "none": []}
    return {**event.payload, "numbers": numbers, **others}


MADE = {"document": made}


@pytest.mark.parametrize("library", KINDS, indirect=True)
def test_an_index_that_has_what_the_database_has_is_consistent(library: Library) -> None:
    library.add(range(1, 1201))
    library.outbox.drain()

    result = reconcile(library.outbox, "search", SOURCE)

    assert (result.documents, result.matched, result.differences, result.in_flight) == (1200, 1200, 0, 0)
    assert result.consistency == 100.0
    assert result.examples == ()


@pytest.mark.parametrize("library", KINDS, indirect=True)
def test_every_kind_of_difference_is_found_and_repaired_through_the_outbox(library: Library) -> None:
    library.add(range(1, 1001))
    library.outbox.drain()
    library.write(("7", None), ("1001", {"id": 1001}), ("x-1", {"id": "x-1"}))
    library.execute(sa.update(DOCUMENT).where(DOCUMENT.c.id == 9).values(pages=3, title="another"))
    library.execute(sa.delete(DOCUMENT).where(DOCUMENT.c.id == 11))
    before = len(library.statuses())

    found = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert (found.documents, found.matched, found.missing, found.stale, found.orphaned) == (999, 997, 1, 1, 3)
    assert found.consistency == 99.5
    assert found.repaired == 5
    kinds = {(one.kind, one.id): one.fields for one in found.examples}
    assert kinds == {
        ("missing", "7"): (),
        ("stale", "9"): ("pages", "title"),
        ("orphaned", "11"): (),
        ("orphaned", "1001"): (),
        ("orphaned", "x-1"): (),
    }
    assert library.statuses()[before:] == ["pending"] * 5
    library.outbox.drain()
    assert library.indexed() == library.rows()
    assert reconcile(library.outbox, "search", SOURCE).consistency == 100.0


@pytest.mark.parametrize("engine", ["opensearch_url", "algolia_url"])
def test_other_engines_give_documents_back_as_they_were_written(
    engine: str, request: pytest.FixtureRequest, fresh_database: Callable[[str], str]
) -> None:
    """Also numbers that are no integers for them, texts of any script, and what is nested."""
    index = f"documents_{uuid4().hex[:8]}"
    sink = f"{request.getfixturevalue(engine).rstrip('/')}"
    library = Library(fresh_database("sqlite"), _with_index(sink, index), index, options=MADE)
    library.make()
    library.add(range(1, 41), "Grüße, 你好 \U0001f600")
    library.outbox.drain()
    assert reconcile(library.outbox, "search", SOURCE).consistency == 100.0
    library.write(("3", None), ("4", {"id": 4, "title": "stale"}), ("1001", {"id": 1001}))

    found = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert (found.missing, found.stale, found.orphaned) == (1, 1, 1)
    library.outbox.drain()
    assert reconcile(library.outbox, "search", SOURCE).consistency == 100.0


def _with_index(sink: str, index: str) -> str:
    address, mark, query = sink.partition("?")
    return f"{address.rstrip('/')}/{index}{mark}{query}"


def test_repairs_say_that_they_are_and_are_on_record(library: Library) -> None:
    library.add([1])
    library.outbox.drain()
    library.write(("1", None))

    reconcile(library.outbox, "search", SOURCE, repair=True, actor="ann")

    event, audit = library.outbox.tables.event, library.outbox.tables.audit
    [row] = library.execute(sa.select(event.c.headers, event.c.event_type).where(event.c.status == "pending"))
    assert row.headers["relaybox-repair"] == "reconcile"
    assert row.event_type == "document.updated"
    [noted] = library.execute(sa.select(audit.c.actor, audit.c.action, audit.c.details))
    assert (noted.actor, noted.action) == ("ann", "reconcile")
    details = noted.details
    assert (details["missing"], details["repaired"], details["consistency"]) == (1, 1, 0.0)


def test_a_difference_whose_event_is_under_way_is_told_apart(library: Library) -> None:
    library.add([1, 2, 3])
    library.outbox.drain()
    library.change(1, title="changed")
    library.remove(2)
    library.add([4])

    result = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert (result.in_flight, result.differences, result.repaired) == (3, 0, 0)
    assert (result.documents, result.matched) == (3, 1)
    assert result.consistency == 100.0


def test_a_difference_that_is_gone_at_the_second_look_does_not_count(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event arrives between the two looks."""
    from relaybox.stores.undelivered import Undelivered

    library.add([1, 2])
    library.outbox.drain()
    library.write(("1", None))
    arrived = Undelivered.of_documents

    async def meanwhile(self: Undelivered, *words: Any) -> Any:
        answer = await arrived(self, *words)
        from relaybox.engine import Change
        from relaybox.parts import open_engine

        engine = open_engine(library.destination)
        await engine.write(library.index, [Change("1", library.rows()["1"], 1)])
        await engine.close()
        return answer

    monkeypatch.setattr(Undelivered, "of_documents", meanwhile)

    result = reconcile(library.outbox, "search", SOURCE)

    assert (result.matched, result.differences, result.in_flight) == (2, 0, 0)


def test_a_document_that_changes_during_the_second_look_is_under_way(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    from relaybox.stores.undelivered import Undelivered

    library.add([1])
    library.outbox.drain()
    library.write(("1", {"id": 1, "title": "older", "pages": 1}))
    asked = Undelivered.of_documents

    async def meanwhile(self: Undelivered, *words: Any) -> Any:
        answer = await asked(self, *words)
        library.change(1, title="newer")
        return answer

    monkeypatch.setattr(Undelivered, "of_documents", meanwhile)

    result = reconcile(library.outbox, "search", SOURCE)

    assert (result.in_flight, result.differences) == (1, 0)


def test_a_failed_event_is_named_also_where_others_wait_behind_it(library: Library) -> None:
    library.add([1, 2])
    library.outbox.drain()
    with library.database.begin() as connection:
        library.outbox.emit(connection, "Document", 1, "document.updated", "no document")
    library.outbox.drain()
    library.change(1, title="waits behind it")

    result = reconcile(library.outbox, "search", SOURCE)

    event = library.outbox.tables.event
    [failed] = library.execute(sa.select(event.c.id).where(event.c.status == "failed"))
    [stale] = result.examples
    assert (stale.kind, stale.id, stale.fields) == ("stale", "1", ("title",))
    assert str(stale.failed).replace("-", "") == str(failed.id).replace("-", "")


def test_nothing_is_emitted_behind_a_failed_event(
    library: Library, command: Callable[..., tuple[int, str]]
) -> None:
    """It would be parked, and so would the one of every later repair."""
    library.add([1, 2, 3])
    library.outbox.drain()
    with library.database.begin() as connection:
        library.outbox.emit(connection, "Document", 1, "document.updated", "no document")
    library.outbox.drain()
    library.execute(sa.update(DOCUMENT).where(DOCUMENT.c.id < 3).values(title="changed"))

    told = command("--repair", "--dry-run")[1]
    result = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert "would have emitted 1 events" in told
    assert (result.stale, result.blocked, result.repaired) == (2, 1, 1)
    [blocked] = [one for one in result.examples if one.blocked]
    assert f"1 wait behind a failed event: `relaybox why {blocked.failed}`, then retry or discard it" in told
    assert sorted(library.statuses()) == [*["delivered"] * 3, "failed", "pending"]


def test_a_failed_event_that_holds_nothing_up_does_not_keep_its_document_from_repair(
    fresh_database: Callable[[str], str], server: meilisearch.Server
) -> None:
    library = opened(fresh_database("sqlite"), server, on_failed="skip")
    library.add([1])
    with library.database.begin() as connection:
        library.outbox.emit(connection, "Document", 1, "document.updated", "no document")
    library.outbox.drain()
    library.execute(sa.update(DOCUMENT).values(title="changed"))

    result = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert (result.stale, result.blocked, result.repaired) == (1, 0, 1)
    library.outbox.drain()
    assert library.indexed() == library.rows()


def test_documents_are_compared_as_the_document_function_makes_them(
    fresh_database: Callable[[str], str], server: meilisearch.Server
) -> None:
    options = {"document": refusing, "id_field": "key"}
    library = opened(fresh_database("sqlite"), server, options=options)
    library.add([1, 2, 3])
    library.outbox.drain()
    library.execute(sa.update(DOCUMENT).where(DOCUMENT.c.id == 2).values(pages=0))
    library.execute(sa.insert(DOCUMENT).values(id=4, title="hidden", pages=0))
    library.execute(sa.insert(DOCUMENT).values(id=5, title="bad", pages=13))

    result = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert (result.documents, result.matched, result.missing, result.orphaned) == (3, 2, 1, 1)
    assert result.repaired == 1
    told = {one.id: (one.kind, one.refused) for one in result.examples}
    assert told["2"] == ("orphaned", None)
    kind, refused = told["5"]
    assert kind == "missing"
    assert "unlucky" in str(refused)
    library.outbox.drain()
    assert sorted(library.indexed()) == ["1", "3"]
    assert "failed" not in library.statuses()


@pytest.mark.parametrize("documents", ["list", "function"])
def test_an_iterable_is_compared_without_locks(library: Library, documents: str) -> None:
    library.add(range(1, 8))
    library.outbox.drain()
    library.write(("3", None), ("stranger", {"id": "stranger"}))
    read = list(library.rows().values())
    source = Source(read if documents == "list" else lambda: iter(read))

    result = reconcile(library.outbox, "search", source, repair=True)

    assert (result.documents, result.matched, result.missing, result.orphaned) == (7, 6, 1, 1)
    library.outbox.drain()
    assert library.indexed() == library.rows()


def test_an_id_that_the_engine_gives_twice_is_one_difference(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages move while others write to the index."""
    library.write(("stranger", {"id": "stranger"}))

    async def scan(self: MeilisearchEngine, index: str) -> AsyncIterator[list[str]]:
        yield ["stranger", "stranger"]

    monkeypatch.setattr(MeilisearchEngine, "scan", scan)

    result = reconcile(library.outbox, "search", SOURCE, repair=True, allow_empty=True)

    assert (result.orphaned, result.repaired, len(result.examples)) == (1, 1, 1)


@pytest.mark.parametrize("action", ["index", "ignore"])
def test_an_orphan_that_no_event_deletes_is_left_and_the_option_named(
    fresh_database: Callable[[str], str], server: meilisearch.Server, action: str
) -> None:
    """Else a document of nothing but its id would be written."""
    options = {"actions": {"document.deleted": action}}
    library = opened(fresh_database("sqlite"), server, options=options)
    library.write(("7", {"id": 7, "title": "an orphan"}))

    assert reconcile(library.outbox, "search", SOURCE).orphaned == 1
    with pytest.raises(ConfigError, match=f"'document.deleted' it does {action}, and deletes nothing"):
        reconcile(library.outbox, "search", SOURCE, repair=True, allow_empty=True)

    assert library.statuses() == []


def test_an_index_for_each_tenant_has_to_be_named(
    fresh_database: Callable[[str], str], server: meilisearch.Server
) -> None:
    library = opened(fresh_database("sqlite"), server, path="{tenant}-documents")
    library.execute(sa.insert(DOCUMENT).values(id=1, title="one", pages=1))

    with pytest.raises(ConfigError, match="an index for each tenant: say which one is meant with --index"):
        reconcile(library.outbox, "search", SOURCE)
    result = reconcile(library.outbox, "search", SOURCE, index=library.index, repair=True)

    assert (result.index, result.missing, result.repaired) == (library.index, 1, 1)
    library.outbox.drain()
    assert library.indexed() == library.rows()


def test_an_index_that_does_not_exist_is_an_error(library: Library) -> None:
    with pytest.raises(EngineFailed, match=r"the index 'nowhere' does not exist on 127\.0\.0\.1"):
        reconcile(library.outbox, "search", SOURCE, index="nowhere")


def test_a_destination_that_is_no_search_index_is_refused(library: Library) -> None:
    with pytest.raises(UnknownDestination, match="did you mean 'search'"):
        reconcile(library.outbox, "serach", SOURCE)


CONFIGURATION = """
[relaybox]
database = "{database}"

[destinations.search]
sink = "{sink}"

[[routes]]
events = "document.*"
to = "search"
"""


@pytest.fixture
def command(
    library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[int, str]]:
    database = library.outbox.settings.database
    (tmp_path / "relaybox.toml").write_text(
        CONFIGURATION.format(database=database, sink=library.destination.sink)
    )
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE_URL", "RELAYBOX_DATABASE", "RELAYBOX_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> tuple[int, str]:
        words = ["--destination", "search", "--source", "tests.integration.library:SOURCE"]
        done = CliRunner().invoke(app, ["reconcile", *words, *arguments])
        return done.exit_code, done.output

    return run


def test_the_command_says_how_consistent_the_index_is(
    library: Library, command: Callable[..., tuple[int, str]]
) -> None:
    library.add([1, 2, 3, 4])
    library.outbox.drain()
    status, output = command()
    assert (status, output.splitlines()[-1]) == (0, "search consistency 100.00 %")

    library.execute(sa.update(DOCUMENT).where(DOCUMENT.c.id == 2).values(title="changed"))
    library.write(("3", None))
    status, output = command("--repair", "--dry-run")

    assert status == 1
    assert "stale 2: title" in output
    assert "missing 3\n" in output
    assert "search consistency 50.00 %" in output
    assert "would have emitted 2 events" in output
    assert "pending" not in library.statuses()


def test_the_command_repairs_and_answers_in_json(
    library: Library, command: Callable[..., tuple[int, str]]
) -> None:
    library.add([1, 2])
    library.outbox.drain()
    library.write(("1", None), ("2", None))

    status, output = command("--repair", "--json", "--limit-report", "1", "--rate", "1000")

    result = json.loads(output)
    assert status == 1
    assert (result["missing"], result["repaired"], result["consistency"]) == (2, 2, 0.0)
    assert result["examples"] == [
        {"kind": "missing", "id": "1", "fields": [], "failed": None, "refused": None, "blocked": False}
    ]
    library.outbox.drain()
    assert command()[0] == 0


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_source_without_documents_does_not_empty_the_index(
    library: Library, command: Callable[..., tuple[int, str]], dry: tuple[str, ...]
) -> None:
    """A condition that is wrong looks as if everything had been deleted."""
    library.add([1, 2, 3])
    library.outbox.drain()
    nothing = ("--source", "tests.integration.library:NOTHING")

    status, output = command(*nothing, "--repair", *dry)

    assert status == 2
    assert "the source has no documents: to repair would delete all 3 of the index" in output
    assert len(output.splitlines()) == 1
    assert library.statuses() == ["delivered"] * 3
    assert command(*nothing)[0] == 1

    assert command(*nothing, "--repair", "--yes", *dry)[0] == 1

    library.outbox.drain()
    assert len(library.indexed()) == (3 if dry else 0)


def test_where_all_is_under_way_nothing_is_called_consistent(
    library: Library, command: Callable[..., tuple[int, str]]
) -> None:
    assert command()[0] == 0
    library.add([1, 2])

    status, output = command()

    assert status == 1
    assert output.splitlines()[-2:] == [
        "nothing could be compared: all that differs is under way; does a relay run?",
        "search consistency 0.00 %",
    ]


@pytest.mark.parametrize(
    ("rate", "status", "told"),
    [("500", 0, "100.00 %"), ("0.5/s", 0, "100.00 %"), ("fast", 2, "--rate = 'fast'")],
)
def test_a_rate_is_a_number_with_or_without_its_unit(
    command: Callable[..., tuple[int, str]], rate: str, status: int, told: str
) -> None:
    answered, output = command("--rate", rate)

    assert answered == status
    assert told in output


def test_an_engine_that_is_away_is_one_line_and_status_2(
    library: Library, command: Callable[..., tuple[int, str]], server: meilisearch.Server
) -> None:
    server.fault(requests=({"status": 503, "count": 100, "on": ""},))
    try:
        status, output = command()
    finally:
        server.fault()

    assert status == 2
    assert output.startswith("relaybox: the search engine at 127.0.0.1")
    assert len(output.splitlines()) == 1
