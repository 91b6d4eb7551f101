"""Answers that Algolia never gives, or never should: no event fails by them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from relaybox.core.outcome import Reject, Throttled, Unavailable
from relaybox.core.settings import Destination
from relaybox.search.algolia.engine import AlgoliaEngine, open_engine
from relaybox.search.algolia.hosts import application_of
from relaybox.search.engine import Change
from relaybox.sinks.sink import Answer
from tests.integration.receivers import Receiver, answer, answering, listening, read_request

KEY = "verysecret"
TAKEN = answer("200 OK", b'{"taskID": 1, "objectIDs": ["1", "2"]}')
CHANGES = [Change("1", {"id": "1"}, 1), Change("2", {"id": "2"}, 2)]


def destination(receiver: Receiver, timeout: str = "10s") -> Destination:
    options = {"host": f"127.0.0.1:{receiver.port}", "tls": False}
    return Destination("search", "algolia://APP", auth=KEY, timeout=timeout, options=options)


@asynccontextmanager
async def engine_at(receiver: Receiver, **given: str) -> AsyncIterator[AlgoliaEngine]:
    engine = open_engine(destination(receiver, **given))
    try:
        yield engine
    finally:
        await engine.close()


async def answered(*answers: bytes) -> Sequence[Answer]:
    """Write two changes, and answer this."""
    async with answering(*answers) as receiver, engine_at(receiver) as engine:
        return await engine.write("documents", CHANGES)


PLAIN = b"<html>The plain HTTP request was sent to HTTPS port</html>"


@pytest.mark.parametrize(
    "answers",
    [
        *([answer("400 Bad Request", body)] for body in (PLAIN, b"{}", b'["Bad Request"]')),
        *([answer("200 OK", body)] for body in (b"{}", b"[]", b'{"taskID": "soon"}', b'{"taskID": "\xff"}')),
        *([TAKEN, answer("200 OK", body)] for body in (b"{}", b"[]")),
        [TAKEN, answer("400 Bad Request", b"{}")],
    ],
)
async def test_somebody_else_who_answers_fails_no_event(answers: Sequence[bytes]) -> None:
    results = await answered(*answers)
    assert [type(one) for one in results] == [Unavailable] * 2


@pytest.mark.parametrize("body", [b"[]", b"{", b'"\xff"'])
async def test_an_index_that_somebody_else_tells_of_is_unavailable(body: bytes) -> None:
    async with answering(answer("200 OK", body)) as receiver, engine_at(receiver) as engine:
        with pytest.raises(Unavailable):
            await engine.present(["documents"])


async def test_a_message_that_repeats_the_key_does_not_show_it() -> None:
    said = json.dumps({"message": f"Record quota exceeded for\n{KEY}{'!' * 10_000}"}).encode()
    [first, _] = await answered(answer("403 Forbidden", said))
    assert isinstance(first, Throttled), "no event is to blame, even while others are taken"
    assert "quota exceeded for ***!" in first.reason
    assert KEY not in first.reason
    assert len(first.reason) < 300


async def test_a_place_that_makes_no_sense_names_no_record() -> None:
    said = json.dumps({"message": "Invalid record", "position": "first"}).encode()
    results = await answered(answer("400 Bad Request", said))
    assert [type(one) for one in results] == [Reject] * 2


async def test_bad_records_are_not_looked_for_without_end() -> None:
    said = answer("400 Bad Request", b'{"message": "Invalid record"}')

    async def talk(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            receiver.requests.append(await read_request(reader))
            await asyncio.sleep(0.05)
            writer.write(said)

    async with listening(talk) as receiver, engine_at(receiver, timeout="500ms") as engine:
        results = await engine.write("documents", [Change(str(n), {"id": str(n)}, n) for n in range(256)])
    assert {type(one) for one in results} == {Reject, Unavailable}


@pytest.mark.parametrize("name", ["", ".", "..", "*"])
async def test_a_name_that_would_mean_something_else_is_not_an_index(name: str) -> None:
    async with answering(TAKEN) as receiver, engine_at(receiver) as engine:
        with pytest.raises(Reject, match="no index of Algolia can be called"):
            await engine.present([name])
    assert receiver.requests == []


async def test_which_indexes_exist_is_not_asked_of_a_copy_that_may_be_behind() -> None:
    async with answering(answer("200 OK", b'{"userData": {"relaybox-index": "m"}}')) as receiver:
        application = application_of(destination(receiver))
        engine = AlgoliaEngine(application._replace(reading=("http://127.0.0.1:1",)), 10.0)
        assert await engine.present(["documents"]) == {"documents": "m"}
        await engine.close()
