"""What every consumer loop keeps, whatever its broker: a class of tests, and what it needs of a broker."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import pytest
from sqlalchemy.ext.asyncio import create_async_engine

from relaybox import Destination, Event, Outbox, Reject, Retry, Route
from relaybox.receive.consumer import Done
from relaybox.receive.consumers.loop import Loop
from relaybox.receive.inbox import Inbox
from relaybox.sinks.broker import Messages
from relaybox.wire.envelope import JSON
from tests.databases import async_url
from tests.integration.consumed import Ground, delivery, ground, insert
from tests.waiting import PATIENCE, await_for

ROOT = Path(__file__).parents[2]


SETTINGS = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 500}
"""For Kafka, so that another soon learns that this one is gone."""


def make_consumer(kind: str, url: str, place: str, **options: Any) -> Loop:
    """Return a consumer of a broker's topic, queue or stream, called ``books``."""
    if kind == "kafka":
        from relaybox.receive.consumers.kafka import KafkaConsumer

        given = {"group": f"books-{place}", "settings": SETTINGS, **options}
        return KafkaConsumer(url.removeprefix("kafka://"), place, **given)
    if kind == "rabbitmq":
        from relaybox.receive.consumers.rabbitmq import RabbitmqConsumer

        return RabbitmqConsumer(url, place, **options)
    from relaybox.receive.consumers.nats import NatsConsumer

    return NatsConsumer(url, f"{place}.>", durable="books", **options)


class Line:
    """A fresh topic, queue or stream of one broker, and what reads it."""

    kind: str
    place: str
    url: str
    sink: str
    """The URL of a destination that leads here."""

    async def send(self, headers: dict[str, str], body: bytes, content_type: str = JSON) -> None:
        """Publish a message."""
        raise NotImplementedError

    def consumer(self, **options: Any) -> Loop:
        """Make a consumer of it, which is called ``books``."""
        return make_consumer(self.kind, self.url, self.place, **({"consumer": "books"} | options))

    async def left(self) -> int:
        """Return how many messages ``books`` has not acknowledged."""
        raise NotImplementedError

    async def leaves(self, count: int) -> None:
        """Wait until so many are left: what was given back may be on its way for a moment."""

        async def found() -> bool:
            return await self.left() == count

        await await_for(found, f"{count} left")


class Restarted(NamedTuple):
    """A line of a broker that can be stopped, and started with what it had."""

    line: Line
    stop: Callable[[], None]
    start: Callable[[], None]
    silent: Callable[[], AbstractContextManager[None]]
    """While in it, the broker keeps its connections and does nothing."""


@asynccontextmanager
async def running(consumer: Loop) -> AsyncIterator[Loop]:
    """Let it run; afterwards stop it, and see that it ends."""
    task = asyncio.create_task(consumer.run())
    try:
        yield consumer
    finally:
        consumer.stop()
        await asyncio.wait_for(task, PATIENCE)


async def until(met: Callable[[], bool], seconds: float = PATIENCE) -> None:
    """Wait for a condition."""
    await await_for(met, seconds=seconds)


def handling(consumer: Loop) -> Loop:
    """Add a handler that leaves an effect."""

    @consumer.on("order.*")
    async def effect(event: Event, connection: Any) -> None:
        await connection.execute(insert(event))

    return consumer


@dataclass(frozen=True, slots=True)
class Bench:
    """A line, a database, and consumers of the one on the other; what fails is soon tried again."""

    line: Any
    place: Ground
    options: dict[str, Any]

    def make(self, **options: Any) -> Loop:
        return self.line.consumer(**(self.options | options))

    async def publish(self, event_type: str = "order.paid", format: Any = "json", **given: Any) -> str:
        """Publish an event as the sinks do, and return its id."""
        made = delivery(event_type, **given)
        message = Messages(Destination("books", self.line.sink, format=format))(made)
        await self.line.send(message.headers, message.body, message.content_type)
        return str(made.event_id)

    async def effects(self, *event_ids: str) -> None:
        """Wait until these events took effect."""
        await await_for(lambda: set(event_ids) <= set(dict(self.place.effects())), "effects")


