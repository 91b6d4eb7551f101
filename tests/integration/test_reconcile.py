"""``relaybox reconcile``, and what the other commands about search indexes say before they do anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import typer
from typer.testing import CliRunner

from relaybox import Event
from relaybox.cli import app
from relaybox.errors import ConfigError, UnknownDestination
from relaybox.search._reconcile import reconcile
from relaybox.search.engine import EngineFailed
from relaybox.search.meilisearch.engine import MeilisearchEngine
from relaybox.search.source import Source
from relaybox.stores.sql.undelivered import Undelivered
from tests.databases import KINDS
from tests.integration.library import DOCUMENT, SOURCE, Command, Library, command_of, key_in_url
from tests.servers import meilisearch

Make = Callable[..., Library]
Meanwhile = Callable[[Callable[[], Any]], None]


@pytest.fixture(scope="module")
def server() -> Iterator[meilisearch.Server]:
    with meilisearch.imitation() as started:
        yield started


@pytest.fixture
def make(migrated_database: Callable[[str], str], server: meilisearch.Server) -> Make:
    """Makes a library on SQLite, or another kind of database."""
    return lambda kind="sqlite", **options: Library(migrated_database(kind), key_in_url(server), **options)


@pytest.fixture
def library(request: pytest.FixtureRequest, make: Make) -> Library:
    return make(getattr(request, "param", "sqlite"))


@pytest.fixture
def command(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return command_of(library, tmp_path, monkeypatch)


def refusing(event: Event) -> dict[str, Any] | None:
    """Return the document of an event; without pages there is none, and page 13 raises."""
    if event.payload["pages"] == 13:
        raise ValueError("unlucky")
    return {"name": event.payload["title"]} if event.payload["pages"] else None


def made(event: Event) -> dict[str, Any]:
    """Return a document with every kind of value that JSON has."""
    numbers = {"whole": 2.0, "half": 0.5, "large": 2**53 + 1, "negative": -0.0}
    others = {"tags": ["a", None, "b"], "good": True, "nothing": None, "empty": {}, "none": []}
    return {**event.payload, "numbers": numbers, **others}


MADE = {"document": made}


@pytest.mark.parametrize("library", KINDS, indirect=True)
def test_an_index_that_has_what_the_database_has_is_consistent(library: Library) -> None:
    library.fill(range(1, 1201))

    result = reconcile(library.outbox, "search", SOURCE)

    assert (result.documents, result.matched, result.differences, result.in_flight) == (1200, 1200, 0, 0)
    assert result.consistency == 100.0
    assert result.examples == ()


@pytest.mark.parametrize("library", KINDS, indirect=True)
def test_every_kind_of_difference_is_found_and_repaired_through_the_outbox(library: Library) -> None:
    library.fill(range(1, 1001))
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
    engine: str, request: pytest.FixtureRequest, migrated_database: Callable[[str], str]
) -> None:
    """Also numbers that are no integers for them, texts of any script, and what is nested."""
    library = Library(migrated_database("sqlite"), request.getfixturevalue(engine), options=MADE)
    library.fill(range(1, 41), "Grüße, 你好 \U0001f600")
    assert reconcile(library.outbox, "search", SOURCE).consistency == 100.0
    library.write(("3", None), ("4", {"id": 4, "title": "stale"}), ("1001", {"id": 1001}))

    found = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert (found.missing, found.stale, found.orphaned) == (1, 1, 1)
    library.outbox.drain()
    assert reconcile(library.outbox, "search", SOURCE).consistency == 100.0


def test_repairs_say_that_they_are_and_are_on_record(library: Library) -> None:
    library.fill([1])
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


def test_a_difference_whose_event_is_under_way_is_counted_apart(library: Library) -> None:
    library.fill([1, 2, 3])
    library.change(1, title="changed")
    library.remove(2)
    library.add([4])

    result = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert (result.in_flight, result.differences, result.repaired) == (3, 0, 0)
    assert (result.documents, result.matched) == (3, 1)
    assert result.consistency == 100.0


@pytest.fixture
def between_looks(monkeypatch: pytest.MonkeyPatch) -> Meanwhile:
    """Has something happen between the two looks of a comparison."""
    asked = Undelivered.of_documents

    def happens(what: Callable[[], Any]) -> None:
        async def meanwhile(self: Undelivered, *words: Any) -> Any:
            answer = await asked(self, *words)
            await asyncio.to_thread(what)
            return answer

        monkeypatch.setattr(Undelivered, "of_documents", meanwhile)

    return happens


def test_what_matches_at_the_second_look_does_not_differ(library: Library, between_looks: Meanwhile) -> None:
    """The event arrives between the two looks."""
    library.fill([1, 2])
    library.write(("1", None))
    between_looks(lambda: library.write(("1", library.rows()["1"])))

    result = reconcile(library.outbox, "search", SOURCE)

    assert (result.matched, result.differences, result.in_flight) == (2, 0, 0)


def test_a_document_that_changes_meanwhile_is_under_way(library: Library, between_looks: Meanwhile) -> None:
    library.fill([1])
    library.write(("1", {"id": 1, "title": "older", "pages": 1}))
    between_looks(lambda: library.change(1, title="newer"))

    result = reconcile(library.outbox, "search", SOURCE)

    assert (result.in_flight, result.differences) == (1, 0)


def test_a_failed_event_is_named_also_where_others_wait_behind_it(library: Library) -> None:
    library.fill([1, 2])
    library.emit_bad(1)
    library.outbox.drain()
    library.change(1, title="waits behind it")

    result = reconcile(library.outbox, "search", SOURCE)

    event = library.outbox.tables.event
    [failed] = library.execute(sa.select(event.c.id).where(event.c.status == "failed"))
    [stale] = result.examples
    assert (stale.kind, stale.id, stale.fields) == ("stale", "1", ("title",))
    assert str(stale.failed).replace("-", "") == str(failed.id).replace("-", "")


def test_nothing_is_emitted_behind_a_failed_event(library: Library, command: Command) -> None:
    """It would be parked, and so would the one of every later repair."""
    library.fill([1, 2, 3])
    library.emit_bad(1)
    library.outbox.drain()
    library.execute(sa.update(DOCUMENT).where(DOCUMENT.c.id < 3).values(title="changed"))

    output = command("reconcile", "--repair", "--dry-run")[1]
    result = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert "would have emitted 1 events" in output
    assert (result.stale, result.blocked, result.repaired) == (2, 1, 1)
    [blocked] = [one for one in result.examples if one.blocked]
    assert (
        f"1 wait behind a failed event: `relaybox why {blocked.failed}`, then retry or discard it" in output
    )
    assert sorted(library.statuses()) == [*["delivered"] * 3, "failed", "pending"]


def test_a_failed_event_that_holds_nothing_up_does_not_keep_its_document_from_repair(make: Make) -> None:
    library = make(on_failed="skip")
    library.add([1])
    library.emit_bad(1)
    library.outbox.drain()
    library.execute(sa.update(DOCUMENT).values(title="changed"))

    result = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert (result.stale, result.blocked, result.repaired) == (1, 0, 1)
    library.outbox.drain()
    assert library.indexed() == library.rows()


def test_documents_are_compared_as_the_document_function_makes_them(make: Make) -> None:
    options = {"document": refusing, "id_field": "key"}
    library = make(options=options)
    library.fill([1, 2, 3])
    library.execute(sa.update(DOCUMENT).where(DOCUMENT.c.id == 2).values(pages=0))
    library.execute(sa.insert(DOCUMENT).values(id=4, title="hidden", pages=0))
    library.execute(sa.insert(DOCUMENT).values(id=5, title="bad", pages=13))

    result = reconcile(library.outbox, "search", SOURCE, repair=True)

    assert (result.documents, result.matched, result.missing, result.orphaned) == (3, 2, 1, 1)
    assert result.repaired == 1
    kinds = {one.id: (one.kind, one.refused) for one in result.examples}
    assert kinds["2"] == ("orphaned", None)
    kind, refused = kinds["5"]
    assert kind == "missing"
    assert "unlucky" in str(refused)
    library.outbox.drain()
    assert sorted(library.indexed()) == ["1", "3"]
    assert "failed" not in library.statuses()


@pytest.mark.parametrize("documents", ["list", "function"])
def test_an_iterable_is_compared_without_locks(library: Library, documents: str) -> None:
    library.fill(range(1, 8))
    library.write(("3", None), ("stranger", {"id": "stranger"}))
    read = list(library.rows().values())
    source = Source(read if documents == "list" else lambda: iter(read))

    result = reconcile(library.outbox, "search", source, repair=True)

    assert (result.documents, result.matched, result.missing, result.orphaned) == (7, 6, 1, 1)
    library.outbox.drain()
    assert library.indexed() == library.rows()


def test_an_id_given_twice_is_one_difference(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages move while others write to the index."""
    library.write(("stranger", {"id": "stranger"}))

    async def scan(self: MeilisearchEngine, index: str) -> AsyncIterator[list[str]]:
        yield ["stranger", "stranger"]

    monkeypatch.setattr(MeilisearchEngine, "scan", scan)

    result = reconcile(library.outbox, "search", SOURCE, repair=True, allow_empty=True)

    assert (result.orphaned, result.repaired, len(result.examples)) == (1, 1, 1)


