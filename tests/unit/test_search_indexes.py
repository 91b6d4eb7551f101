"""Indexes that are missing, are created or are built next to another, and engines that answer oddly."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.errors import ConfigError
from relaybox.search import indexes as search_indexes
from relaybox.search.http import Client, Reply
from relaybox.search.indexes import given_up
from relaybox.search.meilisearch.server import enqueued, error_of
from relaybox.search.opensearch.cluster import results_of
from relaybox.sinks.sink import Answer
from tests.unit.searching import BUILDING, Double, event, sink


@pytest.fixture
def engine() -> Double:
    return Double("documents")


@pytest.fixture
def both() -> Double:
    return Double("documents", BUILDING)


def of_build(id_: str, title: str, **fields: Any) -> Delivery:
    headers = json.dumps({"relaybox-index": BUILDING})
    return msgspec.structs.replace(event(id_, title, headers=headers), **fields)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the times that the sink sees; appending to them moves its clock on."""
    times = [100.0]
    time = SimpleNamespace(monotonic=lambda: times[-1])
    monkeypatch.setattr("relaybox.search.indexes.time", time)
    return times


async def test_a_missing_index_is_reported_and_nothing_is_written(engine: Double) -> None:
    engine.indexes.clear()
    batch = [event("1", "a"), event("1", "b"), event("2", "c")]
    answers = await sink(engine).send(batch)
    assert [type(answer) for answer in answers] == [Unavailable, Released, Unavailable]
    assert engine.requests == []


async def test_an_index_that_is_missing_is_created_where_that_is_wanted_or_another_relay_did() -> None:
    class Slow(Double):
        async def create(self, name: str, *, like: str | None = None) -> None:
            await super().create(name)
            raise Reject("it exists")

    for engine in (Double(), Slow()):
        one = sink(engine, "meilisearch://engine/documents?create_index=true")
        assert await one.send([event("1", "a")]) == [Delivered()]
        assert engine.titles() == {"1": "a"}


async def test_an_index_that_was_deleted_is_reported_from_the_next_send_on(
    engine: Double, clock: list[float]
) -> None:
    one = sink(engine)
    await one.send([event("1", "a")])
    engine.indexes.clear()
    for _ in range(2):
        [answer] = await one.send([event("1", "b")])
        assert isinstance(answer, Unavailable)
    assert "the index 'documents' does not exist on engine:7700" in answer.reason


async def test_while_an_index_is_built_every_change_goes_to_both(engine: Double, clock: list[float]) -> None:
    one = sink(engine)
    await one.send([event("1", "a")])
    engine.indexes[BUILDING] = {}
    clock.append(clock[-1] + search_indexes.LOOK)
    await one.send([event("2", "unseen yet")])
    assert engine.indexes[BUILDING] == {}
    clock.append(clock[-1] + 0.01)
    await one.send([event("3", "b"), event("1")])
    assert engine.titles(BUILDING) == {"3": "b"}
    assert engine.titles() == {"2": "unseen yet", "3": "b"}
    assert [index for index, _ in engine.requests][-2:] == [BUILDING, "documents"]
    assert engine.looked["documents"] == 2


async def test_an_index_that_takes_the_place_between_the_two_writes_misses_nothing() -> None:
    class Replacing(Double):
        async def write(self, index: str, changes: Any) -> Sequence[Answer]:
            answers = await super().write(index, changes)
            if index == BUILDING:
                await self.replace("documents", BUILDING)
            return answers

    replacing = Replacing("documents", BUILDING)
    one = sink(replacing)
    # The second time it still takes the other to exist, which does not matter.
    for title in "ab":
        assert await one.send([event("1", title)]) == [Delivered()]
        assert replacing.titles() == {"1": title}


async def test_what_is_meant_for_the_one_being_built_goes_there_alone(both: Double) -> None:
    batch = [event("1", "live"), of_build("1", "backfill"), event("1", "newest")]
    assert await sink(both).send(batch) == [Delivered()] * 3
    assert both.titles() == both.titles(BUILDING) == {"1": "newest"}
    requests = zip([index for index, _ in both.requests], both.written(), strict=True)
    assert [(index == BUILDING, *names) for index, names in requests] == [
        *((True, "live"), (False, "live"), (True, "backfill"), (True, "newest"), (False, "newest"))
    ]


