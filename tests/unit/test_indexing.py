"""Sources of documents, the destinations that take them, how documents are compared, who is dead."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from types import ModuleType
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from relaybox import Destination
from relaybox.core.event import Event
from relaybox.errors import ConfigError, InvalidField
from relaybox.search import Source, load_source
from relaybox.search._reconcile import HashedIds, canonical_json, differing
from relaybox.search.change import check_target, rereads
from relaybox.search.iterable_rows import IterableRows
from relaybox.search.reindex_operation import is_dead
from relaybox.search.source import as_key, as_source, from_key
from relaybox.stores.journal import STALLED, Operation, OperationState

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
    message = r"^source = 'searched:documents': it is (of type .*|a class); give a select"
    with pytest.raises(ConfigError, match=message):
        load_source("searched:documents")


def test_a_name_that_does_not_exist_is_reported(module: Any) -> None:
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


def test_wrong_settings_and_documents_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(InvalidField, match=r"Source\.id"):
        Source([], id="")
    with pytest.raises(InvalidField, match=r"Source\.event_type"):
        Source([], event_type="x" * 101)
    with pytest.raises(ConfigError, match="give a function"):
        Source([], document="title")  # type: ignore[arg-type]
    broken = Source([], document=lambda row: {"title": row["nothing"]})
    with pytest.raises(ConfigError, match=r"the document of 7 cannot be made: KeyError: 'nothing' \(test_in"):
        broken.item({}, 7, dict)
    with pytest.raises(ConfigError, match="the document of 7 is of type int; give a mapping"):
        as_source([1]).item(5, 7, lambda one: one)


MOMENT = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "key", "id_"),
    [
        *((5, 5, "5"), ("five", "five", "five"), (UUID(int=5), str(UUID(int=5)), str(UUID(int=5)))),
        *((Decimal("5"), "5", "5"), (MOMENT, "2026-01-31T12:00:00+00:00", "2026-01-31T12:00:00+00:00")),
        (date(2026, 1, 31), "2026-01-31", "2026-01-31"),
    ],
)
def test_a_key_is_what_it_was_again(value: Any, key: Any, id_: str) -> None:
    assert Source([]).item({}, value, dict) == (id_, {}, key)
    assert from_key(key, type(value)) == value


@pytest.mark.parametrize("value", [None, True, 1.5, b"bytes", [1]])
def test_a_value_that_a_checkpoint_cannot_hold_is_not_a_key(value: Any) -> None:
    with pytest.raises(ConfigError, match="it must be an integer, a text, a UUID or a time"):
        as_key(value, Source([]))


def test_an_id_that_a_column_cannot_have_is_reported() -> None:
    for type_, message in ((int, "invalid literal"), (UUID, "badly formed")):
        with pytest.raises(ValueError, match=message):
            from_key("x", type_)


URL = "meilisearch://127.0.0.1:7700/documents"


def newest(event: Event) -> dict[str, str]:
    return {"id": event.aggregate_id}


def test_a_search_destination_that_would_refuse_the_events_is_reported() -> None:
    search = Destination("search", URL, options={"actions": {"document.seen": "ignore"}})
    check_target(search, "document.updated")
    with pytest.raises(ConfigError, match=r"^destination 'search': no action is known .*'document\.read'"):
        check_target(search, "document.read")
    with pytest.raises(ConfigError, match="it does ignore; choose another with event_type"):
        check_target(search, "document.seen")
    with pytest.raises(ConfigError, match="it does delete"):
        check_target(search, "document.deleted")


def test_a_destination_says_whether_it_rereads_and_any_other_takes_what_it_gets() -> None:
    check_target(Destination("mail", "console:"), "document.read")
    assert not rereads(Destination("mail", "console:"))
    assert rereads(Destination("search", URL, options={"document": newest, "reread": True}))
    assert not rereads(Destination("search", URL))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        *(({"a": 1, "b": 2}, {"b": 2, "a": 1}), ({"a": 1}, {"a": 1.0}), ({"a": -0.0}, {"a": 0})),
        *(({"a": {"x": [1, {"y": 2.0}]}}, {"a": {"x": [1.0, {"y": 2}]}}), ({"a": 10**20}, {"a": 1e20})),
        *(({"a": 2**63 - 1}, {"a": float(2**63)}), ({"a": 2**53 + 1}, {"a": 2**53})),
        *(({"a": 2**53}, {"a": float(2**53)}), ({"a": (1, 2)}, {"a": [1, 2]})),
    ],
)
def test_documents_are_the_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert canonical_json(one) == canonical_json(other)
    assert differing(one, other) == ()


@pytest.mark.parametrize(
    ("one", "other", "fields"),
    [
        *(({"a": 1}, {"a": "1"}, ("a",)), ({"a": 1}, {"a": True}, ("a",)), ({"a": 0}, {"a": False}, ("a",))),
        *(({"a": None}, {}, ("a",)), ({"a": [1, 2]}, {"a": [2, 1]}, ("a",)), ({"a": 1.5}, {"a": 1}, ("a",))),
        ({"a": "é"}, {"a": "e\u0301"}, ("a",)),
        ({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "d": 4}, ("b", "c", "d")),
        *(({"a": 2**53 + 4}, {"a": 2**53}, ("a",)), ({"a": 10**400}, {"a": 10**401}, ("a",))),
    ],
)
def test_documents_differ_in_fields(
    one: dict[str, Any], other: dict[str, Any], fields: tuple[str, ...]
) -> None:
    assert canonical_json(one) != canonical_json(other)
    assert differing(one, other) == fields


def test_hashed_ids_hold_what_was_added_and_nothing_else() -> None:
    ids = HashedIds(part=64)
    for number in range(1_000):
        ids.update([f"document-{number}"])
    assert all(f"document-{number}" in ids for number in range(1_000))
    assert not any(f"document-{number}" in ids for number in range(1_000, 2_000))


THEN = datetime(2001, 2, 3, tzinfo=UTC)
OPERATION = Operation(
    id=UUID(int=1),
    action="reindex",
    actor="ann",
    details={"process": "another-host:1:a"},
    state="running",
    total=None,
    capped=False,
    done=0,
    skipped=0,
    started_at=THEN,
    updated_at=THEN,
    finished_at=None,
    error=None,
    seen_at=THEN,
)


@pytest.mark.parametrize(
    ("state", "silent", "dead"),
    [
        ("running", 5.0, False),
        ("stalled", STALLED + 1, True),
        ("cancelled", 5.0, False),
        ("cancelled", STALLED + 1, True),
    ],
)
def test_the_databases_clock_tells_who_is_dead(state: OperationState, silent: float, dead: bool) -> None:
    seen = THEN + timedelta(seconds=silent)
    assert is_dead(replace(OPERATION, state=state, seen_at=seen)) is dead


async def test_a_generator_that_documents_make_is_closed_in_the_thread_that_reads_it() -> None:
    threads: list[int] = []

    class Documents:
        def __iter__(self) -> Iterator[dict[str, int]]:
            threads.append(threading.get_ident())
            try:
                yield from ({"id": n} for n in range(3))
            finally:
                threads.append(threading.get_ident())

    source = Source(documents=Documents, aggregate_type="Order", event_type="order.changed")
    rows = IterableRows(None, source, Documents())  # type: ignore[arg-type]
    async with aclosing(rows.read(1)) as pages:
        assert len(await anext(pages)) == 1
    await rows.aclose()
    reading, closing = threads
    assert reading == closing != threading.get_ident()
