"""What becomes of a connection: when it is used again, and when it must not be."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ServerDisconnectedError
from yarl import URL

from relaybox.core.outcome import Delivered, Reject, Retry, Unavailable
from relaybox.core.settings import Destination
from relaybox.sinks.http.address import Guard, Resolver
from relaybox.sinks.http.exchange import Exchange, release
from relaybox.sinks.http.sink import HttpSink
from relaybox.testing.sink_contract import make_delivery
from tests.integration.receivers import Receiver, answer, answering, listening, read_request
from tests.waiting import PATIENCE, await_for, cancel

OK = answer("200 OK", b"fine")
LARGE = json.dumps("x" * 16_000_000)
"""More than what the buffers between two sockets hold."""


@pytest.fixture(autouse=True)
def idle_connections_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep idle connections open, so that a connection that closes was given up."""
    monkeypatch.setattr("relaybox.sinks.http.exchange._KEEPALIVE", 600.0)


@asynccontextmanager
async def sink_for(url: str, **settings: Any) -> AsyncIterator[HttpSink]:
    settings = {"allow": ["127.0.0.0/8"], "timeout": "60s", "concurrency": 1, **settings}
    sink = HttpSink(Destination("runner", url, **settings))
    try:
        yield sink
    finally:
        await sink.close()