async def test_what_is_meant_for_one_that_is_gone_is_delivered_without_effect(engine: Double) -> None:
    assert await sink(engine).send([of_build("1", "backfill")]) == [Delivered()]
    assert (engine.requests, engine.titles()) == ([], {})


async def test_what_both_refuse_is_refused_and_the_builds_trouble_is_tried_again(both: Double) -> None:
    refusal = both.refused["a"] = Reject("bad")
    trouble = both.refused_in[BUILDING, "b"] = Retry("later")
    batch = [event("1", "a"), event("2", "b"), of_build("3", "b", attempts=1, max_attempts=2)]
    assert await sink(both).send(batch) == [refusal, trouble, trouble]
    assert BUILDING in both.indexes
    assert both.titles() == {"2": "b"}


GARBAGE = [b'{"message":"\xff","taskUid":"\xff","items":[{"index":{"status":200,"error":{"type":"\xff"}}}]}']
GARBAGE += [b'{"message":' + b"[" * 100_000, b'{"unknown":' + b"[" * 100_000]


def reply(body: bytes, status: int = 200) -> Reply:
    return Reply(status, body, None, "engine:7700")


@pytest.mark.parametrize("body", GARBAGE)
def test_garbage_is_of_somebody_else(body: bytes) -> None:
    with pytest.raises(Unavailable, match="without JSON"):
        reply(body).json()
    with pytest.raises(Unavailable, match="in another way than OpenSearch"):
        results_of(reply(body), 1)
    with pytest.raises(Unavailable, match="without a task"):
        enqueued(reply(body))
    assert error_of(reply(body)).code == ""
    assert Client(["http://engine:7700"], timeout=1).reason(reply(body, 503)).startswith("engine:7700: 503")


@pytest.mark.parametrize("error", [KeyError("createdAt"), Retry("500"), Unavailable("away")])
async def test_a_look_that_fails_is_not_blamed_on_an_event(engine: Double, error: Exception) -> None:
    engine.raised = error
    answers = await sink(engine).send([event("1", "a"), event("1", "b"), event("2", "c")])
    assert [type(answer) for answer in answers] == [Unavailable, Released, Unavailable]


async def test_a_name_that_no_index_can_have_is_the_events_own_fault(engine: Double) -> None:
    engine.raised = Reject("no index can be called so")
    assert await sink(engine).send([event("1", "a")]) == [engine.raised]


async def test_an_index_that_cannot_be_created_is_not_blamed_on_an_event() -> None:
    class Full(Double):
        async def create(self, name: str, *, like: str | None = None) -> None:
            raise Reject("this cluster has the maximum of shards")

    [answer] = await sink(Full(), options={"create_index": True}).send([event("1", "a")])
    assert isinstance(answer, Unavailable)
    assert "the maximum of shards" in answer.reason


async def test_a_build_that_refuses_more_is_dropped_and_reported_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Counting(Double):
        dropped = 0

        async def drop(self, name: str) -> None:
            self.dropped += 1
            await super().drop(name)

    engine = Counting("documents", BUILDING)
    engine.refused_in = {(BUILDING, title): Reject("a text where a number was expected") for title in "abc"}
    one, batch = sink(engine), [event(title, title) for title in "abcd"]
    with caplog.at_level(logging.ERROR, "relaybox"):
        answers = await one.send(batch)
    assert [isinstance(answer, Retry) for answer in answers] == [True, True, True, False]
    assert answers[3] == Delivered()
    assert BUILDING not in engine.indexes
    assert engine.dropped == len(caplog.records) == 1
    assert "a text where a number was expected" in caplog.text
    assert await one.send(batch[:3]) == [Delivered()] * 3
    assert engine.titles() == {title: title for title in "abcd"}


