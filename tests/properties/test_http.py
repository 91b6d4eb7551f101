"""Whatever a receiver answers: one answer of ours for every delivery, and the sink goes on."""

from __future__ import annotations

import asyncio
import socket
import struct
from random import Random

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.sinks.http.sink import HttpSink
from relaybox.testing.sink_contract import make_delivery
from tests.integration.receivers import Receiver, listening, read_request
from tests.properties import answers
from tests.properties.answers import Answer
from tests.properties.conftest import Feed
from tests.waiting import PATIENCE, await_for

TIMEOUT = 0.3
"""Seconds that a receiver has, of which some take all."""
FINE = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


def test_every_delivery_gets_one_answer_whatever_came_over_the_wire(feed: Feed) -> None:
    def batch(r: Random, size: int) -> None:
        asyncio.run(deliver([answers.answer(r) for _ in range(size)]))

    feed("HTTP answers", batch, size=100)


async def deliver(drawn: list[Answer]) -> None:
    """Send one delivery for each of the answers at once, and then one more, which is answered well."""
    deliveries = [make_delivery(str(number)) for number in range(len(drawn))]
    of = dict(zip((str(delivery.event_id) for delivery in deliveries), drawn, strict=True))

    async def talk(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            request = await read_request(reader)
            answer = of.get(request.headers["webhook-id"])
            if answer is None:
                writer.write(FINE)
                await writer.drain()
            elif not await say(answer, writer):
                return

    async with listening(talk) as receiver:
        settings = {"allow": ["127.0.0.0/8"], "timeout": TIMEOUT, "concurrency": 50}
        sink = HttpSink(Destination("runner", receiver.url, secret="whsec_c2VjcmV0", **settings))

        async def goes_on() -> bool:
            [after] = await sink.send([make_delivery("healthy")])
            return isinstance(after, Delivered)

        try:
            async with asyncio.timeout(PATIENCE):
                said = await sink.send(deliveries)
            # More than once where the machine is too busy to answer in time.
            await await_for(goes_on, "the sink goes on")
        finally:
            await sink.close()
    assert len(said) == len(deliveries)
    for delivery, answered in zip(deliveries, said, strict=True):
        check(answered, delivery)


async def say(answer: Answer, writer: asyncio.StreamWriter) -> bool:
    """Answer so; whether another request may come on this connection."""
    for number, piece in enumerate(answer.pieces):
        if number:
            await asyncio.sleep(0.005)
        writer.write(piece)
        await writer.drain()
    if answer.then == "reset":
        opened: socket.socket = writer.get_extra_info("socket")
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return answer.then == "wait"


def check(answered: object, delivery: Delivery) -> None:
    assert isinstance(answered, Delivered | Retry | Reject | Unavailable), (delivery.event_id, answered)
    if isinstance(answered, Delivered):
        return
    assert answered.reason
    assert answered.reason.isprintable()
    assert len(answered.reason) < 1_000
    after = getattr(answered, "after", None)
    assert after is None or 0 < after <= 3600
