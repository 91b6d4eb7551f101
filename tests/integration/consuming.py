"""What every consumer loop keeps, whatever its broker: a class of tests, and what it needs of a broker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from relaybox import Destination, Event, Outbox, Reject, Retry, Route
from relaybox.consumers.loop import Loop
from relaybox.envelope import JSON
from relaybox.inboxes.sql import Inbox
from relaybox.sinks.broker import Messages
from tests.integration.consumed import ASYNC_DRIVERS, Ground, delivery, driven, ground, insert

ROOT = Path(__file__).parents[2]


class Line(ABC):
    """A fresh topic, queue or stream of one broker, and what reads it."""

    kind: str
    place: str
    url: str
    sink: str
    """The URL of a destination that leads here."""

    @abstractmethod
    async def send(self, headers: dict[str, str], body: bytes, content_type: str = JSON) -> None:
        """Publish a message."""

    @abstractmethod
    def consumer(self, **options: Any) -> Loop:
        """A consumer of it, which is called ``books``."""

    @abstractmethod
    async def left(self) -> int:
        """How many messages ``books`` has not acknowledged, while no consumer runs."""


class Restarted(NamedTuple):
    """A line of a broker that can be stopped, and started with what it had."""

    line: Line
    stop: Callable[[], None]
    start: Callable[[], None]
    silent: Callable[[], AbstractContextManager[None]]
    """While in it, the broker keeps its connections and does nothing."""


async def publish(line: Line, event_type: str = "order.paid", format: Any = "json", **given: Any) -> UUID:
    """Publish an event as the sinks do."""
    made = delivery(event_type, **given)
    message = Messages(Destination("books", line.sink, format=format))(made)
    await line.send(message.headers, message.body, message.content_type)
    return made.event_id


@asynccontextmanager
async def running(consumer: Loop) -> AsyncIterator[Loop]:
    """Let it run; afterwards stop it, and see that it ends."""
    task = asyncio.create_task(consumer.run())
    try:
        yield consumer
    finally:
        consumer.stop()
        await asyncio.wait_for(task, 40)


async def until(met: Callable[[], bool], seconds: float = 40) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(seconds):
        while not met():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def handling(consumer: Loop) -> Loop:
    """With a handler that leaves an effect."""

    @consumer.on("order.*")
    async def effect(event: Event, connection: Any) -> None:
        await connection.execute(insert(event))

    return consumer


class ConsumerContract:
    """Subclasses have the fixtures ``line`` and ``restarted``."""

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, module_database: Callable[[str], str]) -> Iterator[Ground]:
        with ground(module_database("postgresql-18")) as made:
            yield made

    @pytest.fixture
    async def engine(self, place: Ground) -> AsyncIterator[AsyncEngine]:
        made = create_async_engine(driven(place.url, ASYNC_DRIVERS))
        yield made
        await made.dispose()

    @pytest.fixture
    def make(self, line: Line, engine: AsyncEngine) -> Callable[..., Loop]:
        """Makes a consumer on the test's database; what is to be tried again is so soon."""
        given = {"inbox": Inbox(), "transaction": engine, "backoff": {"base": "50ms", "cap": "1s"}}
        return lambda **options: line.consumer(**(given | options))

    async def test_events_take_effect_and_are_acknowledged(
        self, line: Line, place: Ground, make: Callable[..., Loop]
    ) -> None:
        sent = [str(await publish(line)) for _ in range(20)]
        async with running(handling(make())):
            await until(lambda: set(sent) <= set(dict(place.effects())))
        found = [event_id for event_id, _ in place.effects() if event_id in sent]
        assert sorted(found) == sorted(sent)
        assert await line.left() == 0

    async def test_a_message_that_comes_twice_takes_effect_once(
        self, line: Line, place: Ground, make: Callable[..., Loop]
    ) -> None:
        event_id = uuid4()
        for _ in range(3):
            await publish(line, event_id=event_id)
        last = str(await publish(line))
        async with running(handling(make(prefetch=1))):
            await until(lambda: last in dict(place.effects()))
        assert [found for found, _ in place.effects()].count(str(event_id)) == 1
        assert await line.left() == 0

    @pytest.mark.parametrize(
        "error", [RuntimeError("no"), Retry("not yet", after=0.05), asyncio.CancelledError()]
    )
    async def test_what_fails_is_tried_again_and_counted(
        self, line: Line, place: Ground, make: Callable[..., Loop], error: BaseException
    ) -> None:
        consumer = handling(make())
        attempts: list[int] = []

        @consumer.on("order.*")
        async def fail_twice(event: Event) -> None:
            attempts.append(event.attempt)
            if len(attempts) < 3:
                raise error

        sent = str(await publish(line))
        async with running(consumer):
            await until(lambda: sent in dict(place.effects()))
        assert attempts == [1, 2, 3]
        assert [found for found, _ in place.effects()].count(sent) == 1
        assert await line.left() == 0

    async def test_what_is_rejected_holds_up_nobody(
        self, line: Line, place: Ground, make: Callable[..., Loop]
    ) -> None:
        consumer = handling(make(prefetch=1))
        asked: list[str] = []

        @consumer.on("order.lost")
        async def reject(event: Event) -> None:
            asked.append(event.type)
            raise Reject("no such order")

        refused = str(await publish(line, "order.lost"))
        await line.send({}, b"{}")
        await line.send({"event-id": "nobody"}, b"{}")
        await line.send({"event-id": str(uuid4())}, b"{}")
        await line.send({"event-id": str(uuid4()), "event-type": "order.paid"}, b"\xff")
        await line.send({"event-id": str(uuid4()), "event-type": "order.paid"}, b"<a/>", "text/xml")
        await publish(line, "customer.moved")
        before, sent = place.marks(), str(await publish(line))
        async with running(consumer):
            await until(lambda: sent in dict(place.effects()))
        assert asked == ["order.lost"]
        assert refused not in dict(place.effects())
        assert place.marks() == before + 1
        assert await line.left() == 0

    async def test_an_event_is_what_was_sent(self, line: Line, make: Callable[..., Loop]) -> None:
        consumer = make(prefetch=1)
        events: list[Event] = []

        @consumer.on("*")
        async def keep(event: Event) -> None:
            events.append(event)

        for format in ("json", "flat", "cloudevents", "payload"):
            await publish(line, format=format, headers='{"tenant":"acme"}')
        await publish(line, format="payload", payload=None, payload_data=b"\0\xff", payload_encoding="binary")
        async with running(consumer):
            await until(lambda: len(events) == 5)
        about = {(event.type, event.aggregate_type, event.aggregate_id) for event in events}
        assert about == {("order.paid", "Order", "7")}
        payloads = [event.payload for event in events]
        assert payloads.count({"total": 42}) == 4
        assert payloads.count(b"\0\xff") == 1
        assert sum(event.headers.get("tenant") == "acme" for event in events) == 4
        assert not any("event-id" in event.headers for event in events)

    async def test_a_handler_that_hangs_is_given_up_and_its_message_comes_again(
        self, line: Line, place: Ground, make: Callable[..., Loop], caplog: pytest.LogCaptureFixture
    ) -> None:
        consumer = make(transaction=place.engine, timeout="300ms")
        called, go_on = [], threading.Event()

        @consumer.on("order.*")
        def hang(event: Event, connection: Any) -> None:
            called.append(event.attempt)
            connection.execute(insert(event))
            go_on.wait(60)

        sent = str(await publish(line))
        async with running(consumer):
            try:
                await until(lambda: "has not returned yet" in caplog.text)
            finally:
                go_on.set()
            async with asyncio.timeout(30):
                while await line.left():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        assert "took longer than 0.3s" in caplog.text
        assert called == [1]
        assert [found for found, _ in place.effects()].count(sent) == 1

    async def test_a_stop_finishes_what_is_in_hand(
        self, line: Line, place: Ground, make: Callable[..., Loop]
    ) -> None:
        consumer = make(prefetch=1)
        begun, go_on = asyncio.Event(), asyncio.Event()

        @consumer.on("order.*")
        async def slow(event: Event, connection: Any) -> None:
            begun.set()
            await go_on.wait()
            await connection.execute(insert(event))

        sent = str(await publish(line))
        await publish(line)
        async with running(consumer):
            await asyncio.wait_for(begun.wait(), 40)
            consumer.stop()
            await asyncio.sleep(0)
            go_on.set()
        assert sent in dict(place.effects())
        assert await line.left() == 1

    async def test_a_stop_does_not_wait_for_the_next_attempt(
        self, line: Line, make: Callable[..., Loop]
    ) -> None:
        consumer = make()
        failed = asyncio.Event()

        @consumer.on("order.*")
        async def fail(event: Event) -> None:
            failed.set()
            raise Retry("much later", after=3600)

        await publish(line)
        async with running(consumer):
            await asyncio.wait_for(failed.wait(), 40)
        assert await line.left() == 1

    async def test_a_consumer_that_dies_before_it_acknowledges_leaves_one_effect(
        self, line: Line, place: Ground, make: Callable[..., Loop]
    ) -> None:
        sent = str(await publish(line))
        command = [sys.executable, "-m", "tests.integration.mortal_consumer"]
        died = await asyncio.to_thread(
            subprocess.run,
            [*command, line.kind, line.url, line.place, place.url],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            timeout=60,
        )
        assert died.returncode == -signal.SIGKILL, died.stderr.decode()
        assert [found for found, _ in place.effects()].count(sent) == 1
        again: list[str] = []
        consumer = handling(make())
        judge = consumer.ahandle

        async def watch(event: Event) -> Any:
            verdict = await judge(event)
            again.append(str(event.id))
            return verdict

        consumer.ahandle = watch  # type: ignore[method-assign]
        async with running(consumer):
            await until(lambda: sent in again, 60)
        assert [found for found, _ in place.effects()].count(sent) == 1
        assert await line.left() == 0

    @pytest.mark.slow
    async def test_a_broker_that_restarts_is_found_again(
        self, restarted: Restarted, place: Ground, engine: AsyncEngine
    ) -> None:
        line = restarted.line
        options = {"inbox": Inbox(), "transaction": engine, "backoff": {"base": "100ms", "cap": "1s"}}
        first = str(await publish(line))
        async with running(handling(line.consumer(**options))):
            await until(lambda: first in dict(place.effects()))
            await asyncio.to_thread(restarted.stop)
            await asyncio.sleep(0.5)
            await asyncio.to_thread(restarted.start)
            second = str(await publish(line))
            await until(lambda: second in dict(place.effects()), 60)
            # The first was done, and its acknowledgement may have been lost with the broker: it comes again.
            async with asyncio.timeout(30):
                while await line.left():  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
        assert [found for found, _ in place.effects()].count(first) == 1

    @pytest.mark.slow
    async def test_a_broker_that_says_nothing_does_not_hold_up_the_stop(
        self, restarted: Restarted, place: Ground, engine: AsyncEngine
    ) -> None:
        line = restarted.line
        sent = str(await publish(line))
        consumer = handling(line.consumer(inbox=Inbox(), transaction=engine))
        running = asyncio.create_task(consumer.run())
        await until(lambda: sent in dict(place.effects()))
        with restarted.silent():
            consumer.stop()
            await asyncio.wait_for(running, 30)
        assert [found for found, _ in place.effects()].count(sent) == 1

    @pytest.mark.slow
    async def test_what_a_relay_sends_takes_effect_once_and_in_order(
        self, line: Line, place: Ground, make: Callable[..., Loop], fresh_database: Callable[[str], str]
    ) -> None:
        outbox = Outbox(
            fresh_database("postgresql-18"),
            destinations=[Destination("line", line.sink, ordered=True)],
            routes=[Route("*", to="line")],
        )
        await outbox.amigrate()
        engine = create_async_engine(driven(outbox.settings.database, ASYNC_DRIVERS))
        async with engine.begin() as connection:
            for n in range(200):
                await outbox.aemit(connection, "Order", n % 10, "order.step", {"n": n})
        await engine.dispose()
        await outbox.adrain()
        consumer = make(prefetch=1, consumer=f"order-{uuid4()}")

        @consumer.on("order.step")
        async def step(event: Event, connection: Any) -> None:
            await connection.execute(insert(event, f"{event.aggregate_id}:{event.payload['n']}"))

        def found() -> list[list[str]]:
            return [note.split(":") for _, note in place.effects() if ":" in note]

        async with running(consumer):
            await until(lambda: len(found()) >= 200)
        by_key: defaultdict[str, list[int]] = defaultdict(list)
        for key, n in found():
            by_key[key].append(int(n))
        assert by_key == {str(key): list(range(key, 200, 10)) for key in range(10)}
        assert await line.left() == 0