@pytest.mark.parametrize("action", ["index", "ignore"])
def test_an_orphan_that_no_event_deletes_is_left_and_the_option_named(make: Make, action: str) -> None:
    """Else a document of nothing but its id would be written."""
    options = {"actions": {"document.deleted": action}}
    library = make(options=options)
    library.write(("7", {"id": 7, "title": "an orphan"}))

    assert reconcile(library.outbox, "search", SOURCE).orphaned == 1
    with pytest.raises(ConfigError, match=f"'document.deleted' it does {action}, and deletes nothing"):
        reconcile(library.outbox, "search", SOURCE, repair=True, allow_empty=True)

    assert library.statuses() == []


def test_an_index_for_each_tenant_has_to_be_named(make: Make) -> None:
    library = make(path="{tenant}-documents")
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


def test_a_destination_that_is_not_a_search_index_is_refused(library: Library) -> None:
    with pytest.raises(UnknownDestination, match="did you mean 'search'"):
        reconcile(library.outbox, "serach", SOURCE)


def test_the_command_says_how_consistent_the_index_is(library: Library, command: Command) -> None:
    library.fill([1, 2, 3, 4])
    status, output = command("reconcile")
    assert (status, output.splitlines()[-1]) == (0, "search consistency 100.00 %")

    library.execute(sa.update(DOCUMENT).where(DOCUMENT.c.id == 2).values(title="changed"))
    library.write(("3", None))
    status, output = command("reconcile", "--repair", "--dry-run")

    assert status == 1
    assert "stale 2: title" in output
    assert "missing 3\n" in output
    assert "search consistency 50.00 %" in output
    assert "would have emitted 2 events" in output
    assert "pending" not in library.statuses()


