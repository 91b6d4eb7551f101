"""How search engines are asked over HTTP: connections that end, hosts that are down, answers of all kinds."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from relaybox.core.outcome import Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.core.scrub import conceal
from relaybox.search.http import Client, Reply
from tests.integration.receivers import doing
from tests.waiting import PATIENCE, cancel

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
NOBODY = "http://127.0.0.1:1"


async def fine(request: web.Request) -> web.Response:
    return web.Response()


async def silence(request: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


@asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.1)  # type: ignore[arg-type]
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(*bases: str, **given: Any) -> AsyncIterator[Client]:
    client = Client(bases, **{"timeout": PATIENCE, **given})
    try:
        yield client
    finally:
        await client.close()


async def ask(answer: Answer, **given: Any) -> Reply:
    async with serving(answer) as base_url, asking(base_url, **given) as client:
        return await client.request("POST", "/a%2Fb", body=b"{}", params={"x": "y z"})


async def test_a_request_has_its_own_headers_and_those_of_the_engine() -> None:
    async def answer(request: web.Request) -> web.Response:
        names = ("Authorization", "Content-Type", "Cookie")
        return web.json_response([request.raw_path, *(request.headers.get(name) for name in names)])

    reply = await ask(answer, headers={"Authorization": "Bearer k"})
    assert reply.ok
    assert reply.json() == ["/a%2Fb?x=y+z", "Bearer k", "application/json", None]


async def test_an_answer_may_be_compressed() -> None:
    async def answer(request: web.Request) -> web.Response:
        body = gzip.compress(b'{"ok": true}')
        return web.Response(body=body, headers={"Content-Encoding": "gzip"})

    assert (await ask(answer)).json() == {"ok": True}


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((status, Reject) for status in (400, 413)),
        *((status, Unavailable) for status in (302, 401, 403, 404, 503)),
        *((429, Throttled), (500, Retry)),
    ],
)
async def test_what_an_answer_means_is_said_by_its_status(status: int, kind: type) -> None:
    async def answer(request: web.Request) -> web.Response:
        headers = {"Retry-After": "7", "Location": "http://elsewhere/"}
        return web.json_response({"message": "said a-long-k3y"}, status=status, headers=headers)

    conceal("a-long-k3y")
    async with asking(NOBODY) as client:
        reply = await ask(answer)
        failed = client.failed(reply)
    assert type(failed) is kind
    assert failed.reason.startswith(f"{reply.where}: {status} ")
    assert "said ***" in failed.reason
    assert (reply.after, getattr(failed, "after", 7.0)) == (7.0, 7.0)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"error": {"reason": "no such index"}}', ": no such index"),
        (b'{"error": "plain"}', ": plain"),
        (b"<html>\nproxy", ": <html> proxy"),
        (b"[1]", ": [1]"),
        (b"", "Service Unavailable"),
    ],
)
async def test_the_reason_holds_what_the_engine_says(body: bytes, said: str) -> None:
    async with asking(NOBODY) as client:
        assert client.reason(Reply(503, body, None, "h:1")).endswith(said)


async def test_an_answer_that_is_not_json_comes_from_another_server() -> None:
    with pytest.raises(Unavailable, match="h:1 answered 200 without JSON"):
        Reply(200, b"<html>", None, "h:1").json()


async def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_a_failure() -> None:
    transports: list[asyncio.Transport] = []

    async def answer(request: web.Request) -> web.Response:
        assert isinstance(request.transport, asyncio.Transport)
        if len(transports) == 1 and request.transport in transports:
            # As if it had been closed before the request came.
            request.transport.abort()
        transports.append(request.transport)
        return web.Response()

    async with serving(answer) as base_url, asking(base_url) as client:
        assert (await client.request("POST", "/", body=b"1")).ok
        assert (await client.request("POST", "/", body=b"2")).ok
    assert len(transports) == 3
    assert transports[0] is transports[1] is not transports[2]


async def test_a_connection_that_breaks_is_unavailable_and_the_request_not_sent_twice() -> None:
    requests = 0

    async def answer(request: web.Request) -> web.Response:
        nonlocal requests
        requests += 1
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    with pytest.raises(Unavailable, match="closed the connection before its answer was complete"):
        await ask(answer)
    assert requests == 1


async def test_an_answer_that_does_not_come_in_time_is_unavailable() -> None:
    with pytest.raises(Unavailable, match=r"no answer from 127\.0\.0\.1:\d+ within 0\.1s"):
        await ask(silence, timeout=0.1)


@pytest.mark.parametrize("endless", [b"HTTP/1.1 103 Early Hints\r\n\r\n", b"\r\n" * 1000])
async def test_an_answer_that_never_begins_is_given_up_before_the_deadline(endless: bytes) -> None:
    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(endless)
            await writer.drain()
            await asyncio.sleep(0)

    async with doing(pour) as receiver, asking(f"http://127.0.0.1:{receiver.port}", timeout=3600) as client:
        with pytest.raises(Unavailable, match="sends an answer without end: more than"):
            await client.request("GET", "/")


async def test_where_nobody_is_the_next_host_is_asked_and_then_the_one_that_answered() -> None:
    async with serving(fine) as base_url, asking(NOBODY, base_url) as client:
        assert client.where == f"127.0.0.1:1,{base_url.removeprefix('http://')}"
        for _ in range(2):
            assert (await client.request("GET", "/")).where == base_url.removeprefix("http://")
        with pytest.raises(Unreachable, match=r"cannot connect to 127\.0\.0\.1:1: Connection refused"):
            await client.request("GET", "/", bases=[NOBODY])


async def test_after_an_answer_that_did_not_come_the_next_host_is_asked_first() -> None:
    async def trouble(request: web.Request) -> web.Response:
        return web.Response(status=503)

    async with (
        serving(silence) as silent,
        serving(trouble) as troubled,
        serving(fine) as well,
        asking(silent, troubled, well, timeout=2.0) as client,
    ):
        with pytest.raises(Unavailable, match="no answer"):
            await client.request("GET", "/")
        asked = [(await client.request("GET", "/")).where for _ in range(3)]
    assert [f"http://{where}" for where in asked] == [troubled, well, well]


async def test_a_name_that_nobody_knows_is_unreachable() -> None:
    async with asking("http://nowhere.invalid:7700") as client:
        with pytest.raises(Unreachable, match=r"nowhere\.invalid:7700"):
            await client.request("GET", "/")


async def test_tls_with_a_server_that_speaks_none_is_unreachable() -> None:
    async with serving(fine) as base_url, asking(base_url.replace("http:", "https:")) as client:
        with pytest.raises(Unreachable, match="TLS with"):
            await client.request("GET", "/")


def test_one_client_may_serve_one_loop_after_the_other() -> None:
    client = Client([NOBODY], timeout=PATIENCE)

    async def once() -> None:
        with pytest.raises(Unreachable):
            await client.request("GET", "/")
        await client.close()

    for _ in range(2):
        asyncio.run(once())


async def test_a_request_can_be_cancelled() -> None:
    begun = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        begun.set()
        await asyncio.Event().wait()
        return web.Response()

    task = asyncio.ensure_future(ask(answer))
    await begun.wait()
    await cancel(task)
