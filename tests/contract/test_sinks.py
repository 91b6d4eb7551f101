"""The contract on every sink that needs no server of its own."""

from __future__ import annotations

import asyncio
import io
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from uuid import UUID

import pytest
from aiohttp import web

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Delivered, Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.sinks.console import ConsoleSink
from relaybox.sinks.handler import HandlerSink
from relaybox.sinks.http.sink import HttpSink
from relaybox.sinks.memory import MemorySink
from relaybox.sinks.sink import AT_A_STRETCH, Answer, Regardless, Sink
from relaybox.testing.sink_contract import SinkContract, Trouble, make_delivery
from tests.waiting import PATIENCE, cancel

RAISED: dict[Trouble, BaseException] = {
    "retry": Retry("later"),
    "reject": Reject("never"),
    "unavailable": Unavailable("down"),
    "crash": SystemExit(3),
}
STATUS: dict[Trouble, int] = {"retry": 500, "reject": 422, "unavailable": 503}


class Script:
    """A destination that answers as requested. ``together`` is a barrier, of tasks or of threads."""

    sink: Sink

    def __init__(self) -> None:
        self._troubles: dict[UUID, Trouble] = {}
        self._awaited: set[UUID] = set()
        self._received: list[UUID] = []
        self._loop = asyncio.get_running_loop()
        self._first = asyncio.Event()
        self._arrived = asyncio.Event()
        self._arrived_in_threads = threading.Event()

    def trouble(self, event_id: UUID, kind: Trouble) -> None:
        self._troubles[event_id] = kind

    def together(self, event_ids: Sequence[UUID]) -> None:
        self._awaited = set(event_ids)

    async def arrival(self) -> None:
        await self._first.wait()

    def received(self) -> list[UUID]:
        return list(self._received)

    def arrive(self, event_id: UUID) -> Trouble | None:
        self._received.append(event_id)
        self._loop.call_soon_threadsafe(self._first.set)
        if self._awaited <= set(self._received):
            self._arrived.set()
            self._arrived_in_threads.set()
        return self._troubles.get(event_id)

    async def wait_for_all(self, event_id: UUID) -> None:
        """Wait for the others of ``together``."""
        if event_id in self._awaited:
            await self._arrived.wait()

    def raise_trouble(self, event_id: UUID) -> None:
        if trouble := self.arrive(event_id):
            raise RAISED[trouble]

    async def handle(self, event: Event) -> None:
        self.raise_trouble(event.id)
        await self.wait_for_all(event.id)

    def handle_in_thread(self, event: Event) -> None:
        self.raise_trouble(event.id)
        if event.id in self._awaited:
            self._arrived_in_threads.wait(PATIENCE)

    async def post(self, request: web.Request) -> web.Response:
        event_id = UUID(request.headers["webhook-id"])
        trouble = self.arrive(event_id)
        if trouble == "crash":
            assert request.transport is not None
            request.transport.abort()
        await self.wait_for_all(event_id)
        return web.Response(status=STATUS.get(trouble, 200) if trouble else 200)

    def release(self) -> None:
        self._arrived.set()
        self._arrived_in_threads.set()


@asynccontextmanager
async def opened(sink: Sink, script: Script) -> AsyncIterator[Script]:
    """Let a script have a sink; afterwards close it."""
    script.sink = sink
    yield script
    script.release()
    await sink.close()


@asynccontextmanager
async def serving(path: str, handle: Callable[[web.Request], Awaitable[web.Response]]) -> AsyncIterator[str]:
    """Yield the URL of an HTTP server."""
    app = web.Application()
    app.router.add_post(path, handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def shop(url: str, **settings: Any) -> Destination:
    return Destination("shop", url, timeout="60s", **settings)


class TestHandler(SinkContract):
    @pytest.fixture(params=["task", "thread"])
    async def harness(self, request: pytest.FixtureRequest) -> AsyncIterator[Script]:
        script = Script()
        handler = script.handle if request.param == "task" else script.handle_in_thread
        async with opened(HandlerSink(shop("handler:"), handler), script):
            yield script


class TestHttp(SinkContract):
    @pytest.fixture
    async def harness(self) -> AsyncIterator[Script]:
        script = Script()
        async with (
            serving("/events", script.post) as url,
            opened(HttpSink(shop(f"{url}/events", allow=["127.0.0.0/8"])), script),
        ):
            yield script


class ScriptedStream(io.StringIO):
    """A terminal that breaks where the script says so."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    def write(self, text: str) -> int:
        [event_id] = re.findall(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", text)
        trouble = self._script.arrive(UUID(event_id))
        if trouble == "crash":
            raise BrokenPipeError("gone")
        if trouble:
            raise RAISED[trouble]
        return super().write(text)


class TestConsole(SinkContract):
    waits = False

    @pytest.fixture
    async def harness(self) -> Script:
        script = Script()
        script.sink = ConsoleSink(Destination("shop", "console:"), ScriptedStream(script))
        return script


class ScriptedMemory(MemorySink):
    """A list that refuses where the script says so."""

    def __init__(self, script: Script) -> None:
        super().__init__()
        self._script = script

    async def deliver(self, delivery):  # type: ignore[no-untyped-def]
        trouble = self._script.arrive(delivery.event_id) if delivery.payload_encoding is None else None
        if trouble:
            self.fail_next(Unavailable("gone") if trouble == "crash" else RAISED[trouble])
        await super().deliver(delivery)


class TestMemory(SinkContract):
    waits = False

    @pytest.fixture
    async def harness(self) -> Script:
        script = Script()
        script.sink = ScriptedMemory(script)
        return script


class Reported(Regardless):
    """A ``Progress`` that records its calls."""

    def __init__(self) -> None:
        self.answers: list[tuple[UUID, Answer]] = []

    def report(self, delivery: Delivery, answer: Answer) -> None:
        self.answers.append((delivery.event_id, answer))


@pytest.mark.parametrize("turns", [2, 3, 5])
async def test_a_send_that_is_cancelled_between_two_stretches_has_reported_all_that_was_handled(
    turns: int,
) -> None:
    handled: list[UUID] = []
    progress = Reported()

    async def handler(event: Event) -> None:
        handled.append(event.id)

    sink = HandlerSink(Destination("shop", "handler:", concurrency=1), handler)
    batch = [make_delivery() for _ in range(10 * AT_A_STRETCH)]
    sending = asyncio.ensure_future(sink.send(batch, progress))
    for _ in range(turns):
        await asyncio.sleep(0)
    assert 0 < len(handled) < len(batch), "others have a turn"
    await cancel(sending)
    assert progress.answers == [(event_id, Delivered()) for event_id in handled]


async def test_a_line_on_the_console_is_one_line_of_bounded_width() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(Destination("shop", "console:"), stream)
    delivery = make_delivery(attempts=2)
    await sink.send([delivery, make_delivery(data=b"\xff"), make_delivery('"\x7f\u202e' + "x" * 9000 + '"')])
    plain, binary, wild = stream.getvalue().splitlines()
    assert plain == f'12:00:00 shop: order.paid Order/1 {delivery.event_id} attempt 2 {{"total": 42}}'
    assert binary.endswith("(1 bytes)")
    assert wild.isprintable()
    assert len(wild) == 201


async def test_a_memory_sink_fails_as_often_as_requested() -> None:
    sink = MemorySink()
    sink.fail_next(Retry("later"), times=2)
    sink.fail_next(Reject("never"))
    answers = await sink.send([make_delivery() for _ in range(4)])
    assert [type(answer) for answer in answers] == [Retry, Retry, Reject, Delivered]
    assert [event.payload for event in sink.events] == [{"total": 42}]