def test_the_command_repairs_and_answers_in_json(library: Library, command: Command) -> None:
    library.fill([1, 2])
    library.write(("1", None), ("2", None))

    status, output = command("reconcile", "--repair", "--json", "--limit-report", "1", "--rate", "1000")

    result = json.loads(output)
    assert status == 1
    assert (result["missing"], result["repaired"], result["consistency"]) == (2, 2, 0.0)
    assert result["examples"] == [
        {"kind": "missing", "id": "1", "fields": [], "failed": None, "refused": None, "blocked": False}
    ]
    library.outbox.drain()
    assert command("reconcile")[0] == 0


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_source_without_documents_does_not_empty_the_index(
    library: Library, command: Command, dry: tuple[str, ...]
) -> None:
    """With a wrong condition it looks as if everything had been deleted."""
    library.fill([1, 2, 3])

    status, output = command("reconcile", "--repair", *dry, source="NOTHING")

    assert status == 2
    assert "the source has no documents: to repair would delete all 3 of the index" in output
    assert len(output.splitlines()) == 1
    assert library.statuses() == ["delivered"] * 3
    assert command("reconcile", source="NOTHING")[0] == 1

    assert command("reconcile", "--repair", "--yes", *dry, source="NOTHING")[0] == 1

    library.outbox.drain()
    assert len(library.indexed()) == (3 if dry else 0)


def test_where_all_is_under_way_nothing_is_called_consistent(library: Library, command: Command) -> None:
    assert command("reconcile")[0] == 0
    library.add([1, 2])

    status, output = command("reconcile")

    assert status == 1
    assert output.splitlines()[-2:] == [
        "nothing could be compared: all that differs is under way; does a relay run?",
        "search consistency 0.00 %",
    ]


@pytest.mark.parametrize("name", ["backfill", "reindex", "reconcile"])
@pytest.mark.parametrize(
    ("rate", "status"), [("500", 0), ("0.5/s", 0), ("500/s", 0), ("0", 2), ("500/d", 2), ("fast", 2)]
)
def test_a_rate_has_one_grammar(command: Command, name: str, rate: str, status: int) -> None:
    answered, output = command(name, "--dry-run", "--rate", rate)

    assert answered == status
    assert (f"--rate = '{rate}" in output) == (status == 2)


def test_a_dry_backfill_names_what_the_index_would_refuse(library: Library, command: Command) -> None:
    library.add([-2, 1, 2])
    before = library.statuses()

    status, output = command("backfill", "--dry-run", source="CROOKED")

    assert status == 1
    assert "would emit 3 documents to search" in output
    assert "the document -2 would be refused by the destination: the document's 'id' is 0" in output
    assert '{"id":0,' in output
    assert library.statuses() == before
    answered = json.loads(command("backfill", "--dry-run", "--json")[1])
    assert (answered["refused"], answered["first"]["aggregate_id"]) == ([], "-2")


def test_a_dry_backfill_names_what_cannot_be_an_event(library: Library, command: Command) -> None:
    library.add([1, 2])
    library.change(2, pages=13)

    status, output = command("backfill", "--dry-run", source="BROKEN")

    assert status == 1
    assert '{"id":1,"pages":1}' in output
    assert "the document 2 cannot be an event: $.pages" in output


def test_backfill_tells_its_own_exit_status() -> None:
    output = CliRunner().invoke(app, ["backfill", "--help"]).output

    assert "0 all documents are emitted" in output
    assert "fingerprint" not in output


def test_the_question_before_a_reindex_says_what_is_rebuilt(
    library: Library, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def confirm(question: str) -> None:
        asked.append(question)
        raise typer.Exit(1)

    monkeypatch.setattr("relaybox.cli.search.confirm", confirm)
    library.add([1, 2])

    assert command("reindex")[0] == 1

    assert asked == [f"rebuild the index {library.index} of search from 2 documents?"]


def test_an_engine_that_is_down_is_reported_in_one_line(command: Command, server: meilisearch.Server) -> None:
    server.fault(requests=({"status": 503, "count": 100, "on": ""},))
    try:
        status, output = command("reconcile")
    finally:
        server.fault()

    assert status == 2
    assert output.startswith("relaybox: the search engine at 127.0.0.1")
    assert len(output.splitlines()) == 1