async def test_a_request_is_complete_and_says_nothing_twice() -> None:
    async def keep(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(OK)

    heads: list[bytes] = []
    async with listening(keep) as receiver, sink_for(f"{receiver.url}?a=b%20c#d", secret="s") as sink:
        assert await sink.send([make_delivery("{}")]) == [Delivered()]
    line, *headers = heads[0].decode("ascii").removesuffix("\r\n\r\n").split("\r\n")
    assert line == "POST /events?a=b%20c HTTP/1.1"
    assert sorted(header.partition(": ")[0].lower() for header in headers) == [
        "accept", "accept-encoding", "content-length", "content-type", "host", "user-agent",
        "webhook-id", "webhook-signature", "webhook-timestamp",
    ]  # fmt: skip
    assert f"Host: 127.0.0.1:{receiver.port}" in headers


async def test_what_an_event_carries_cannot_add_a_header() -> None:
    marks = {"relaybox-dead-letter-reason": "a\r\nx-injected: b", "traceparent": "00\r\nx-injected: b"}
    async with answering(OK) as receiver, sink_for(receiver.url) as sink:
        assert await sink.send([make_delivery(headers=json.dumps(marks))]) == [Delivered()]
    [request] = receiver.requests
    assert request.headers["relaybox-dead-letter-reason"] == "a??x-injected: b"
    assert not {"x-injected", "traceparent"} & request.headers.keys()


@pytest.mark.parametrize("size", [0, 65_000, 65_536, 65_537, 3_000_000])
async def test_a_body_arrives_whole_and_the_connection_is_used_again(size: int) -> None:
    async with answering(OK) as receiver, sink_for(receiver.url, format="payload") as sink:
        deliveries = [make_delivery(data=bytes([number]) * size) for number in range(3)]
        assert await sink.send(deliveries) == [Delivered()] * 3
    assert [request.body for request in receiver.requests] == [d.payload_data for d in deliveries]
    assert receiver.connections == 1


async def test_informational_answers_are_passed_over() -> None:
    said = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <a>\r\n\r\n"
    async with answering(said + OK, said + answer("422 No"), OK) as receiver, sink_for(receiver.url) as sink:
        first, second, third = [await sink.send([make_delivery()]) for _ in range(3)]
    assert (first, third) == ([Delivered()], [Delivered()])
    assert type(second[0]) is Reject
    assert receiver.connections == 1


@pytest.mark.parametrize(
    ("said", "limit"),
    [(b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100, "8 interim answers"), (b"\r\n" * 10_000, "16384 bytes")],
)
async def test_an_answer_over_a_limit_says_which_and_gives_the_connection_up(said: bytes, limit: str) -> None:
    async with answering(said + OK, OK) as receiver, sink_for(receiver.url) as sink:
        [answered] = await sink.send([make_delivery()])
        assert type(answered) is Unavailable
        assert answered.reason == (
            f"127.0.0.1:{receiver.port} sends an answer without end: more than {limit}"
        )
        assert await sink.send([make_delivery()]) == [Delivered()]
    assert receiver.connections == 2


async def test_another_protocol_is_not_spoken() -> None:
    switch = b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"
    async with answering(switch, OK) as receiver, sink_for(receiver.url, timeout="2s") as sink:
        [said] = await sink.send([make_delivery()])
        assert isinstance(said, Retry)
        assert await sink.send([make_delivery()]) == [Delivered()]
    assert receiver.connections == 2


@pytest.mark.parametrize("last", [b"Connection: close\r\nContent-Length: 0\r\n\r\n", b"\r\nuntil the end"])
async def test_a_connection_that_the_answer_ends_is_not_used_again(last: bytes) -> None:
    async def once(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.requests.append(await read_request(reader))
        writer.write(b"HTTP/1.1 200 OK\r\n" + last)

    async with listening(once) as receiver, sink_for(receiver.url) as sink:
        assert [await sink.send([make_delivery()]) for _ in range(3)] == [[Delivered()]] * 3
    assert receiver.connections == 3


async def test_a_body_without_a_length_ends_with_its_connection() -> None:
    async def tell(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 500 Oops\r\n\r\nthis ")
        await writer.drain()
        writer.write(b"and that")

    async with listening(tell) as receiver, sink_for(receiver.url) as sink:
        [said] = await sink.send([make_delivery()])
    assert type(said) is Retry
    assert said.reason == "500 Oops: this and that"


async def test_as_many_connections_as_the_concurrency_asks_for() -> None:
    async def gather(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        if receiver.open == 120:
            together.set()
        await together.wait()
        writer.write(OK)

    together = asyncio.Event()
    async with listening(gather) as receiver, sink_for(receiver.url, concurrency=120) as sink:
        assert await sink.send([make_delivery() for _ in range(120)]) == [Delivered()] * 120


async def test_a_connection_that_is_closed_between_two_requests_is_opened_again() -> None:
    noticed = asyncio.Event()

    async def once(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.requests.append(await read_request(reader))
        writer.write(OK)
        writer.write_eof()
        # The other side closes when it has seen the end.
        assert await reader.read() == b""
        noticed.set()

    async with listening(once) as receiver, sink_for(receiver.url) as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        await noticed.wait()
        assert await sink.send([make_delivery()]) == [Delivered()]
    assert (receiver.connections, len(receiver.requests)) == (2, 2)


async def test_a_connection_that_is_closed_on_the_second_request_is_that_ones_answer() -> None:
    async def once(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.requests.append(await read_request(reader))
        writer.write(OK)
        receiver.requests.append(await read_request(reader))

    async with listening(once) as receiver, sink_for(receiver.url) as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        [said] = await sink.send([make_delivery()])
    assert type(said) is Retry
    assert said.reason.endswith("closed the connection before its answer was complete")
    # It may have arrived: whether it is sent once more is not for the sink to decide.
    assert len(receiver.requests) == 2


async def test_a_second_answer_is_not_taken_for_the_next_ones() -> None:
    async with answering(OK + answer("200 OK"), answer("422 No")) as receiver, sink_for(receiver.url) as sink:
        assert await sink.send([make_delivery()]) == [Delivered()]
        [said] = await sink.send([make_delivery()])
    assert type(said) is Reject
    assert receiver.connections == 2


async def test_an_answer_that_comes_unasked_is_not_taken_for_the_next_ones() -> None:
    asked = asyncio.Event()

    async def chatter(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(OK)
        await asked.wait()
        writer.write(OK)
        await asyncio.Event().wait()

    async with listening(chatter) as receiver:
        exchange = Exchange(URL(receiver.url), Resolver(Guard("runner", ["127.0.0.0/8"])), limit=1)
        connection = await exchange.connect()
        protocol = connection.protocol
        assert protocol is not None
        message, _ = await exchange.ask(connection, b"content-length: 0\r\n\r\n", b"")
        release(connection)
        asked.set()
        await await_for(lambda: protocol.should_close)
        again = await exchange.connect()
        assert (message.code, again.protocol) == (200, protocol)
        with pytest.raises(ServerDisconnectedError):
            await exchange.ask(again, b"content-length: 0\r\n\r\n", b"")
        again.close()
        await exchange.close()


async def test_a_tls_handshake_that_hangs_ends_with_the_deadline() -> None:
    async with listening(deaf) as receiver:
        url = f"https://127.0.0.1:{receiver.port}/"
        async with sink_for(url, timeout="100ms") as sink:
            [said] = await sink.send([make_delivery()])
    assert type(said) is Unavailable
    assert said.reason == f"no answer from 127.0.0.1:{receiver.port} within 0.1s"


async def drip(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send a byte now and then, and never a whole answer."""
    receiver.requests.append(await read_request(reader))
    writer.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


async def deaf(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads no more than the reader takes in by itself."""
    await asyncio.Event().wait()


async def mute(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Reads everything and says nothing until the other side gives up."""
    receiver.requests.append(await read_request(reader))
    await reader.read()


@pytest.mark.parametrize(
    ("talk", "payload"),
    [(drip, "{}"), (deaf, LARGE), (mute, "{}"), (mute, LARGE)],
    ids=["slow answer", "nothing read", "no answer", "no answer to a large one"],
)
async def test_the_deadline_gives_the_connection_up(talk: Any, payload: str) -> None:
    async with listening(talk) as receiver, sink_for(receiver.url, timeout="200ms", format="payload") as sink:
        [said] = await sink.send([make_delivery(payload)])
        assert type(said) is Unavailable
        assert said.reason == f"no answer from 127.0.0.1:{receiver.port} within 0.2s"
        if talk is not deaf:
            await await_for(lambda: receiver.open == 0, "the connection is given up")
        await sink.send([make_delivery()])
    assert receiver.connections == 2


async def test_a_cancelled_request_gives_the_connection_up() -> None:
    async def talk(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        receiver.requests.append(await read_request(reader))
        if receiver.connections == 1:
            assert await reader.read() == b""
        else:
            writer.write(OK)

    async with listening(talk) as receiver, sink_for(receiver.url) as sink:
        sending = asyncio.ensure_future(sink.send([make_delivery()]))
        await await_for(lambda: receiver.requests)
        await cancel(sending)
        await await_for(lambda: receiver.open == 0, "the connection is given up")
        assert await sink.send([make_delivery()]) == [Delivered()]
    assert receiver.connections == 2


async def test_an_answer_counts_that_comes_before_the_request_is_read() -> None:
    async def hasty(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer("413 Content Too Large", b"no more than a megabyte"))
        await writer.drain()
        await asyncio.Event().wait()

    async with listening(hasty) as receiver, sink_for(receiver.url, format="payload") as sink:
        for _ in range(2):
            [said] = await sink.send([make_delivery(LARGE)])
            assert type(said) is Reject
            assert said.reason == "413 Content Too Large: no more than a megabyte"
    # What is left of the first body would have been taken for the beginning of the second request.
    assert receiver.connections == 2


SEND = """
import asyncio, sys
from relaybox.core.settings import Destination
from relaybox.sinks.http.sink import HttpSink
from relaybox.testing.sink_contract import make_delivery

async def main():
    settings = {"allow": ["127.0.0.0/8"], "concurrency": 1, "format": "payload"}
    sink = HttpSink(Destination("runner", sys.argv[1], **settings))
    said = await sink.send([make_delivery(data=b"x" * 300_000), make_delivery(data=b"y")])
    await sink.close()
    print([type(one).__name__ for one in said])

asyncio.run(main())
"""


async def test_tls_with_a_certificate_that_is_trusted(tmp_path: Path) -> None:
    trusted = certificate(tmp_path / "trusted.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(trusted)
    async with answering(OK, tls=context) as receiver:
        # In a process of its own: which certificates are trusted is read once.
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-c", SEND, f"https://127.0.0.1:{receiver.port}/events"],
            env={**os.environ, "SSL_CERT_FILE": str(trusted)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    assert (done.stdout, done.stderr) == ("['Delivered', 'Delivered']\n", "")
    assert [len(request.body) for request in receiver.requests] == [300_000, 1]
    assert receiver.connections == 1


def certificate(path: Path) -> Path:
    """Write a self-signed certificate for 127.0.0.1, with its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    today = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(today - timedelta(days=1))
        .not_valid_after(today + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(private + made.public_bytes(serialization.Encoding.PEM))
    return path
