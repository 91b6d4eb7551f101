"""What is meant for an index that is being built, and does not get there, harms no live event."""

from __future__ import annotations

import json
import logging
from typing import Any

import msgspec
import pytest

from relaybox.event import Delivery
from relaybox.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.sinks.search_indexes import given_up
from tests.unit.searching import BUILDING, Double, event, sink

HEADERS = json.dumps({"relaybox-index": BUILDING})


def of_build(id_: str, title: str, **fields: Any) -> Delivery:
    return msgspec.structs.replace(event(id_, title, headers=HEADERS), **fields)


@pytest.fixture
def engine() -> Double:
    return Double("documents", BUILDING)


async def test_what_the_build_refuses_of_its_own_events_drops_it_and_fails_nothing(
    engine: Double, caplog: pytest.LogCaptureFixture
) -> None:
    engine.refused_in[BUILDING, "a"] = Reject("a text where a number was expected")
    one = sink(engine)
    batch = [of_build("1", "a"), event("1", "newest"), of_build("2", "b")]
    with caplog.at_level(logging.ERROR, "relaybox"):
        first, *others = await one.send(batch)
    assert isinstance(first, Retry)
    assert first.reason == f"{given_up(BUILDING)}a text where a number was expected"
    assert others == [Released(), Delivered()]
    assert BUILDING not in engine.indexes
    [record] = caplog.records
    assert "such as '1': a text where a number was expected" in record.getMessage()
    assert await one.send(batch) == [Delivered()] * 3
    assert engine.titles() == {"1": "newest"}


@pytest.mark.parametrize("error", [Reject("no such product"), Retry("later"), ValueError("broken")])
async def test_what_the_function_refuses_of_a_build_drops_it(engine: Double, error: Exception) -> None:
    def document(event: Any) -> Any:
        raise error

    one = sink(engine, options={"document": document})
    last = of_build("1", "a", attempts=2, max_attempts=2)
    assert await one.send([last]) == [Released()]
    assert BUILDING not in engine.indexes
    assert await one.send([last]) == [Delivered()]


async def test_in_its_last_attempt_it_is_released_and_not_failed(engine: Double) -> None:
    engine.refused_in[BUILDING, "a"] = Reject("a text")
    live = msgspec.structs.replace(event("1", "a"), attempts=1, max_attempts=1)
    one = sink(engine)
    assert await one.send([live]) == [Released()]
    assert BUILDING not in engine.indexes
    assert await one.send([live]) == [Delivered()]
    assert engine.titles() == {"1": "a"}


async def test_what_may_still_succeed_is_tried_again_and_the_build_goes_on(engine: Double) -> None:
    trouble = engine.refused_in[BUILDING, "a"] = Retry("later")
    assert await sink(engine).send([of_build("1", "a", attempts=1, max_attempts=2)]) == [trouble]
    assert BUILDING in engine.indexes


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