async def test_a_build_of_which_nothing_can_be_learnt_has_it_tried_again() -> None:
    class Puzzling(Double):
        async def present(self, names: Sequence[str]) -> Mapping[str, str]:
            if list(names) == [BUILDING]:
                raise KeyError("createdAt")
            return await super().present(names)

    engine = Puzzling("documents", BUILDING)
    trouble: Answer = Unavailable("its shards are away")
    engine.refused_in[BUILDING, "a"] = trouble
    assert await sink(engine).send([event("1", "a"), event("2", "b")]) == [trouble, Delivered()]


async def test_of_many_that_are_refused_few_are_tried_at_a_time() -> None:
    engine = Double("documents")
    engine.refused = {f"bad {n}": Reject(f"bad {n}") for n in range(100)}
    batch = [event("1", f"good {n}") for n in range(10)] + [event("1", f"bad {n}") for n in range(100)]
    settled: list[Answer] = []
    requests = []
    while batch:
        answers = await sink(engine).send(batch)
        requests.append(len(engine.requests))
        engine.requests.clear()
        left = next((at for at, answer in enumerate(answers) if answer == Released()), len(batch))
        assert left > 0, "each time something is settled"
        assert answers[left:] == [Released()] * (len(batch) - left)
        settled += answers[:left]
        batch = batch[left:]
    assert settled == [Delivered()] * 10 + [engine.refused[f"bad {n}"] for n in range(100)]
    assert max(requests) <= 8
    assert engine.titles() == {"1": "good 9"}


async def test_an_index_with_the_name_of_a_build_is_refused() -> None:
    with pytest.raises(ConfigError, match="__building"):
        sink(Double(), "meilisearch://engine/{tenant}__building")
    one = event("1", "a", aggregate_type="Site__Building")
    [answer] = await sink(Double(), "meilisearch://engine").send([one])
    assert isinstance(answer, Reject)
    assert "'site__building'" in answer.reason


async def test_what_the_build_refuses_of_its_own_events_drops_it_and_fails_nothing(
    both: Double, caplog: pytest.LogCaptureFixture
) -> None:
    both.refused_in[BUILDING, "a"] = Reject("a text where a number was expected")
    one = sink(both)
    batch = [of_build("1", "a"), event("1", "newest"), of_build("2", "b")]
    with caplog.at_level(logging.ERROR, "relaybox"):
        first, *others = await one.send(batch)
    assert isinstance(first, Retry)
    assert first.reason == f"{given_up(BUILDING)}a text where a number was expected"
    assert others == [Released(), Delivered()]
    assert BUILDING not in both.indexes
    [record] = caplog.records
    assert "such as '1': a text where a number was expected" in record.getMessage()
    assert await one.send(batch) == [Delivered()] * 3
    assert both.titles() == {"1": "newest"}


@pytest.mark.parametrize("error", [Reject("no such product"), Retry("later"), ValueError("broken")])
async def test_what_the_function_refuses_of_a_build_drops_it(both: Double, error: Exception) -> None:
    def document(event: Any) -> Any:
        raise error

    one = sink(both, options={"document": document})
    last = of_build("1", "a", attempts=2, max_attempts=2)
    assert await one.send([last]) == [Released()]
    assert BUILDING not in both.indexes
    assert await one.send([last]) == [Delivered()]


async def test_in_its_last_attempt_it_is_released_and_not_failed(both: Double) -> None:
    both.refused_in[BUILDING, "a"] = Reject("a text")
    live = msgspec.structs.replace(event("1", "a"), attempts=1, max_attempts=1)
    one = sink(both)
    assert await one.send([live]) == [Released()]
    assert BUILDING not in both.indexes
    assert await one.send([live]) == [Delivered()]
    assert both.titles() == {"1": "a"}


@pytest.mark.parametrize("error", [Reject, Unavailable])
async def test_one_that_cannot_be_dropped_holds_up_no_other_event(error: type[Exception]) -> None:
    class Guarded(Double):
        async def drop(self, name: str) -> None:
            raise error("the key may not delete indexes")

    guarded = Guarded("documents", BUILDING)
    guarded.refused_in[BUILDING, "a"] = Reject("a text")
    for batch in ([event("1", "a")], [of_build("1", "a")]):
        [answer] = await sink(guarded).send(batch)
        assert isinstance(answer, Retry)
        assert "which cannot be dropped (the key may not delete indexes): a text" in answer.reason
