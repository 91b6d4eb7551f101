"""Server-sent events: one round for all, and nothing left behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from relaybox import Outbox
from relaybox.errors import StoreError
from relaybox.operate.admin import Stats
from relaybox.stores.ledger import Counts
from relaybox.web import api
from relaybox.web import live as module
from relaybox.web.live import Live, digest
from tests.waiting import PATIENCE, await_for


class Service:
    """An admin that counts its questions."""

    def __init__(self) -> None:
        self.asked = 0
        self.failed = 0
        self.broken = False

    async def stats(self) -> Stats:
        self.asked += 1
        if self.broken:
            raise StoreError("postgresql://ann:secret@db is away")
        return Stats(Counts(failed=self.failed), (), ())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND", 0.02)


@pytest.fixture
def service() -> Any:
    return Service()


async def received(stream: Any, word: str) -> str:
    async with asyncio.timeout(PATIENCE):
        async for message in stream:
            if word in message:
                return str(message)
    raise AssertionError(f"the stream ended without {word!r}")


async def test_one_round_serves_all_until_the_last(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUND", 3600.0)
    live = Live()
    streams = [live.stream(service) for _ in range(5)]
    for stream in streams:
        assert "retry" in await received(stream, "retry")
    await received(streams[0], '"failed": 0')
    assert service.asked == 1
    rounds = live._task
    for stream in streams:
        await stream.aclose()
    assert live._task is None
    assert rounds is not None
    await await_for(rounds.done)


async def test_only_changes_are_sent(service: Any) -> None:
    stream = Live().stream(service)
    await received(stream, '"failed": 0')
    waiting = asyncio.create_task(received(stream, "event: stats"))
    await await_for(lambda: service.asked > 5)
    assert not waiting.done()
    service.failed = 1
    # The mark is of what destinations have; the total is only for those who read along.
    assert '"failed": 1' in await waiting
    await stream.aclose()


async def test_a_database_that_is_down_is_reported_without_its_secrets_and_found_again(service: Any) -> None:
    live = Live()
    service.broken = True
    stream = live.stream(service)
    trouble = await received(stream, "event: trouble")
    assert "secret" not in trouble
    service.broken = False
    await received(stream, "event: stats")
    await stream.aclose()


async def test_a_shutdown_ends_every_stream(service: Any) -> None:
    live = Live()
    streams = [live.stream(service) for _ in range(3)]

    async def drained(stream: Any) -> int:
        return len([message async for message in stream])

    running = [asyncio.create_task(drained(stream)) for stream in streams]
    await await_for(lambda: len(live._listeners) == 3)
    live.close()
    async with asyncio.timeout(PATIENCE):
        assert min(await asyncio.gather(*running)) >= 1
    assert live.full


async def test_an_application_that_was_closed_takes_streams_again() -> None:
    web = api(Outbox("sqlite://"))
    for _ in range(2):
        async with web:
            live = web.live
            assert not live.full
            web.end_streams()
            assert web.live.full
        assert live.closed


async def test_a_stream_beats_and_ends_by_itself(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT", 0.01)
    live = Live()
    stream = live.stream(service)
    for _ in range(2):
        assert await received(stream, "still here") == ": still here\n\n"
    await stream.aclose()
    monkeypatch.setattr(module, "LIFE", 0.05)
    async with asyncio.timeout(PATIENCE):
        assert [message async for message in live.stream(service)]
    assert live._listeners == set()


async def test_there_is_a_cap_on_clients(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 2)
    live = Live()
    streams = [live.stream(service) for _ in range(2)]
    for stream in streams:
        await received(stream, "retry")
    app, state = SimpleNamespace(live=live), SimpleNamespace(admin=service)
    request: Any = SimpleNamespace(query_params={}, app=app, state=state)
    answer = await module.live(request)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "60"
    for stream in streams:
        await stream.aclose()
    request.query_params = {"topic": "secrets"}
    assert (await module.live(request)).status_code == 400


async def test_a_client_that_does_not_read_holds_up_nobody(service: Any) -> None:
    live = Live()
    slow, quick = live.stream(service), live.stream(service)
    await received(slow, "retry")
    await received(quick, '"failed": 0')
    for number in range(1, 6):
        service.failed = number
        await received(quick, f'"failed": {number}')
    await slow.aclose()
    await quick.aclose()


def test_a_digest_is_the_same_for_the_same() -> None:
    assert digest(Stats(Counts(), (), ())) == digest(Stats(Counts(oldest_seconds=5.0), (), ()))


async def test_no_more_clients_are_taken_than_the_cap(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaybox.web.live.MOST", 2)
    live = Live()
    streams = [live.stream(service) for _ in range(3)]
    assert not live.full
    for stream in streams:
        await received(stream, "retry")
    assert len(live._listeners) == 2
    with pytest.raises(StopAsyncIteration):
        await anext(streams[2])
    for stream in streams:
        await stream.aclose()
    assert not live._listeners
