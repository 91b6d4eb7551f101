"""From events to changes of documents: actions, ids, documents that a function makes."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import threading
from datetime import date
from typing import Any

import pytest

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Reject, Retry, Unavailable, Unreachable
from relaybox.errors import ConfigError
from relaybox.search.change import Changes, index_of, search_address
from relaybox.search.engine import Change
from relaybox.sinks import threads
from relaybox.sinks.sink import answer_of
from tests.unit.searching import destination, event
from tests.waiting import await_for, cancel


def changes(timeout: float = 30.0, **options: Any) -> Changes:
    given = destination(options=options, timeout=timeout)
    return Changes(given, search_address(given).options)


async def document_of(one: Delivery, **options: Any) -> Any:
    change = await changes(**options).change_of(one)
    assert change is not None
    return change.document


def module_function(event: Event) -> dict[str, Any]:
    return {"title": f"{event.type} by name"}


@pytest.mark.parametrize(
    ("event_type", "action"),
    [
        *(("document.created", "index"), ("document.updated", "index"), ("document.updated.v2", "index")),
        *(("document.deleted", "delete"), ("document.deleted.v13", "delete")),
        ("shop.order.line.created", "index"),
    ],
)
def test_created_and_updated_index_and_deleted_deletes_in_any_version(event_type: str, action: str) -> None:
    assert changes().action_of(event_type) == action


@pytest.mark.parametrize("event_type", ["document.updating", "updated", "document.updated.vx", "v2"])
def test_a_type_that_nothing_maps_is_refused_and_the_option_named(event_type: str) -> None:
    with pytest.raises(Reject, match="actions") as raised:
        changes().action_of(event_type)
    assert repr(event_type) in raised.value.reason
    assert "'search'" in raised.value.reason


def test_own_patterns_go_before_the_default_ones_in_their_order() -> None:
    actions = {"draft.*": "ignore", "document.archived": "delete", "*.updated": "delete", "*": "index"}
    found = changes(actions=actions).action_of
    names = ("draft.updated", "document.archived.v3", "x.updated", "x.y")
    assert [found(name) for name in names] == ["ignore", "delete", "delete", "index"]
    # The default's turn comes after all of the given ones.
    assert found("x.deleted") == "index"
    found = changes(actions={"document.updated.v1": "ignore"}).action_of
    assert (found("document.updated.v1"), found("document.updated.v2")) == ("ignore", "index")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"actions": {"*.x": "remove"}}, "actions: *.x = 'remove': choose 'index', 'delete' or 'ignore'"),
        ({"actions": "index"}, "actions = 'index': write a table"),
        ({"document": "nowhere:nothing"}, "document = 'nowhere:nothing': there is no module 'nowhere'"),
        ({"document": 7}, "it is not a function"),
        ({"reread": True}, "reread is of no use without document"),
        ({"reread": "maybe"}, "write true or false"),
        ({"id_field": ""}, "id_field = '': write a text"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match="'search'") as raised:
        changes(**options)
    assert message in str(raised.value)


def test_the_index_is_the_path_or_the_aggregate_type_in_lower_case() -> None:
    one = event("7", "x")
    assert index_of(destination())(one) == "documents"
    assert index_of(destination("meilisearch://engine"))(one) == "document"
    assert index_of(destination("opensearch://engine/x-{aggregate_type}"))(one) == "x-Document"


async def test_an_update_writes_the_payload_and_a_delete_or_none_of_a_function_deletes() -> None:
    one, gone = event("7", "Seven"), event("7", payload='"whatever"')
    assert await changes().change_of(one) == Change("7", {"title": "Seven", "id": "7"}, one.position)
    assert await changes().change_of(gone) == Change("7", None, gone.position)
    assert await changes(actions={"*": "ignore"}).change_of(event("7", "x")) is None
    one = event("7", "x")
    assert await changes(document=lambda event: None).change_of(one) == Change("7", None, one.position)


async def test_an_id_of_the_payload_has_to_be_the_aggregates_and_may_stand_in_another_field() -> None:
    assert await document_of(event("7", payload='{"id": 7}', type_="document.created")) == {"id": 7}
    for other in ('"8"', "8", "true", "7.0", "null", '"07"'):
        with pytest.raises(Reject, match="'7'; they have to be the same"):
            await changes().change_of(event("7", payload=f'{{"id": {other}}}', type_="document.created"))
    one = event("7", "x", payload='{"id": "other", "key": "7"}')
    assert await document_of(one, id_field="key") == {"id": "other", "key": "7"}


@pytest.mark.parametrize(("payload", "kind"), [("[1]", "a list"), ("null", "null"), ("7", "a number")])
async def test_a_payload_that_is_not_an_object_is_refused(payload: str, kind: str) -> None:
    with pytest.raises(Reject, match=f"the payload is {kind}; a document is a JSON object"):
        await changes().change_of(event("7", "x", payload=payload))
    binary: dict[str, Any] = {"payload": None, "payload_data": b"x", "payload_encoding": "binary"}
    with pytest.raises(Reject, match="the payload is bytes"):
        await changes().change_of(event("7", "x", **binary))


async def test_a_function_makes_the_document_in_a_thread() -> None:
    threads = []

    def document(event: Event) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return {"title": event.payload["title"].upper(), "day": date(2025, 1, 31)}

    made = await document_of(event("7", "seven"), document=document)
    assert made == {"title": "SEVEN", "day": "2025-01-31", "id": "7"}
    assert threads != [threading.current_thread()]


async def test_an_asynchronous_function_makes_the_document_in_the_loop() -> None:
    loops = []

    async def document(event: Event) -> dict[str, Any]:
        loops.append(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return {"title": "made"}

    assert await document_of(event("7", "seven"), document=document) == {"title": "made", "id": "7"}
    assert loops == [asyncio.get_running_loop()]


async def test_a_function_can_be_named_and_may_return_whatever_is_a_mapping_to_json() -> None:
    @dataclasses.dataclass
    class Made:
        title: str

    named = await document_of(event("7", "x"), document=f"{__name__}:module_function")
    assert named == {"title": "document.updated by name", "id": "7"}
    assert await document_of(event("7", "x"), document=lambda event: Made("x")) == {"title": "x", "id": "7"}


async def test_only_with_reread_a_delete_asks_the_function_for_the_newest_state() -> None:
    asked: list[Event] = []

    def document(event: Event) -> dict[str, Any]:
        asked.append(event)
        return {"title": "created again"}

    assert await document_of(event("7"), document=document) is None
    assert asked == []
    made = await document_of(event("7"), document=document, reread=True)
    assert made == {"title": "created again", "id": "7"}


@pytest.mark.parametrize("error", [Retry("later"), Reject("never"), Unavailable("down")])
async def test_what_a_function_answers_is_the_answer(error: Exception) -> None:
    def document(event: Event) -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        await changes(document=document).change_of(event("7", "x"))
    assert raised.value is error


@pytest.mark.parametrize(
    "error", [ValueError("no such row"), TimeoutError("own"), SystemExit(3), asyncio.CancelledError()]
)
@pytest.mark.parametrize("in_loop", [True, False])
async def test_anything_else_that_a_function_raises_is_tried_again(
    error: BaseException, in_loop: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def in_the_loop(event: Event) -> None:
        raise error

    def in_a_thread(event: Event) -> None:
        raise error

    with caplog.at_level(logging.WARNING, "relaybox"), pytest.raises(Retry) as raised:
        await changes(document=in_the_loop if in_loop else in_a_thread).change_of(event("7", "x"))
    assert type(error).__name__ in raised.value.reason
    assert str(error) in raised.value.reason


async def test_a_function_that_takes_too_long_is_tried_again() -> None:
    release = threading.Event()
    made = changes(document=lambda event: release.wait(), timeout=0.05)
    with pytest.raises(Retry, match=r"the document function took longer than 0\.05s"):
        await made.change_of(event("7", "x"))
    release.set()


async def test_while_too_many_functions_run_on_no_other_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "MOST_LEFT", 2)
    release = threading.Event()
    called: list[Event] = []
    made = changes(document=lambda event: called.append(event) or release.wait(), timeout=0.05)
    try:
        for _ in range(2):
            with pytest.raises(Retry):
                await made.change_of(event("7", "x"))
        with pytest.raises(Unreachable, match="2 calls that were given up are still running"):
            await made.change_of(event("7", "x"))
        await await_for(lambda: (len(called), made.overdue) == (2, 2))
    finally:
        release.set()


@pytest.mark.parametrize(("made", "kind"), [([1], "a list"), ("x", "a text"), (b"x", "bytes")])
async def test_a_result_that_is_not_a_document_is_refused(made: Any, kind: str) -> None:
    with pytest.raises(Reject, match=f"the document function returned {kind}; return a mapping"):
        await changes(document=lambda event: made).change_of(event("7", "x"))
    with pytest.raises(Exception, match=r"\$.*title") as raised:
        await changes(document=lambda event: {"title": object()}).change_of(event("7", "x"))
    assert isinstance(answer_of(raised.value), Reject)


async def test_a_cancellation_is_passed_on() -> None:
    begun = asyncio.Event()

    async def document(event: Event) -> None:
        begun.set()
        await asyncio.Event().wait()

    task = asyncio.ensure_future(changes(document=document).change_of(event("7", "x")))
    await begun.wait()
    await cancel(task)


async def test_a_function_sees_the_whole_event() -> None:
    seen: list[Event] = []
    one = event("7", "x", headers=json.dumps({"tenant": "acme"}))
    await changes(document=seen.append).change_of(one)
    [got] = seen
    assert (got.id, got.type, got.aggregate_id) == (one.event_id, "document.updated", "7")
    assert got.headers == {"tenant": "acme"}
