"""The small server of a relay: what it answers, and which requests it refuses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from starlette.responses import Response

from relaybox import Destination, Outbox
from relaybox.cli import listen as module
from relaybox.cli import web_server
from relaybox.cli.listen import Monitor, listen, serving
from relaybox.errors import ConfigError
from relaybox.operate.admin import Admin
from relaybox.operate.health import Problem
from relaybox.relay.relay import Relay
from tests.waiting import PATIENCE


async def page() -> Response:
    return Response(b"hello\n")


@pytest.fixture
async def port() -> AsyncIterator[int]:
    listening = listen("0")
    async with serving(listening, {"/page": page}):
        yield listening.getsockname()[1]


async def ask(port: int, request: bytes) -> tuple[str, bytes]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.decode(), body


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        *(("Host: localhost:9464", 200), ("host:127.0.0.1", 200), ("HOST: [::1]:9464 ", 200)),
        *(("accept: */*", 400), ("host: rebound.evil.example:9464", 421)),
        *(("host: 127.0.0.1.evil.example", 421), ("host: localhost\r\nhost: evil.example", 400)),
        *(("host: localhost@evil.example", 421), ("host:", 421), ("host: a:b:c", 421)),
        *(("accept: x\r\nHost: evil.example", 421), ("host: [::1", 421)),
        ("host: localhost\r\nexpect: 100-continue", 200),
    ],
)
async def test_on_this_host_it_answers_to_names_of_it_alone(port: int, lines: str, status: int) -> None:
    head, _ = await ask(port, f"GET /page HTTP/1.1\r\n{lines}\r\n\r\n".encode())
    assert head.startswith(f"HTTP/1.1 {status} ")


async def test_elsewhere_it_answers_to_any_name() -> None:
    listening = listen("0.0.0.0:0")
    async with serving(listening, {"/page": page}):
        head, _ = await ask(listening.getsockname()[1], b"GET /page HTTP/1.1\r\nhost: relay\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 ")


async def test_errors_of_destinations_are_not_shown_to_strangers() -> None:
    class Silent(Monitor):
        async def _problems(self, admin: Admin, relay: Relay) -> AsyncIterator[Problem]:
            yield Problem("shop", "its circuit is open: 401 of https://hush.example", 5.0)

    monitor = Silent(Outbox("sqlite://", destinations=[Destination("shop", "memory:")]))
    answer = await monitor._ready(None, None)  # type: ignore[arg-type]
    assert answer.status_code == 503
    assert b"its circuit is open" in answer.body
    assert b"hush" not in answer.body


async def test_a_page_is_served_and_the_connection_closed(port: int) -> None:
    head, body = await ask(port, b"GET /page?x=1 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    assert head.startswith("HTTP/1.1 200 OK\r\n")
    assert {"content-length: 6", "cache-control: no-store", "connection: close"} <= set(head.split("\r\n"))
    assert body == b"hello\n"
    assert (await ask(port, b"HEAD /page HTTP/1.0\r\n\r\n"))[1] == b""


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (b"GET /other HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
        (b"POST /page HTTP/1.1\r\nhost: localhost\r\ncontent-length: 3\r\n\r\nabc", 405),
        (b"GET /page\r\n\r\n", 400),
        (b"GET /page HTTP/1.1\r\nno header\r\nhost: localhost\r\n\r\n", 400),
        (b"GET /page HTTP/1.1\r\nhost : localhost\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\r\n\r\n", 400),
        (b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\n\r\n", 400),
        (b"GET /page HTTP/1.1\r\n" + b"x: y\r\n" * 10_000 + b"\r\n", 400),
    ],
)
async def test_what_is_not_understood_is_refused(port: int, request_: bytes, status: int) -> None:
    try:
        head, _ = await ask(port, request_)
    except ConnectionResetError:
        # What was not read of the request breaks the connection, sometimes before the answer is.
        return
    assert not head or head.startswith(f"HTTP/1.1 {status} ")


async def test_slow_clients_are_given_up_and_block_nobody(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web_server, "SLOWEST_HEAD", 0.2)
    slow = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
    for _, writer in slow:
        writer.write(b"GET /pa")
    assert (await ask(port, b"GET /page HTTP/1.1\r\nhost: localhost\r\n\r\n"))[1] == b"hello\n"
    for reader, writer in slow:
        assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
        writer.close()


async def test_idle_connections_beyond_the_limit_are_closed_oldest_first(port: int) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * module.AT_ONCE)]
    assert (await ask(port, b"GET /page HTTP/1.1\r\nhost: localhost\r\n\r\n"))[1] == b"hello\n"
    for reader, _ in idle[: module.AT_ONCE]:
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), PATIENCE) == b""
    assert not idle[-1][0].at_eof()
    for _, writer in idle:
        writer.close()


def test_a_port_alone_is_on_the_loopback_and_one_that_is_taken_is_reported() -> None:
    for address in ("0", ":0", "127.0.0.1:0"):
        with listen(address) as listening:
            assert listening.getsockname()[0] == "127.0.0.1"
    with listen("127.0.0.1:0") as taken:
        port = taken.getsockname()[1]
        message = f"--listen = '127.0.0.1:{port}': another process listens there"
        with pytest.raises(ConfigError, match=message):
            listen(f"127.0.0.1:{port}")


@pytest.mark.parametrize(
    "address", ["", "x", "127.0.0.1", "127.0.0.1:", "::1:9464", "a:b", "1:99999", "1:-1"]
)
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="write HOST:PORT"):
        listen(address)
    with pytest.raises(ConfigError, match="name an address of this host"):
        listen("192.0.2.1:9464")


@pytest.mark.skipif(not socket.has_ipv6, reason="this host has no IPv6")
def test_an_address_may_be_of_version_6() -> None:
    try:
        listening = listen("[::1]:0")
    except ConfigError as error:
        pytest.skip(str(error))
    with listening:
        assert listening.getsockname()[0] == "::1"
