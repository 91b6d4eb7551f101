"""Changes of documents in batches: which are written, in which order, and what each delivery is answered."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaybox.core.event import TEST_TYPE, Delivery, Event
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Throttled, Unavailable
from relaybox.search.sink import REQUESTS
from relaybox.sinks.sink import Answer, Regardless
from tests.unit.searching import BUILDING, KEYED, Double, event, sink
from tests.waiting import PATIENCE, await_for, cancel


@pytest.fixture
def engine() -> Double:
    return Double("documents")


class Recorder(Regardless):
    """Lets a delivery begin unless it is refused, and records its calls."""

    def __init__(self, refused: Sequence[Delivery] = ()) -> None:
        self.refused = {delivery.event_id for delivery in refused}
        self.answers: dict[UUID, Answer] = {}

    def begin(self, delivery: Delivery) -> bool:
        return delivery.event_id not in self.refused

    def report(self, delivery: Delivery, answer: Answer) -> None:
        assert delivery.event_id not in self.answers, "answered twice"
        self.answers[delivery.event_id] = answer


BAD, WORSE, LATER, BUSY = Reject("bad"), Reject("worse"), Retry("later"), Throttled("too much", after=3)
DONE, LEFT = Delivered(), Released()


@pytest.mark.parametrize(
    ("events", "refused", "answers", "written"),
    [
        # Of one document only the last change is written, and all are delivered.
        ("1a 2b 1c 1d", {}, [DONE] * 4, [["d", "b"]]),
        ("1a 1- 1b 2a 2-", {}, [DONE] * 5, [["b", "2"]]),
        # Where the last is refused, those before it are tried without it.
        ("1a 1b 1c", {"c": BAD}, [DONE, DONE, BAD], [["c"], ["b"]]),
        ("1a 1b 1c", {"c": LATER}, [DONE, DONE, LATER], [["c"], ["b"]]),
        # After the first that fails, the rest of its document is released.
        ("1a 1b 1c 2d", {"b": BAD, "c": WORSE}, [DONE, BAD, LEFT, DONE], [["c", "d"], ["b"], ["a"]]),
        ("1a 1a 1a", {"a": BAD}, [BAD, LEFT, LEFT], [["a"]] * 3),
        # An engine in trouble is the answer of the first, and it is not asked again.
        ("1a 1b 2c", {"b": BUSY}, [BUSY, LEFT, DONE], [["b", "c"]]),
        # Two keys of one document are one run.
        ("1ax 1by 1cx", {}, [DONE] * 3, [["c"]]),
        # One key of several documents is kept in order.
        ("1ak 2bk 1ck", {}, [DONE] * 3, [["a"], ["b"], ["c"]]),
        ("1ak 2bk 1ck", {"b": LATER}, [DONE, LATER, LEFT], [["a"], ["b"]]),
        # Keys and documents that cross wait for one another.
        ("1ax 2by 2cx 1dy", {}, [DONE] * 4, [["a", "b"], ["c", "d"]]),
    ],
)
async def test_which_changes_are_written_and_what_each_is_answered(
    engine: Double, events: str, refused: dict[str, Answer], answers: list[Answer], written: list[list[str]]
) -> None:
    """Each event is the document's id, its title or a dash where it is deleted, and perhaps a key."""
    batch, recorder, left = [], Recorder(), {}
    for (id_, title, *key), answer in zip(events.split(), answers, strict=True):
        batch.append(event(id_, None if title == "-" else title, key=key[0] if key else KEYED))
        if answer == DONE:
            left[id_] = title
    engine.refused = refused
    assert await sink(engine).send(batch, recorder) == answers
    assert [recorder.answers.get(one.event_id, LEFT) for one in batch] == answers
    assert engine.written() == written
    assert engine.titles() == {id_: title for id_, title in left.items() if title != "-"}


async def test_a_change_carries_its_position_and_is_one_run_also_without_order(engine: Double) -> None:
    batch = [event("1", "a"), event("1", "b")]
    await sink(engine).send(batch)
    [(_, [change])] = engine.requests
    assert change.version == batch[1].position
    batch = [event("1", "a", key=None), event("2", "b", key=None), event("1", "c", key=None)]
    assert await sink(engine, ordered=False).send(batch) == [Delivered()] * 3
    assert engine.written()[1:] == [["c", "b"]]


async def test_what_an_engine_raises_is_the_answer_of_each_document(engine: Double) -> None:
    one = sink(engine)
    await one.send([event("1", "a")])
    engine.raised = Unavailable("no answer")
    batch = [event("1", "b"), event("1", "c"), event("2", "d")]
    assert await one.send(batch) == [engine.raised, Released(), engine.raised]
    engine.raised = None
    await one.send([event("1", "a")])
    engine.raised = ValueError("a bug")
    answers = await one.send(batch)
    assert [type(answer) for answer in answers] == [Retry, Released, Retry]


