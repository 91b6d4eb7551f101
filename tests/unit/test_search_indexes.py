"""Indexes that are missing, that are created, and that are built to take the place of another."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from relaybox.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.sink import Answer
from relaybox.sinks import search_indexes
from tests.unit.searching import BUILDING, Double, event, sink


@pytest.fixture
def engine() -> Double:
    return Double("documents")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time as the sink sees it; whoever appends to it lets it go on."""
    times = [100.0]
    time = SimpleNamespace(monotonic=lambda: times[-1])
    monkeypatch.setattr("relaybox.sinks.search_indexes.time", time)
    return times


async def test_an_index_that_is_missing_is_told_and_nothing_written(engine: Double) -> None:
    engine.indexes.clear()
    batch = [event("1", "a"), event("1", "b"), event("2", "c")]
    answers = await sink(engine).send(batch)
    assert [type(answer) for answer in answers] == [Unavailable, Released, Unavailable]
    assert engine.requests == []


async def test_an_index_that_is_missing_is_created_where_that_is_wanted(engine: Double) -> None:
    engine.indexes.clear()
    one = sink(engine, "meilisearch://engine/documents?create_index=true")
    assert await one.send([event("1", "a")]) == [Delivered()]
    assert engine.titles() == {"1": "a"}


async def test_an_index_that_another_relay_created_first_is_used(engine: Double) -> None:
    class Slow(Double):
        async def create(self, name: str, *, like: str | None = None) -> None:
            await super().create(name)
            raise Reject("it exists")

    late = Slow()
    assert await sink(late, options={"create_index": True}).send([event("1", "a")]) == [Delivered()]


async def test_an_index_that_was_deleted_meanwhile_is_told_from_the_next_send_on(
    engine: Double, clock: list[float]
) -> None:
    one = sink(engine)
    await one.send([event("1", "a")])
    engine.indexes.clear()
    [answer] = await one.send([event("1", "b")])
    assert isinstance(answer, Unavailable)
    [answer] = await one.send([event("1", "b")])
    assert isinstance(answer, Unavailable)
    assert "the index 'documents' does not exist on engine:7700" in answer.reason


async def test_while_an_index_is_being_built_every_change_goes_to_both(
    engine: Double, clock: list[float]
) -> None:
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


async def test_an_index_that_takes_the_others_place_between_the_two_writes_misses_nothing(
    engine: Double,
) -> None:
    class Replacing(Double):
        async def write(self, index: str, changes: Any) -> Sequence[Answer]:
            answers = await super().write(index, changes)
            if index == BUILDING:
                await self.replace("documents", BUILDING)
            return answers

    replacing = Replacing("documents", BUILDING)
    one = sink(replacing)
    assert await one.send([event("1", "a")]) == [Delivered()]
    assert replacing.titles() == {"1": "a"}
    # It still takes the other to exist, which does not matter.
    assert await one.send([event("1", "b")]) == [Delivered()]
    assert replacing.titles() == {"1": "b"}


async def test_what_is_meant_for_the_one_being_built_goes_there_alone(engine: Double) -> None:
    engine.indexes[BUILDING] = {}
    headers = json.dumps({"relaybox-index": BUILDING})
    batch = [event("1", "live"), event("1", "backfill", headers=headers), event("1", "newest")]
    assert await sink(engine).send(batch) == [Delivered()] * 3
    assert engine.titles() == engine.titles(BUILDING) == {"1": "newest"}
    assert [(index, *names) for (index, _), names in zip(engine.requests, engine.written(), strict=True)] == [
        (BUILDING, "live"),
        ("documents", "live"),
        (BUILDING, "backfill"),
        (BUILDING, "newest"),
        ("documents", "newest"),
    ]


async def test_what_is_meant_for_one_that_is_gone_is_delivered_without_effect(engine: Double) -> None:
    headers = json.dumps({"relaybox-index": BUILDING})
    assert await sink(engine).send([event("1", "backfill", headers=headers)]) == [Delivered()]
    assert engine.requests == []
    assert engine.titles() == {}


async def test_a_build_that_refuses_what_the_index_takes_is_dropped(
    engine: Double, caplog: pytest.LogCaptureFixture
) -> None:
    engine.indexes[BUILDING] = {}
    engine.refused_in[BUILDING, "a"] = Reject("a text where a number was expected")
    one = sink(engine)
    batch = [event("1", "a"), event("2", "b")]
    with caplog.at_level(logging.ERROR, "relaybox"):
        answers = await one.send(batch)
    assert isinstance(answers[0], Retry)
    assert answers[1:] == [Delivered()]
    assert BUILDING not in engine.indexes
    assert "a text where a number was expected" in caplog.text
    assert await one.send(batch[:1]) == [Delivered()]
    assert engine.titles() == {"1": "a", "2": "b"}


async def test_what_both_refuse_is_refused_and_the_build_goes_on(engine: Double) -> None:
    engine.indexes[BUILDING] = {}
    refusal = engine.refused["a"] = Reject("bad")
    assert await sink(engine).send([event("1", "a")]) == [refusal]
    assert BUILDING in engine.indexes


async def test_a_build_in_trouble_has_it_tried_again(engine: Double) -> None:
    engine.indexes[BUILDING] = {}
    trouble = engine.refused_in[BUILDING, "a"] = Retry("later")
    assert await sink(engine).send([event("1", "a")]) == [trouble]
    assert engine.titles() == {"1": "a"}
