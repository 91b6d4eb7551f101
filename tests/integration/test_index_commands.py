"""What the commands about search indexes say before they do anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import typer
from typer.testing import CliRunner

from relaybox.cli import app
from tests.integration.library import Library
from tests.servers import meilisearch

CONFIGURATION = """
[relaybox]
database = "{database}"

[destinations.search]
sink = "{sink}"
"""

Command = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def server() -> Iterator[meilisearch.Server]:
    with meilisearch.imitation() as started:
        yield started


@pytest.fixture
def library(fresh_database: Callable[[str], str], server: meilisearch.Server) -> Library:
    index = f"documents_{uuid4().hex[:8]}"
    sink = meilisearch.destination_url(server, index).replace("://", f"://:{server.key}@")
    made = Library(fresh_database("sqlite"), sink, index)
    made.make()
    return made


@pytest.fixture
def command(library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    database = library.outbox.settings.database
    text = CONFIGURATION.format(database=database, sink=library.destination.sink)
    (tmp_path / "relaybox.toml").write_text(text)
    monkeypatch.chdir(tmp_path)
    for name in ("DATABASE_URL", "RELAYBOX_DATABASE", "RELAYBOX_CONFIG"):
        monkeypatch.delenv(name, raising=False)

    def run(name: str, source: str, *arguments: str) -> tuple[int, str]:
        words = [name, "--destination", "search", "--source", f"tests.integration.library:{source}"]
        done = CliRunner().invoke(app, [*words, *arguments])
        return done.exit_code, done.output

    return run


def test_a_dry_backfill_names_what_the_index_would_refuse(library: Library, command: Command) -> None:
    library.add([-2, 1, 2])
    before = library.statuses()

    status, output = command("backfill", "CROOKED", "--dry-run")

    assert status == 1
    assert "would emit 3 documents to search" in output
    assert "the document -2 would be refused by the destination: the document's 'id' is 0" in output
    assert '{"id":0,' in output
    assert library.statuses() == before
    answered = json.loads(command("backfill", "SOURCE", "--dry-run", "--json")[1])
    assert (answered["refused"], answered["first"]["aggregate_id"]) == ([], "-2")


def test_a_dry_backfill_names_what_cannot_be_an_event(library: Library, command: Command) -> None:
    library.add([1, 2])
    library.change(2, pages=13)

    status, output = command("backfill", "BROKEN", "--dry-run")

    assert status == 1
    assert '{"id":1,"pages":1}' in output
    assert "the document 2 cannot be an event: $.pages" in output


@pytest.mark.parametrize("name", ["backfill", "reindex"])
@pytest.mark.parametrize(("rate", "status"), [("500", 0), ("500/s", 0), ("0", 2), ("500/d", 2)])
def test_a_rate_has_one_grammar(command: Command, name: str, rate: str, status: int) -> None:
    answered, output = command(name, "SOURCE", "--dry-run", "--rate", rate)

    assert answered == status
    assert ("--rate" in output) == (status == 2)


def test_backfill_tells_its_own_exit_status() -> None:
    told = CliRunner().invoke(app, ["backfill", "--help"]).output

    assert "0 all documents are emitted" in told
    assert "fingerprint" not in told


def test_who_is_asked_about_a_reindex_learns_what_is_rebuilt(
    library: Library, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def confirm(question: str) -> None:
        asked.append(question)
        raise typer.Exit(1)

    monkeypatch.setattr("relaybox.cli.reindex.confirm", confirm)
    library.add([1, 2])

    assert command("reindex", "SOURCE")[0] == 1

    assert asked == [f"rebuild the index {library.index} of search from 2 documents?"]