async def test_three_bad_ones_of_many_fail_alone(engine: Double) -> None:
    engine.refused = {f"t{n}": Reject(f"bad {n}") for n in (7, 250, 499)}
    answers = await sink(engine).send([event(str(n), f"t{n}") for n in range(500)])
    assert {n for n, answer in enumerate(answers) if answer != Delivered()} == {7, 250, 499}
    assert len(engine.titles()) == 497


async def test_what_may_not_begin_is_left_with_all_that_follows(engine: Double) -> None:
    batch = [event("1", "a"), event("1", "b"), event("1", "c"), event("2", "d")]
    recorder = Recorder(refused=[batch[1]])
    assert await sink(engine).send(batch, recorder) == [Delivered(), Released(), Released(), Delivered()]
    assert engine.written() == [["a", "d"]]
    assert set(recorder.answers) == {batch[0].event_id, batch[3].event_id}
    engine.requests.clear()
    batch = [event("1", "a", key="k"), event("2", "b", key="k"), event("2", "c", key="other")]
    assert await sink(engine).send(batch, Recorder(refused=[batch[0]])) == [Released()] * 3
    assert engine.requests == []


async def test_what_is_ignored_is_delivered_in_its_place(engine: Double) -> None:
    refusal = engine.refused["bad"] = Reject("bad")
    batch = [
        *(event("1", "a"), event("1", type_="document.viewed"), event("1", "bad")),
        *(event("1", type_="document.viewed"), event("2", type_="document.viewed")),
    ]
    one = sink(engine, options={"actions": {"*.viewed": "ignore"}})
    answers = await one.send(batch)
    assert answers == [Delivered(), Delivered(), refusal, Released(), Delivered()]
    assert engine.written() == [["bad"], ["a"]]


async def test_a_type_that_nothing_maps_is_never_hidden_by_a_later_change(engine: Double) -> None:
    batch = [event("1", "a"), event("1", "b", type_="document.moved"), event("1", "c")]
    answers = await sink(engine).send(batch)
    assert [type(answer) for answer in answers] == [Delivered, Reject, Released]
    assert engine.titles() == {"1": "a"}


async def test_requests_hold_no_more_than_the_engine_takes_and_run_side_by_side(engine: Double) -> None:
    engine.most = 10
    engine.open.clear()
    send = asyncio.ensure_future(sink(engine).send([event(str(n), "x") for n in range(95)]))
    await await_for(lambda: engine.under_way >= REQUESTS)
    engine.open.set()
    assert await send == [Delivered()] * 95
    assert sorted(len(changes) for _, changes in engine.requests) == [5, *[10] * 9]
    assert engine.most_at_once == REQUESTS


async def test_a_limit_holds_for_all_sends(engine: Double) -> None:
    engine.most = 1
    one = sink(engine)
    one.limit(1)
    await asyncio.gather(one.send([event("1", "a"), event("2", "b")]), one.send([event("3", "c")]))
    assert len(engine.titles()) == 3
    assert engine.most_at_once == 1


async def test_documents_of_several_indexes_go_to_each_in_its_own_request() -> None:
    engine = Double("acme", "umbrella")
    names = enumerate(["acme", "umbrella", "acme", "nowhere"])
    batch = [event(str(n), f"t{n}", headers=json.dumps({"tenant": name})) for n, name in names]
    batch.append(event("9", "no tenant"))
    answers = await sink(engine, "meilisearch://engine/{tenant}").send(batch)
    assert [type(answer) for answer in answers] == [Delivered, Delivered, Delivered, Unavailable, Reject]
    assert isinstance(answers[3], Unavailable)
    reason = "the index 'nowhere' does not exist on engine:7700: create it, or set create_index = true"
    assert answers[3].reason == reason
    assert (engine.titles("acme"), engine.titles("umbrella")) == ({"0": "t0", "2": "t2"}, {"1": "t1"})


async def test_the_function_is_asked_for_the_last_change_alone_and_for_many_at_once(engine: Double) -> None:
    asked: list[str] = []
    together = asyncio.Event()

    async def document(event: Event) -> dict[str, Any]:
        asked.append(event.payload["title"])
        if len(asked) == 3:
            together.set()
        await asyncio.wait_for(together.wait(), PATIENCE)
        return {"title": event.payload["title"].upper()}

    batch = [event("1", "a"), event("1", "b"), event("2", "c"), event("3", "d")]
    assert await sink(engine, options={"document": document}).send(batch) == [Delivered()] * 4
    assert sorted(asked) == ["b", "c", "d"]
    assert engine.titles() == {"1": "B", "2": "C", "3": "D"}


