"""What no event is to blame for, and engines that answer what nobody expects."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import pytest

from relaybox.errors import ConfigError
from relaybox.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.sink import Answer
from relaybox.sinks.meilisearch_tasks import enqueued, error_of
from relaybox.sinks.opensearch_bulk import items_of
from relaybox.sinks.search_http import Client, Reply
from tests.unit.searching import BUILDING, Double, event, sink

GARBAGE = [b'{"message":"\xff","taskUid":"\xff","items":[{"index":{"status":200,"error":{"type":"\xff"}}}]}']
GARBAGE += [b'{"message":' + b"[" * 100_000, b'{"unknown":' + b"[" * 100_000]


def reply(body: bytes, status: int = 200) -> Reply:
    return Reply(status, body, {}, None, "engine:7700")


@pytest.mark.parametrize("body", GARBAGE)
def test_garbage_is_of_somebody_else(body: bytes) -> None:
    with pytest.raises(Unavailable, match="without JSON"):
        reply(body).json()
    with pytest.raises(Unavailable, match="in another way than OpenSearch"):
        items_of(reply(body), 1)
    with pytest.raises(Unavailable, match="without a task"):
        enqueued(reply(body))
    assert error_of(reply(body)).code == ""
    assert Client(["http://engine:7700"], timeout=1).reason(reply(body, 503)).startswith("engine:7700: 503")


@pytest.mark.parametrize("error", [KeyError("createdAt"), Retry("500"), Unavailable("away")])
async def test_a_look_that_fails_is_no_events_fault(error: Exception) -> None:
    engine = Double("documents")
    engine.raised = error
    answers = await sink(engine).send([event("1", "a"), event("1", "b"), event("2", "c")])
    assert [type(answer) for answer in answers] == [Unavailable, Released, Unavailable]


async def test_a_name_that_no_index_can_have_is_the_events_own_fault() -> None:
    engine = Double("documents")
    engine.raised = Reject("no index can be called so")
    assert await sink(engine).send([event("1", "a")]) == [engine.raised]


async def test_an_index_that_cannot_be_created_is_no_events_fault() -> None:
    class Full(Double):
        async def create(self, name: str, *, like: str | None = None) -> None:
            raise Reject("this cluster has the maximum of shards")

    [answer] = await sink(Full(), options={"create_index": True}).send([event("1", "a")])
    assert isinstance(answer, Unavailable)
    assert "the maximum of shards" in answer.reason


async def test_a_build_that_refuses_many_is_dropped_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(Double):
        dropped = 0

        async def drop(self, name: str) -> None:
            self.dropped += 1
            await super().drop(name)

    engine = Counting("documents", BUILDING)
    engine.refused_in = {(BUILDING, title): Reject("a text") for title in "abc"}
    with caplog.at_level(logging.ERROR, "relaybox"):
        answers = await sink(engine).send([event(title, title) for title in "abcd"])
    assert [isinstance(answer, Retry) for answer in answers] == [True, True, True, False]
    assert answers[3] == Delivered()
    assert engine.dropped == len(caplog.records) == 1


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


async def test_an_index_called_as_if_it_were_being_built_is_refused() -> None:
    with pytest.raises(ConfigError, match="__building"):
        sink(Double(), "meilisearch://engine/{tenant}__building")
    engine = Double()
    [answer] = await sink(engine, "meilisearch://engine").send(
        [event("1", "a", aggregate_type="Site__Building")]
    )
    assert isinstance(answer, Reject)
    assert "'site__building'" in answer.reason
