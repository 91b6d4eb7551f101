"""Drain into brokers, against a bare producer loop of the same client: ``python -m benchmarks.brokers``.

Both send the same bodies to the same broker with the same durability: an idempotent producer with acks=all,
persistent messages that are confirmed, acknowledged publishes into a stream on file, or XADD into a server
with ``appendfsync always``. Relay and loop run in separate processes, in turns, and the arrived messages are
counted. For comparison a relay drains into a function that does nothing: no broker can make it faster than
that.

A relay reads from the store and sends through the client in one thread of Python. It is expected to take the
time of both, one after the other. The sink takes the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import aio_pika
import nats
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from nats.js.api import StreamConfig
from redis.asyncio import Redis
from uvloop import new_event_loop

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, fill, interleave, outbox, run, server
from benchmarks.parts.http import made_bodies
from benchmarks.process import PATIENCE, SLOWEST, apart, begin
from relaybox import Destination, Outbox, Route
from tests.servers import kafka, rabbitmq, redis
from tests.servers import nats as nats_server

BAR = 0.5
OF_STORE = 0.8
"""A drain this close to a drain into nothing is limited by the store."""
AT_ONCE = 50
"""Messages in flight in a bare loop: the default ``concurrency`` of a destination."""
PIPELINE = 500
KEYS = 1_000
NAME = "orders"


class Broker(Protocol):
    """Fill, empty and count one broker."""

    def destination(self) -> str:
        """Return the URL of the sink."""
        ...

    async def clear(self) -> None:
        """Create the empty topic, queue or stream."""
        ...

    async def count(self) -> int:
        """Return the number of messages."""
        ...

    async def bare(self, bodies: Sequence[bytes]) -> float:
        """Send the bodies with the client alone; return the seconds."""
        ...


@dataclass(frozen=True)
class Kafka:
    """One topic of four partitions, created again for each turn."""

    url: str
    bootstrap: str

    def destination(self) -> str:
        return f"{self.url}/{NAME}"

    async def clear(self) -> None:
        await asyncio.to_thread(self._clear)

    def _clear(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        if NAME in admin.list_topics(timeout=10).topics:
            admin.delete_topics([NAME])[NAME].result()
            while NAME in admin.list_topics(timeout=10).topics:
                time.sleep(0.05)
        admin.create_topics([NewTopic(NAME, 4, 1)])[NAME].result()
        while len(admin.list_topics(NAME, timeout=10).topics[NAME].partitions) < 4:
            time.sleep(0.05)

    async def count(self) -> int:
        return await asyncio.to_thread(self._count)

    def _count(self) -> int:
        consumer = Consumer({"bootstrap.servers": self.bootstrap, "group.id": "count"})
        marks = [consumer.get_watermark_offsets(TopicPartition(NAME, at)) for at in range(4)]
        consumer.close()
        return sum(high - low for low, high in marks)

    async def bare(self, bodies: Sequence[bytes]) -> float:
        producer = Producer(
            {"bootstrap.servers": self.bootstrap, "enable.idempotence": True, "acks": "all", "linger.ms": 1}
        )
        failed: list[object] = []

        def record(error: object, _: object) -> None:
            if error is not None:
                failed.append(error)

        began = begin()
        for at, body in enumerate(bodies):
            producer.produce(NAME, body, str(at % KEYS), on_delivery=record)
            producer.poll(0)
        if producer.flush(PATIENCE) or failed:
            raise RuntimeError(f"not all was taken: {failed[:1]}")
        return time.monotonic() - began


@dataclass(frozen=True)
class RabbitMQ:
    """A durable queue behind the default exchange."""

    url: str

    def destination(self) -> str:
        return f"{self.url}?routing_key={NAME}"

    @asynccontextmanager
    async def _queue(self) -> AsyncIterator[aio_pika.abc.AbstractQueue]:
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel()
            yield await channel.declare_queue(NAME, durable=True)

    async def clear(self) -> None:
        async with self._queue() as queue:
            await queue.purge()

    async def count(self) -> int:
        async with self._queue() as queue:
            return queue.declaration_result.message_count or 0

    async def bare(self, bodies: Sequence[bytes]) -> float:
        left = list(bodies)
        async with await aio_pika.connect(self.url) as connection:
            channel = await connection.channel(publisher_confirms=True)
            exchange = channel.default_exchange

            async def work() -> None:
                while left:
                    message = aio_pika.Message(left.pop(), delivery_mode=aio_pika.DeliveryMode.PERSISTENT)
                    await exchange.publish(message, NAME, mandatory=True)

            return await _together(work)


@dataclass(frozen=True)
class Nats:
    """A stream on file."""

    url: str

    def destination(self) -> str:
        return f"{self.url}/{NAME}"

    async def clear(self) -> None:
        async with await nats.connect(self.url) as client:
            stream = client.jetstream()
            if NAME in [info.config.name for info in await stream.streams_info()]:
                await stream.delete_stream(NAME)
            await stream.add_stream(StreamConfig(name=NAME, subjects=[NAME]))

    async def count(self) -> int:
        async with await nats.connect(self.url) as client:
            return (await client.jetstream().stream_info(NAME)).state.messages

    async def bare(self, bodies: Sequence[bytes]) -> float:
        left = list(enumerate(bodies))
        async with await nats.connect(self.url) as client:
            stream = client.jetstream()

            async def work() -> None:
                while left:
                    number, body = left.pop()
                    await stream.publish(NAME, body, headers={"Nats-Msg-Id": str(number)})

            return await _together(work)


@dataclass(frozen=True)
class Streams:
    """A Redis stream."""

    url: str

    def destination(self) -> str:
        return f"{self.url}?stream={NAME}"

    async def clear(self) -> None:
        async with Redis.from_url(self.url) as client:
            await client.delete(NAME)

    async def count(self) -> int:
        async with Redis.from_url(self.url) as client:
            return int(await client.xlen(NAME))

    async def bare(self, bodies: Sequence[bytes]) -> float:
        async with Redis.from_url(self.url) as client:
            began = begin()
            for start in range(0, len(bodies), PIPELINE):
                pipeline = client.pipeline(transaction=False)
                for body in bodies[start : start + PIPELINE]:
                    pipeline.xadd(NAME, {"data": body})
                await pipeline.execute()
            return time.monotonic() - began


async def _together(work: Callable[[], Awaitable[None]]) -> float:
    began = begin()
    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    return time.monotonic() - began


@contextmanager
def brokers(names: Sequence[str]) -> Iterator[Iterator[tuple[str, Broker]]]:
    """Yield the named brokers one at a time: an idle broker would still use the CPU."""

    def each() -> Iterator[tuple[str, Broker]]:
        for name in names:
            with MAKERS[name]() as broker:
                yield name, broker

    iterator = each()
    try:
        yield iterator
    finally:
        iterator.close()


@contextmanager
def _kafka() -> Iterator[Broker]:
    with kafka.broker() as started:
        yield Kafka(started.url, started.bootstrap)


@contextmanager
def _rabbitmq() -> Iterator[Broker]:
    with rabbitmq.server() as url:
        yield RabbitMQ(url)


@contextmanager
def _nats() -> Iterator[Broker]:
    with nats_server.server() as url:
        yield Nats(url)


@contextmanager
def _redis() -> Iterator[Broker]:
    with redis.server(durable=True) as url:
        yield Streams(url)


MAKERS = {"Kafka": _kafka, "RabbitMQ": _rabbitmq, "NATS": _nats, "Redis": _redis}


async def relayed(url: str, sink: str) -> float:
    """Drain with a relay; return the seconds."""
    destination = Destination("runner", sink)
    relay = Outbox(url, destinations=[destination], routes=[Route("order.*", to="runner")]).relay()
    began = begin()
    await relay.drain()
    return time.monotonic() - began


async def measure(server_url: str, options: Options, names: Sequence[str]) -> Facts:
    """Measure each broker: the relay against the bare loop, and against a drain into nothing."""
    findings = Findings()
    lines = []
    with outbox(server_url) as (url, tables), brokers(names) as each:
        fill(url, options.rows)
        bodies = await made_bodies(url, tables, options.rows)
        for name, broker in each:
            rates = await interleave(_variants(url, broker, bodies), options.rounds, warm_up=0)
            ratio = rates["relay"].over(rates["bare loop"])
            of_store = rates["relay"].over(rates["into nothing"])
            of_both = rates["relay"].over(in_turn(rates["bare loop"], rates["into nothing"]))
            for variant, rate in rates.items():
                findings.figure(f"{name}, {variant}", rate)
            ratios = [each.show(2) for each in (ratio, of_store, of_both)]
            lines.append([name, *(rate.show() for rate in rates.values()), *ratios])
            wanted = f"≥ {BAR:g} × the bare loop, or ≥ {OF_STORE:g} × a drain into nothing"
            reached = ratio.median >= BAR or of_store.median >= OF_STORE
            measured = f"{ratio.show(2)}; {of_store.show(2)}"
            limit = f"the store and the client in one thread: {of_both.show(2)} of both in turn"
            findings.judge(f"drain into {name}", wanted, measured, reached, limit)
    columns = [
        "",
        "relay",
        "bare loop",
        "into nothing",
        "× the bare loop",
        "× into nothing",
        "× both in turn",
    ]
    findings.table(f"drain of {options.rows:,} rows into a broker, events/s", columns, lines)
    return findings.facts(rows=options.rows)


def in_turn(one: Sample, other: Sample) -> Sample:
    """Return the rate of both, one after the other."""
    return Sample([1 / (1 / a + 1 / b) for a, b in zip(one.values, other.values, strict=True)])


def _variants(url: str, broker: Broker, bodies: Sequence[bytes]) -> dict[str, Take]:
    rows = len(bodies)
    limit = PATIENCE + rows / SLOWEST

    async def relay() -> float:
        await broker.clear()
        run(url, "TRUNCATE outbox_event")
        fill(url, rows)
        return await counted(await apart(relayed, url, broker.destination(), seconds=limit))

    async def bare() -> float:
        await broker.clear()
        return await counted(await apart(broker.bare, bodies, seconds=limit))

    async def counted(seconds: float) -> float:
        if (arrived := await broker.count()) != rows:
            raise RuntimeError(f"{arrived} messages arrived of {rows}")
        return rows / seconds

    async def nothing() -> float:
        return (await ours.drain(url, rows, ours.Plan())).rate

    return {"relay": relay, "bare loop": bare, "into nothing": nothing}


def main() -> None:
    """Measure the named brokers, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.brokers", description=__doc__)
    parser.add_argument("brokers", nargs="*", metavar="broker", help=f"{', '.join(MAKERS)}; all by default")
    parser.add_argument("--rows", type=int, default=50_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    if unknown := set(given.brokers) - set(MAKERS):
        parser.error(f"no broker is called {', '.join(sorted(unknown))}; there are {', '.join(MAKERS)}")
    options = Options(given.rows, given.rounds)
    with server() as url, asyncio.Runner(loop_factory=new_event_loop) as runner:
        facts = runner.run(measure(url, options, given.brokers or list(MAKERS)))
    for bar in facts["bars"]:
        print(f"{bar['bar']}: {bar['measured']} (wanted {bar['wanted']}), limited by {bar['limit']}")


if __name__ == "__main__":
    main()
