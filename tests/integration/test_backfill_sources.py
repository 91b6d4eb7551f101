"""What a backfill takes for a source, what it refuses, and what the command says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.orm import aliased

from relaybox.errors import ConfigError, RelayboxError, StoreError, UnknownDestination
from relaybox.search import Source, abackfill
from relaybox.search.select_rows import SelectRows
from tests.databases import KINDS
from tests.integration.backfilling import DOCUMENTS, Archive, Author, Document, make_project, run, stop_after


@pytest.fixture
def small(migrated_database: Callable[[str], str]) -> Archive:
    return Archive(migrated_database("sqlite"), 10)


def letters() -> Iterator[dict[str, str]]:
    for letter in "abcdefg":
        yield {"id": letter, "title": letter.upper()}


async def async_letters() -> AsyncIterator[dict[str, str]]:
    for letter in letters():
        yield letter


@pytest.mark.parametrize("documents", [letters, async_letters, list(letters()), letters()])
def test_what_can_be_iterated_is_read_page_by_page(
    small: Archive, documents: Any, caplog: pytest.LogCaptureFixture
) -> None:
    done = run(small, Source(documents), batch=3)

    assert done.done == 7
    assert [id_ for id_, *_ in small.events()] == [*"abcdefg"]
    assert "may be overwritten with older ones" in caplog.text


def test_an_iterable_goes_on_after_as_many(small: Archive, caplog: pytest.LogCaptureFixture) -> None:
    assert run(small, Source(letters), batch=3, stop=stop_after(1)).done == 3

    done = run(small, Source(letters), batch=3)

    assert (done.resumed_from, done.done) == (3, 7)
    assert "passes over the first 3 documents" in caplog.text
    assert [id_ for id_, *_ in small.events()] == [*"abcdefg"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_application_emits_meanwhile_is_left_out_of_an_iterable(
    kind: str, migrated_database: Callable[[str], str]
) -> None:
    archive = Archive(migrated_database(kind), 10)

    def documents() -> Iterator[dict[str, Any]]:
        for number in range(1, 11):
            if number == 5:
                with archive.engine.begin() as connection:
                    archive.change(connection, 9, "new")
            yield {"id": number, "title": "old"}

    done = run(archive, Source(documents), batch=2)

    assert (done.done, done.skipped) == (9, 1)
    assert archive.indexed()["9"] == "new"
    assert run(archive, Source(documents, event_type="document.seen"), batch=2).skipped == 1


OTHER = aliased(Document)
WRONG: dict[str, tuple[Any, str]] = {
    "order by": (sa.select(Document).order_by(Document.title), "has ORDER BY; leave it out"),
    "limit": (sa.select(Document).limit(3), "has LIMIT; leave it out"),
    "distinct": (sa.select(Document.id).distinct(), "has DISTINCT"),
    "group by": (sa.select(Document.id).group_by(Document.id), "has GROUP BY"),
    "union": (sa.union(sa.select(Document.id), sa.select(Author.id)), "give one select of a table"),
    "no id": (sa.select(Document.title), "no column 'id'.*Source\\(id=…\\)"),
    "expression": (sa.select((Document.id + 1).label("id")), "name a column of a table"),
    "subquery": (sa.select(sa.select(Document.id).subquery()), "name a column of a table"),
    "two entities": (sa.select(Document, Author), "an entity and more"),
    "several rows": (sa.select(Document.id, OTHER.title).join(OTHER, OTHER.id <= 2), "several rows of '1'"),
    "no table": (sa.select(sa.table("nowhere", sa.column("id")).c.id), "the select cannot be executed"),
    "no mapping": ([1, 2], "document 1 has no 'id'"),
    "id is null": ([{"id": None}], "document 1 has no 'id'"),
    "id is a list": ([{"id": [1]}], "must be an integer, a text, a UUID or a time"),
    "number": (lambda: 5, "are of type int"),
    "raises": (lambda: (1 / 0 for _ in "a"), "cannot be read on after 0 documents: ZeroDivisionError"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_a_source_is_refused(small: Archive, name: str) -> None:
    documents, expected = WRONG[name]

    with pytest.raises(RelayboxError, match=expected):
        run(small, Source(documents))

    assert small.events() == []


def test_rows_without_an_id_are_refused(small: Archive) -> None:
    table = sa.table("document", sa.column("id"), sa.column("author_id", sa.Integer))
    with small.engine.begin() as connection:
        connection.exec_driver_sql("CREATE TABLE nulls (number INTEGER)")
        connection.exec_driver_sql("INSERT INTO nulls VALUES (1), (NULL)")
    nulls = sa.table("nulls", sa.column("number", sa.Integer))

    with pytest.raises(ConfigError, match="number is null in some rows"):
        run(small, Source(sa.select(nulls.c.number), id="number"))
    assert run(small, Source(sa.select(table.c.id))).done == 10


def test_a_destination_that_is_not_known_is_refused(small: Archive) -> None:
    with pytest.raises(UnknownDestination, match="did you mean 'search'"):
        asyncio.run(abackfill(small.outbox, "serach", DOCUMENTS))


def test_the_command_tells_what_it_does(tmp_path: Path, small: Archive) -> None:
    project = make_project(tmp_path, small)
    words = ("backfill", "--destination", "search", "--source")

    dry = project.run(*words, "shop:documents", "--dry-run")
    assert dry.splitlines() == [
        "would emit 10 documents to search",
        "first: document.updated of Document 1",
        '{"id":1,"title":"title 1"}',
    ]
    assert project.run(*words, "shop:documents") == "emitted 10 documents to search\n"
    report = json.loads(
        project.run(*words, "shop:letters", "--json", "--aggregate-type", "Letter", "--rate", "500/s")
    )
    assert (report["done"], report["total"], report["refused"]) == (3, 3, [])
    assert small.events()[-1][:2] == ("c", "letter.updated")
    refused = project.run(*words, "shop:odd", status=1)
    assert "the document 2 cannot be an event: $.data" in refused


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("shop:documents", "--destination", "serach"), "did you mean 'search'?"),
        (("shop:document_s",), "did you mean 'documents'?"),
        (("nowhere:documents",), "there is no module 'nowhere'"),
        (("shop",), "it is not module:name"),
        (("shop:nothing",), "it is of type int; give a select"),
        (("shop:Chapter",), "it is a class; give its documents: sa.select(Chapter)"),
        (("shop:Source",), "it is a class; give a select"),
        (("shop:documents", "--rate", "fast"), "--rate = 'fast'"),
    ],
)
def test_the_command_names_mistakes(
    tmp_path: Path, small: Archive, words: tuple[str, ...], expected: str
) -> None:
    project = make_project(tmp_path, small)

    message = project.run("backfill", "--destination", "search", "--source", *words, status=2)

    assert expected in message
    assert len(message.splitlines()) == 1
    assert small.events() == []


def test_one_lambda_does_not_go_on_where_another_was_interrupted(small: Archive) -> None:
    books = Source(lambda: [{"id": number} for number in range(5)], aggregate_type="Book")
    films = Source(lambda: [{"id": number} for number in range(5)], aggregate_type="Film")
    assert run(small, books, batch=2, stop=stop_after(1)).done == 2

    assert (run(small, films).done, run(small, books).resumed_from) == (5, 2)


def test_a_table_that_cannot_be_counted_in_time_is_backfilled(
    small: Archive, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def count(_: SelectRows) -> int:
        raise StoreError("canceling statement due to statement timeout")

    monkeypatch.setattr(SelectRows, "count", count)

    done = run(small)

    assert (done.done, done.total) == (10, None)
    assert "the documents cannot be counted: canceling statement" in caplog.text
