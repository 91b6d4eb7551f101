"""What may be a source, and what the events of its documents are called."""

from __future__ import annotations

import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from relaybox.errors import ConfigError, InvalidField
from relaybox.indexing import Source, load_source
from relaybox.indexing.rows import as_id, as_key, from_key
from relaybox.indexing.source import as_source

SELECT: sa.Select[Any] = sa.select(sa.column("id"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = ModuleType("searched")
    monkeypatch.setitem(sys.modules, "searched", made)
    return made


@pytest.mark.parametrize("found", [SELECT, [{"id": 1}], (one for one in "ab"), lambda: [5], Source(SELECT)])
def test_what_may_be_a_source_is_made_into_one(module: Any, found: Any) -> None:
    module.documents = found

    source = load_source("searched:documents")

    assert source.name == "searched:documents"
    assert source.documents is (found.documents if isinstance(found, Source) else found)


@pytest.mark.parametrize("found", [5, "text", b"bytes", {"id": 1}, None, dict])
def test_what_cannot_be_a_source_is_refused(module: Any, found: Any) -> None:
    module.documents = found

    with pytest.raises(
        ConfigError, match=r"^source = 'searched:documents': it is (of type .*|a class); give a select"
    ):
        load_source("searched:documents")


def test_a_name_that_is_nowhere_is_told(module: Any) -> None:
    module.documents = SELECT

    with pytest.raises(ConfigError, match="did you mean 'documents'"):
        load_source("searched:document")
    with pytest.raises(ConfigError, match="there is no module 'serched'"):
        load_source("serched:documents")


@pytest.mark.parametrize(
    ("source", "entity", "types"),
    [
        (Source([]), None, ("Document", "document.updated")),
        (Source([]), "Order", ("Order", "order.updated")),
        (Source([], aggregate_type="Page"), "Order", ("Page", "page.updated")),
        (Source([], event_type="page.seen"), "Order", ("Order", "page.seen")),
    ],
)
def test_the_types_follow_from_the_class(source: Source, entity: str | None, types: tuple[str, str]) -> None:
    assert source.types(entity) == types


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(InvalidField, match=r"Source\.id"):
        Source([], id="")
    with pytest.raises(InvalidField, match=r"Source\.event_type"):
        Source([], event_type="x" * 101)
    with pytest.raises(ConfigError, match="give a function"):
        Source([], document="title")  # type: ignore[arg-type]


def test_a_document_that_cannot_be_made_names_its_id() -> None:
    broken = Source([], document=lambda row: {"title": row["nothing"]})
    with pytest.raises(ConfigError, match=r"the document of 7 cannot be made: KeyError: 'nothing' \(test_so"):
        broken.payload({}, 7, dict)
    with pytest.raises(ConfigError, match="the document of 7 is of type int; give a mapping"):
        as_source([1]).payload(5, 7, lambda one: one)


MOMENT = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "key", "id_"),
    [
        (5, 5, "5"),
        ("five", "five", "five"),
        (UUID(int=5), str(UUID(int=5)), str(UUID(int=5))),
        (Decimal("5"), "5", "5"),
        (MOMENT, "2026-01-31T12:00:00+00:00", "2026-01-31T12:00:00+00:00"),
        (date(2026, 1, 31), "2026-01-31", "2026-01-31"),
    ],
)
def test_a_key_is_what_it_was_again(value: Any, key: Any, id_: str) -> None:
    assert as_key(value, Source([])) == key
    assert as_id(value, key) == id_
    assert from_key(key, type(value)) == value


@pytest.mark.parametrize("value", [None, True, 1.5, b"bytes", [1]])
def test_what_has_no_form_in_a_checkpoint_is_no_key(value: Any) -> None:
    with pytest.raises(ConfigError, match="it must be an integer, a text, a UUID or a time"):
        as_key(value, Source([]))


def test_an_id_that_a_column_cannot_have_is_told() -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        from_key("x", int)
    with pytest.raises(ValueError, match="badly formed"):
        from_key("x", UUID)