class ConsumerContract:
    """Subclasses have the fixtures ``line`` and ``restarted``."""

    @pytest.fixture(scope="class")
    @classmethod
    def place(cls, module_database: Callable[[str], str]) -> Iterator[Ground]:
        with ground(module_database("postgresql-18")) as made:
            yield made

    @pytest.fixture
    async def options(self, place: Ground) -> AsyncIterator[dict[str, Any]]:
        engine = create_async_engine(async_url(place.url))
        yield {"inbox": Inbox(), "transaction": engine, "backoff": {"base": "50ms", "cap": "1s"}}
        await engine.dispose()

    @pytest.fixture
    def bench(self, line: Line, place: Ground, options: dict[str, Any]) -> Bench:
        return Bench(line, place, options)

    async def test_events_take_effect_and_are_acknowledged(self, bench: Bench) -> None:
        sent = [await bench.publish() for _ in range(20)]
        async with running(handling(bench.make())):
            await bench.effects(*sent)
        found = [event_id for event_id, _ in bench.place.effects() if event_id in sent]
        assert sorted(found) == sorted(sent)
        await bench.line.leaves(0)

    async def test_a_message_that_comes_twice_takes_effect_once(self, bench: Bench) -> None:
        event_id = uuid4()
        for _ in range(3):
            await bench.publish(event_id=event_id)
        last = await bench.publish()
        async with running(handling(bench.make(prefetch=1))):
            await bench.effects(last)
        assert bench.place.count(str(event_id)) == 1
        await bench.line.leaves(0)

    @pytest.mark.parametrize(
        "error", [RuntimeError("no"), Retry("not yet", after=0.05), asyncio.CancelledError()]
    )
    async def test_what_fails_is_tried_again_and_counted(self, bench: Bench, error: BaseException) -> None:
        consumer = handling(bench.make())
        attempts: list[int] = []

        @consumer.on("order.*")
        async def fail_twice(event: Event) -> None:
            attempts.append(event.attempt)
            if len(attempts) < 3:
                raise error

        sent = await bench.publish()
        async with running(consumer):
            await bench.effects(sent)
        assert attempts == [1, 2, 3]
        assert bench.place.count(sent) == 1
        await bench.line.leaves(0)

    async def test_what_is_rejected_holds_up_nobody(self, bench: Bench) -> None:
        consumer, line = handling(bench.make(prefetch=1)), bench.line
        asked: list[str] = []

        @consumer.on("order.lost")
        async def reject(event: Event) -> None:
            asked.append(event.type)
            raise Reject("no such order")

        refused = await bench.publish("order.lost")
        await line.send({}, b"{}")
        await line.send({"event-id": "nobody"}, b"{}")
        await line.send({"event-id": str(uuid4())}, b"{}")
        await line.send({"event-id": str(uuid4()), "event-type": "order.paid"}, b"\xff")
        await line.send({"event-id": str(uuid4()), "event-type": "order.paid"}, b"<a/>", "text/xml")
        await bench.publish("customer.moved")
        before, sent = bench.place.marks(), await bench.publish()
        async with running(consumer):
            await bench.effects(sent)
        assert asked == ["order.lost"]
        assert bench.place.count(refused) == 0
        assert bench.place.marks() == before + 1
        await line.leaves(0)

    async def test_an_event_is_what_was_sent(self, bench: Bench) -> None:
        consumer = bench.make(prefetch=1)
        events: list[Event] = []

        @consumer.on("*")
        async def keep(event: Event) -> None:
            events.append(event)

        for format in ("json", "flat", "cloudevents", "payload"):
            await bench.publish(format=format, headers='{"tenant":"acme"}')
        binary = {"payload": None, "payload_data": b"\0\xff", "payload_encoding": "binary"}
        await bench.publish(format="payload", **binary)
        async with running(consumer):
            await await_for(lambda: len(events) == 5)
        about = {(event.type, event.aggregate_type, event.aggregate_id) for event in events}
        assert about == {("order.paid", "Order", "7")}
        payloads = [event.payload for event in events]
        assert payloads.count({"total": 42}) == 4
        assert payloads.count(b"\0\xff") == 1
        assert sum(event.headers.get("tenant") == "acme" for event in events) == 4
        assert not any("event-id" in event.headers for event in events)

    async def test_a_handler_that_hangs_is_given_up_and_its_message_comes_again(
        self, bench: Bench, caplog: pytest.LogCaptureFixture
    ) -> None:
        consumer = bench.make(transaction=bench.place.engine, timeout="300ms")
        called, go_on = [], threading.Event()

        @consumer.on("order.*")
        def hang(event: Event, connection: Any) -> None:
            called.append(event.attempt)
            connection.execute(insert(event))
            go_on.wait(PATIENCE)

        sent = await bench.publish()
        async with running(consumer):
            try:
                await await_for(lambda: "has not returned yet" in caplog.text)
            finally:
                go_on.set()
            await bench.line.leaves(0)
        assert "took longer than 0.3s" in caplog.text
        assert called == [1]
        assert bench.place.count(sent) == 1

    async def test_a_stop_finishes_what_is_in_hand(self, bench: Bench) -> None:
        consumer = bench.make(prefetch=1)
        begun, go_on = asyncio.Event(), asyncio.Event()

        @consumer.on("order.*")
        async def slow(event: Event, connection: Any) -> None:
            begun.set()
            await go_on.wait()
            await connection.execute(insert(event))

        sent = await bench.publish()
        await bench.publish()
        async with running(consumer):
            await asyncio.wait_for(begun.wait(), PATIENCE)
            consumer.stop()
            await asyncio.sleep(0)
            go_on.set()
        assert bench.place.count(sent) == 1
        await bench.line.leaves(1)

    async def test_a_stop_does_not_wait_for_the_next_attempt(self, bench: Bench) -> None:
        consumer = bench.make()
        failed = asyncio.Event()

        @consumer.on("order.*")
        async def fail(event: Event) -> None:
            failed.set()
            raise Retry("much later", after=3600)

        await bench.publish()
        async with running(consumer):
            await asyncio.wait_for(failed.wait(), PATIENCE)
        await bench.line.leaves(1)

    async def test_a_consumer_that_dies_before_it_acknowledges_leaves_one_effect(self, bench: Bench) -> None:
        sent, line = await bench.publish(), bench.line
        command = [sys.executable, "-m", "tests.integration.consuming"]
        died = await asyncio.to_thread(
            subprocess.run,
            [*command, line.kind, line.url, line.place, bench.place.url],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"},
            capture_output=True,
            timeout=PATIENCE,
        )
        assert died.returncode == -signal.SIGKILL, died.stderr.decode()
        assert bench.place.count(sent) == 1
        again: list[str] = []
        consumer = handling(bench.make())
        judge = consumer.ahandle

        async def watch(event: Event) -> Any:
            verdict = await judge(event)
            again.append(str(event.id))
            return verdict

        consumer.ahandle = watch  # type: ignore[method-assign]
        async with running(consumer):
            await await_for(lambda: sent in again, "it comes again")
        assert bench.place.count(sent) == 1
        await line.leaves(0)

    @pytest.mark.full
    async def test_a_broker_that_restarts_is_found_again(
        self, restarted: Restarted, place: Ground, options: dict[str, Any]
    ) -> None:
        bench = Bench(restarted.line, place, options)
        first = await bench.publish()
        async with running(handling(bench.make())):
            await bench.effects(first)
            await asyncio.to_thread(restarted.stop)
            await asyncio.to_thread(restarted.start)
            second = await bench.publish()
            await bench.effects(second)
            # The first was done, and its acknowledgement may have been lost with the broker: it comes again.
            await bench.line.leaves(0)
        assert place.count(first) == 1

    @pytest.mark.full
    async def test_a_broker_that_says_nothing_does_not_hold_up_the_stop(
        self, restarted: Restarted, place: Ground, options: dict[str, Any]
    ) -> None:
        bench = Bench(restarted.line, place, options)
        sent = await bench.publish()
        consumer = handling(bench.make())
        task = asyncio.create_task(consumer.run())
        await bench.effects(sent)
        with restarted.silent():
            consumer.stop()
            await asyncio.wait_for(task, PATIENCE)
        assert place.count(sent) == 1

    @pytest.mark.full
    async def test_what_a_relay_sends_takes_effect_once_and_in_order(
        self, bench: Bench, migrated_database: Callable[[str], str]
    ) -> None:
        outbox = Outbox(
            migrated_database("postgresql-18"),
            destinations=[Destination("line", bench.line.sink, ordered=True)],
            routes=[Route("*", to="line")],
        )
        engine = create_async_engine(async_url(outbox.settings.database))
        async with engine.begin() as connection:
            for n in range(200):
                await outbox.aemit(connection, "Order", n % 10, "order.step", {"n": n})
        await engine.dispose()
        await outbox.adrain()
        consumer = bench.make(prefetch=1, consumer=f"order-{uuid4()}")

        @consumer.on("order.step")
        async def step(event: Event, connection: Any) -> None:
            await connection.execute(insert(event, f"{event.aggregate_id}:{event.payload['n']}"))

        def found() -> list[list[str]]:
            return [note.split(":") for _, note in bench.place.effects() if ":" in note]

        async with running(consumer):
            await await_for(lambda: len(found()) >= 200)
        by_key: defaultdict[str, list[int]] = defaultdict(list)
        for key, n in found():
            by_key[key].append(int(n))
        assert by_key == {str(key): list(range(key, 200, 10)) for key in range(10)}
        await bench.line.leaves(0)


def main(kind: str, url: str, place: str, database: str) -> None:
    """Consume until the first message is done, and die between its commit and its acknowledgement."""
    engine = create_async_engine(async_url(database))
    made = handling(make_consumer(kind, url, place, inbox=Inbox(), transaction=engine, consumer="books"))
    handle = made.ahandle

    async def handle_and_die(event: Event) -> Any:
        verdict = await handle(event)
        assert verdict == Done()
        os.kill(os.getpid(), signal.SIGKILL)

    made.ahandle = handle_and_die  # type: ignore[method-assign]
    made.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