async def test_where_the_function_fails_for_the_last_the_one_before_is_tried(engine: Double) -> None:
    def document(event: Event) -> dict[str, Any]:
        if event.payload["title"] == "bad":
            raise Reject("not this one")
        return dict(event.payload)

    batch = [event("1", "a"), event("1", "bad"), event("2", "c")]
    answers = await sink(engine, options={"document": document}).send(batch)
    assert [type(answer) for answer in answers] == [Delivered, Reject, Delivered]
    assert engine.titles() == {"1": "a", "2": "c"}


async def test_what_is_read_again_is_asked_once_however_many_changes_there_were(engine: Double) -> None:
    asked: list[Event] = []

    def document(event: Event) -> dict[str, Any]:
        asked.append(event)
        raise Retry("the database is away")

    batch = [event("1", "a"), event("1"), event("1", "c")]
    answers = await sink(engine, options={"document": document, "reread": True}).send(batch)
    assert [type(answer) for answer in answers] == [Retry, Released, Released]
    assert [one.id for one in asked] == [batch[2].event_id]
    assert engine.requests == []


async def test_a_test_event_proves_the_path_and_writes_nothing(engine: Double) -> None:
    one = sink(engine)
    proof = event("test", type_=TEST_TYPE, key=None)
    assert await one.send([proof]) == [Delivered()]
    engine.indexes.clear()
    [answer] = await one.send([proof])
    assert isinstance(answer, Unavailable)
    assert engine.requests == []


async def test_a_check_reaches_the_engine_and_sees_the_index(engine: Double) -> None:
    await sink(engine).check()
    engine.indexes.clear()
    with pytest.raises(Unavailable, match="the index 'documents' does not exist"):
        await sink(engine).check()
    await sink(engine, options={"create_index": True}).check()
    await sink(engine, "meilisearch://engine/{tenant}").check()
    engine.raised = Unavailable("refuses the key")
    with pytest.raises(Unavailable, match="refuses the key"):
        await sink(engine, options={"create_index": True}).check()
    await sink(engine).close()
    assert engine.closed


async def test_a_send_that_is_cancelled_ends(engine: Double) -> None:
    engine.open.clear()
    send = asyncio.ensure_future(sink(engine).send([event("1", "a"), event("2", "b")]))
    await await_for(lambda: engine.under_way)
    await cancel(send)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["1", "2", "3"]),
        st.sampled_from(["x", "y", "z", None]),
        st.sampled_from(["write", "delete", "ignore", "unknown", "Reject", "Retry", "Unavailable", "stop"]),
        st.booleans(),
    ),
    max_size=14,
)


@given(EVENTS, st.integers(1, 4))
@settings(max_examples=300)
def test_whatever_the_batch_the_index_is_what_the_delivered_ones_left(
    given_events: list[tuple[str, str | None, str, bool]], most: int
) -> None:
    engine = Double("documents", BUILDING, most=most)
    types = {"delete": "d.deleted", "ignore": "d.viewed", "unknown": "d.moved"}
    failures: dict[str, Answer] = {"Reject": BAD, "Retry": LATER, "Unavailable": Unavailable("x")}
    batch, stopped = [], []
    for n, (id_, key, kind, building) in enumerate(given_events):
        headers = json.dumps({"relaybox-index": BUILDING}) if building else "{}"
        batch.append(event(id_, f"t{n}", type_=types.get(kind, "d.updated"), key=key, headers=headers))
        if kind in failures:
            engine.refused[f"t{n}"] = failures[kind]
        if kind == "stop":
            stopped.append(batch[-1])
    recorder = Recorder(refused=stopped)
    one = sink(engine, options={"actions": {"*.viewed": "ignore"}})
    answers = asyncio.run(one.send(batch, recorder))

    assert len(answers) == len(batch)
    assert all(answers[at] == recorder.answers.get(one.event_id, Released()) for at, one in enumerate(batch))
    by_key: dict[str, list[Answer]] = {}
    left: dict[str, dict[str, str]] = {"documents": {}, BUILDING: {}}
    for delivery, answer, (id_, key, kind, building) in zip(batch, answers, given_events, strict=True):
        if key is not None:
            by_key.setdefault(key, []).append(answer)
        if answer != Delivered() or kind == "ignore":
            continue
        for index in [BUILDING] if building else [BUILDING, "documents"]:
            if kind == "delete":
                left[index].pop(id_, None)
            else:
                left[index][id_] = json.loads(delivery.payload or "")["title"]
    for of_key in by_key.values():
        arrived = [answer == Delivered() for answer in of_key]
        assert arrived == sorted(arrived, reverse=True), "nothing arrives after what did not"
        assert sum(not isinstance(answer, Delivered | Released) for answer in of_key) <= 1
    spoilt = any(kind == "Reject" and building for _, _, kind, building in given_events)
    assert BUILDING in engine.indexes or spoilt
    assert {index: engine.titles(index) for index in engine.indexes} == {
        index: left[index] for index in engine.indexes
    }
