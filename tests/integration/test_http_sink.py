"""The webhook sender, against receivers that mean well and receivers that do not."""

from __future__ import annotations

import asyncio
import gc
import gzip
import json
import socket
import ssl
import sys
import tracemalloc
from base64 import b64encode
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Gone, Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, MissingExtra
from relaybox.sinks.http.sink import HttpSink
from relaybox.sinks.http.status import retry_after
from relaybox.sinks.open import open_sink
from relaybox.sinks.sink import Answer
from relaybox.testing.sink_contract import deliveries, make_delivery
from relaybox.wire.signature import verify
from tests.integration.receivers import Receiver, answer, answering, doing, listening, read_request
from tests.integration.test_http_exchange import certificate

SECRET = "whsec_c2VjcmV0IGtleSBmb3IgdGVzdHM="
NOW = 1_738_324_800
OK = answer("200 OK", b"fine")


@asynccontextmanager
async def sink_for(url: str, *, lookup: Any = None, **settings: Any) -> AsyncIterator[HttpSink]:
    settings = {"allow": ["127.0.0.0/8"], "timeout": "60s", **settings}
    sink = HttpSink(Destination("runner", url, **settings), lookup=lookup, now=lambda: NOW)
    try:
        yield sink
    finally:
        await sink.close()


async def send(url: str, delivery: Delivery | None = None, **settings: Any) -> Answer:
    async with sink_for(url, **settings) as sink:
        [said] = await sink.send([delivery or make_delivery()])
        return said


def reason(said: Answer) -> str:
    assert isinstance(said, Retry | Reject | Unavailable)
    return said.reason


async def test_a_delivery_is_a_signed_post() -> None:
    delivery = make_delivery(
        headers='{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}'
    )
    async with answering(OK) as receiver:
        assert await send(receiver.url, delivery, secret=SECRET, auth="token-1") == Delivered()
    [request] = receiver.requests
    assert request.line == "POST /events HTTP/1.1"
    assert json.loads(request.body)["id"] == str(delivery.event_id)
    assert verify(request.body, request.headers, SECRET, now=NOW)
    expected = {
        "webhook-id": str(delivery.event_id),
        "webhook-timestamp": str(NOW),
        "content-type": "application/json",
        "authorization": "Bearer token-1",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "user-agent": f"relaybox/{version('relaybox')}",
        "accept-encoding": "identity",
    }
    assert {name: request.headers[name] for name in expected} == expected


async def test_each_secret_signs_and_without_one_nothing_is_signed() -> None:
    async with answering(OK) as receiver:
        await send(receiver.url, secret=f"{SECRET} new-one")
        await send(receiver.url)
    signed, plain = receiver.requests
    for secret in (SECRET, "new-one"):
        assert verify(signed.body, signed.headers, secret, now=NOW)
    assert not {"webhook-signature", "authorization"} & plain.headers.keys()


async def test_the_format_decides_the_body() -> None:
    async with answering(OK) as receiver:
        await send(receiver.url, make_delivery(data=b"\xff"), format="payload")
        await send(receiver.url, format=lambda event: {"paid": event.payload["total"]})
    first, second = receiver.requests
    assert (first.body, first.headers["content-type"]) == (b"\xff", "application/octet-stream")
    assert second.body == b'{"paid":42}'


async def test_what_cannot_be_written_is_rejected() -> None:
    async with answering(OK) as receiver:
        said = await send(receiver.url, format=lambda event: {"a": object()})
    assert isinstance(said, Reject)
    assert receiver.connections == 0


@pytest.mark.parametrize(
    ("statuses", "kind"),
    [
        ([200, 201, 202, 204, 206, 299], Delivered),
        ([400, 409, 413, 415, 422], Reject),
        ([301, 302, 303, 304, 307, 308, 399, 401, 403, 404, 407, 502, 503, 504], Unavailable),
        ([429], Throttled),
        ([410], Gone),
        ([402, 405, 406, 408, 411, 418, 423, 425, 428, 431, 451, 500, 501, 505, 507, 511, 599, 700], Retry),
    ],
)
async def test_the_status_decides(statuses: Iterable[int], kind: type) -> None:
    for status in statuses:
        async with answering(answer(f"{status} Reason")) as receiver:
            assert type(await send(receiver.url)) is kind, status


async def test_a_reason_begins_with_the_status_and_shows_the_beginning_of_the_body() -> None:
    async with answering(
        answer("503 Service Unavailable", b"down\r\n\x1b[31m\x00for \xff\xfe " + b"x" * 900)
    ) as r:
        said = reason(await send(r.url))
    assert said.startswith("503 Service Unavailable: down [31m for \ufffd\ufffd xxx")
    assert said.isprintable()
    assert len(said) < 240


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (answer("429 "), "429 Too Many Requests"),
        (answer("500 Oops", gzip.compress(b"a" * 100), "Content-Encoding: gzip"), "500 Oops"),
    ],
    ids=["a missing phrase", "a compressed body"],
)
async def test_a_reason_has_the_usual_phrase_and_nothing_unreadable(said: bytes, expected: str) -> None:
    async with answering(said) as receiver:
        assert reason(await send(receiver.url)) == expected


async def test_no_reason_shows_what_is_secret() -> None:
    secrets = ["hunter2-password", "query-token", "sign-key-1", "sign-key-2"]

    async def echo(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        text = " ".join([request.line, *request.headers.values(), *secrets]).encode()
        writer.write(answer(f"500 {request.line}", text))
        await writer.drain()

    async with listening(echo) as receiver:
        url = f"http://user:hunter2-password@127.0.0.1:{receiver.port}/events?key=query-token&b=c"
        said = reason(await send(url, secret="sign-key-1 sign-key-2"))
    assert said.startswith("500 POST /events?*** HTTP/1.1: POST /events?***")
    assert not [secret for secret in secrets if secret in said]
    assert "dXNlcjpodW50ZXIyLXBhc3N3b3Jk" not in said


ECHOES = {
    "the request itself": b"%b",
    "a status line": b"HTTP/1.1 %b\r\n\r\n",
    "a status": b"HTTP/1.1 500 %b\r\n\r\n",
    "a header's name": b"HTTP/1.1 200 OK\r\n%b: x\r\n\r\n",
    "a header without a colon": b"HTTP/1.1 200 OK\r\n%b\r\n\r\n",
    "a header that is too long": b"HTTP/1.1 200 OK\r\nX: %b" + b"x" * 9000 + b"\r\n\r\n",
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: %b\r\n\r\n",
    "an encoding": b"HTTP/1.1 500 No\r\nTransfer-Encoding: %b\r\n\r\n",
    "a chunk": b"HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n%b\r\n",
    "a body": b"HTTP/1.1 500 No\r\n\r\n%b",
}


@pytest.mark.parametrize("how", ECHOES)
@pytest.mark.parametrize("where", ["auth", "user", "query"])
async def test_an_answer_that_echoes_a_secret_does_not_get_it_into_the_reason(how: str, where: str) -> None:
    secret = "xoxb-0123456789-abcdefghijklmnopqrstuvwxyz"

    async def echo(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await read_request(reader)
        said = request.headers.get("authorization", request.line)
        writer.write(ECHOES[how] % said.encode())
        await writer.drain()

    async with listening(echo) as receiver:
        user = f"user:{secret}@" if where == "user" else ""
        query = f"?key={secret}" if where == "query" else ""
        url = f"http://{user}127.0.0.1:{receiver.port}/events{query}"
        answered = await send(url, **({"auth": secret} if where == "auth" else {}))
    said = getattr(answered, "reason", "")
    sent = b64encode(f"user:{secret}".encode()).decode() if where == "user" else secret
    # No part of it either: aiohttp cuts what it quotes.
    assert not [part for part in (sent[at : at + 8] for at in range(len(sent) - 8)) if part in said], said


async def test_no_error_shows_what_is_secret() -> None:
    said = reason(await send("http://user:hunter2-password@127.0.0.1:1/events?key=query-token"))
    assert said.startswith("cannot connect to 127.0.0.1:1: ")
    async with answering(b"garbage\r\n\r\n") as receiver:
        url = f"http://user:hunter2-password@127.0.0.1:{receiver.port}/events?key=query-token"
        said = reason(await send(url))
    assert "hunter2" not in said
    assert "query-token" not in said


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("120", 120.0),
        (" 7 ", 7.0),
        ("999999", 3600.0),
        ("9" * 5000, 3600.0),
        (format_datetime(datetime.fromtimestamp(NOW, UTC) + timedelta(minutes=2), usegmt=True), 120.0),
        (format_datetime(datetime.fromtimestamp(NOW, UTC) + timedelta(days=999), usegmt=True), 3600.0),
        (format_datetime(datetime.fromtimestamp(NOW, UTC) - timedelta(minutes=2), usegmt=True), None),
        *(
            (text, None)
            for text in ("", "0", "-1", "soon", "1.5", "nan", "inf", "１２", "Mon, 99 Xxx 9999 1:1:1")
        ),
        (None, None),
    ],
)
def test_retry_after_is_seconds_or_a_date_and_no_more_than_an_hour(value: str | None, seconds: float) -> None:
    assert retry_after(value, NOW) == seconds


@pytest.mark.parametrize("status", ["429 Slow Down", "503 Down", "500 Oops"])
async def test_retry_after_is_honoured(status: str) -> None:
    async with answering(answer(status, b"", "Retry-After: 17")) as receiver:
        said = await send(receiver.url)
    assert isinstance(said, Retry | Unavailable)
    assert said.after == 17.0


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_not_followed(status: int) -> None:
    async with answering(OK) as canary:
        async with answering(answer(f"{status} There", b"", f"Location: {canary.url}")) as receiver:
            said = await send(receiver.url)
        assert canary.connections == 0
    assert reason(said).startswith(f"{status} There: redirects are not followed")


@pytest.mark.parametrize(
    "said",
    [
        b"garbage\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"\x00\xff\xfe" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"HTTP/1.1 banana OK\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 " + b"y" * 100_000 + b"\r\n\r\n",
    ],
)
async def test_an_answer_that_is_not_http_is_tried_again(said: bytes) -> None:
    async with answering(said) as receiver:
        answered = await send(receiver.url)
    assert type(answered) is Retry
    assert len(answered.reason) < 300


@pytest.mark.parametrize("reset", [False, True])
@pytest.mark.parametrize("part", [b"", b"HTTP/1.1 2", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nX: y\r\n"])
async def test_a_connection_that_ends_before_the_answer_is_tried_again(part: bytes, reset: bool) -> None:
    async def close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(part)
        await writer.drain()
        if reset:
            writer.transport.abort()

    async with doing(close) as receiver:
        answered = await send(receiver.url)
    assert type(answered) is Retry
    closed = f"127.0.0.1:{receiver.port} closed the connection before its answer was complete"
    assert reset or answered.reason == closed


PART = {
    "breaks off": ("Content-Length: 100\r\n\r\nxxx", False),
    "never ends": ("Transfer-Encoding: chunked\r\n\r\n1\r\nx\r\n", True),
}


@pytest.mark.parametrize(("part", "hangs"), PART.values(), ids=PART)
@pytest.mark.parametrize(
    ("status", "kind"),
    [("200 OK", Delivered), ("422 No", Reject), ("503 No", Unavailable), ("500 Oops", Retry)],
)
async def test_a_status_that_came_counts_whatever_becomes_of_the_body(
    status: str, kind: type, part: str, hangs: bool
) -> None:
    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {status}\r\n{part}".encode())
        await writer.drain()
        if hangs:
            await asyncio.Event().wait()

    async with doing(begin) as receiver:
        assert type(await send(receiver.url, timeout="500ms")) is kind


BOMB = gzip.compress(b"\0" * 10_000_000)
ENDLESS = {
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-Header: value\r\n" * 100, Retry),
    "one header": (b"HTTP/1.1 200 OK\r\nX: ", b"y" * 1000, Retry),
    "a status line": (b"HTTP/1.1 200 ", b"y" * 1000, Retry),
    "informational answers": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 50, Unavailable),
    "informational headers": (b"", b"HTTP/1.1 103 E\r\n%b\r\n" % (b"x: y\r\n" * 100) * 50, Unavailable),
    "empty lines": (b"", b"\r\n" * 1000, Unavailable),
    "single bytes": (b"HTTP/1.1 500 Oops\r\nContent-Length: 10000000000\r\n\r\n", b"z", Retry),
    "a body": (b"HTTP/1.1 500 Oops\r\nContent-Length: 10000000000\r\n\r\n", b"z" * 65_536, Retry),
    "chunks": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 10_000, Delivered),
    "a chunk's extension": (
        b"HTTP/1.1 500 Oops\r\nTransfer-Encoding: chunked\r\n\r\n1;",
        b"x" * 65_536,
        Retry,
    ),
    "gzip": (
        b"HTTP/1.1 500 Oops\r\nContent-Encoding: gzip\r\nContent-Length: 10000000000\r\n\r\n",
        BOMB,
        Retry,
    ),
    "chunks of gzip": (
        b"HTTP/1.1 500 Oops\r\nContent-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"%x\r\n%b\r\n" % (len(BOMB), BOMB),
        Retry,
    ),
    "a body without a length": (b"HTTP/1.1 503 Down\r\n\r\n", b"z" * 65_536, Unavailable),
}


@pytest.mark.parametrize("what", ENDLESS)
async def test_an_endless_answer_costs_no_memory_for_long_or_for_a_moment(what: str) -> None:
    start, more, kind = ENDLESS[what]
    poured = 0

    async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal poured
        writer.write(start)
        while True:
            writer.write(more)
            await writer.drain()
            poured += len(more)
            # Lets the other side run, and so bounds what stands in the buffers between the two.
            await asyncio.sleep(0)

    # A limit ends each of them, long before the deadline.
    patient = {"timeout": "1h", "lease": "2h", "concurrency": 8}
    async with doing(pour) as receiver, sink_for(receiver.url, **patient) as sink:
        tracemalloc.start()
        try:
            [said] = await sink.send([make_delivery()])
            kept, peak = tracemalloc.get_traced_memory()
            more_of_it = await sink.send(deliveries(8))
            gc.collect()
            kept_later, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert {type(each) for each in (said, *more_of_it)} == {kind}
    assert peak < 4_000_000
    assert kept_later - kept < 1_000_000
    # What is not a Python object is not traced. Nine answers, each a limit and what stands in the buffers.
    assert poured < 9 * 4_000_000


async def test_nobody_there_is_unreachable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said = await send(f"http://127.0.0.1:{port}/")
    assert type(said) is Unreachable
    assert said.reason == f"cannot connect to 127.0.0.1:{port}: Connection refused"


async def test_a_name_without_an_address_is_unreachable() -> None:
    async def unknown(host: str, port: int) -> list[Any]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    async def empty(host: str, port: int) -> list[Any]:
        return []

    for lookup in (unknown, empty):
        said = await send("http://shop.test/", lookup=lookup)
        assert type(said) is Unreachable
        assert said.reason.startswith("DNS knows no address of shop.test:80: ")


async def test_the_deadline_holds_for_dns_too() -> None:
    async def never(host: str, port: int) -> list[Any]:
        await asyncio.Event().wait()
        return []

    said = await send("http://shop.test/", lookup=never, timeout="50ms")
    assert type(said) is Unavailable


async def test_no_tls_is_unreachable() -> None:
    async def talk(receiver: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()

    async with listening(talk) as receiver:
        said = await send(f"https://127.0.0.1:{receiver.port}/")
    assert type(said) is Unreachable
    assert said.reason.startswith(f"TLS with 127.0.0.1:{receiver.port} failed: ")


async def test_a_certificate_that_nobody_trusts_is_unreachable(tmp_path: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate(tmp_path / "self-signed.pem"))
    async with answering(OK, tls=context) as receiver:
        said = await send(f"https://127.0.0.1:{receiver.port}/")
    assert type(said) is Unreachable
    assert said.reason.startswith(f"TLS with 127.0.0.1:{receiver.port} failed: ")
    assert receiver.requests == []


async def test_no_more_connections_than_the_concurrency_however_many_sends() -> None:
    async with answering(OK) as receiver, sink_for(receiver.url, concurrency=3) as sink:
        batches = [[make_delivery() for _ in range(10)] for _ in range(4)]
        answers = await asyncio.gather(*(sink.send(batch) for batch in batches))
        assert answers == [[Delivered()] * 10] * 4
        assert receiver.most_open <= 3


async def test_waiting_for_a_place_is_not_counted_as_the_receivers_time() -> None:
    async with answering(OK) as receiver, sink_for(receiver.url, timeout="10ms") as sink:
        sink.limit(0)
        sending = asyncio.ensure_future(sink.send([make_delivery()]))
        await asyncio.wait([sending], timeout=0.1)
        # Long enough for the receiver on a busy machine.
        sink._deadline.seconds = 60.0
        sink.limit(1)
        assert await sending == [Delivered()]


async def test_cookies_are_not_kept() -> None:
    cookie = answer("200 OK", b"", "Set-Cookie: a=b; Path=/")
    async with answering(cookie) as receiver, sink_for(receiver.url) as sink:
        await sink.send([make_delivery()])
        await sink.send([make_delivery()])
    assert not any("cookie" in request.headers for request in receiver.requests)


async def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    async with answering(OK) as proxy, answering(OK) as receiver:
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{proxy.port}")
        assert await send(receiver.url) == Delivered()
        assert (proxy.connections, receiver.connections) == (0, 1)


async def test_a_user_in_the_url_is_basic_authentication() -> None:
    async with answering(OK) as receiver:
        await send(receiver.url.replace("//", "//user:p%40ss@"))
    [request] = receiver.requests
    assert request.headers["authorization"] == "Basic dXNlcjpwQHNz"
    assert "user" not in request.line + request.headers["host"]


async def test_a_secret_that_was_replaced_is_read_after_a_401(tmp_path: Path) -> None:
    secret, token = tmp_path / "secret", tmp_path / "token"
    secret.write_text("old-secret\n")
    token.write_text("old-token\n")
    async with (
        answering(OK, answer("401 Unauthorized", b"not old-token"), OK) as receiver,
        sink_for(receiver.url, secret=f"file:{secret}", auth=f"file:{token}") as sink,
    ):
        await sink.send([make_delivery()])
        secret.write_text("new-secret\n")
        token.write_text("new-token\n")
        [said] = await sink.send([make_delivery()])
        assert reason(said) == "401 Unauthorized: not ***"
        assert await sink.send([make_delivery()]) == [Delivered()]
    signed_with = ["old-secret", "old-secret", "new-secret"]
    for request, held in zip(receiver.requests, signed_with, strict=True):
        assert verify(request.body, request.headers, held, now=NOW)
    assert receiver.requests[-1].headers["authorization"] == "Bearer new-token"


async def test_a_secret_that_is_gone_at_a_401_is_used_on(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("old-secret\n")
    async with (
        answering(answer("401 Unauthorized", b"who?"), OK) as receiver,
        sink_for(receiver.url, secret=f"file:{secret}") as sink,
    ):
        secret.unlink()
        [said] = await sink.send([make_delivery()])
        assert reason(said) == "401 Unauthorized: who?"
        assert await sink.send([make_delivery()]) == [Delivered()]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"secret": "env:NO_SUCH_VARIABLE"}, "'runner': secret: env:NO_SUCH_VARIABLE is missing or empty"),
        ({"auth": "file:/no/such/file"}, "'runner': auth: file:/no/such/file is missing or empty"),
        ({"secret": "whsec_*hidden*"}, "'runner': secret: what follows whsec_ in the secret is not base64"),
        (
            {"secret": "whpk_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="},
            "'runner': secret holds a public key",
        ),
        ({"auth": "two\r\nhidden: lines"}, "'runner': auth holds what no header may"),
        ({"sink": "http://user:hidden@[::1/"}, "'runner': sink = .* is not a valid URL"),
        ({"sink": "http://user:hidden@example.org:99999/"}, "'runner': sink = .* is not a valid URL"),
        ({"sink": "http://user:hidden@example.org/", "auth": "x"}, "holds a user, and auth is set too"),
    ],
)
def test_a_mistake_in_the_settings_is_an_error_at_the_start(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        HttpSink(Destination(**{"name": "runner", "sink": "http://example.org/", **settings}))
    assert "hidden" not in str(caught.value)


def test_without_aiohttp_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    monkeypatch.delitem(sys.modules, "relaybox.sinks.http.sink")
    with pytest.raises(MissingExtra, match=r"aiohttp is not installed: pip install 'relaybox\[http\]'"):
        open_sink(Destination("runner", "http://example.org/"), {})


async def test_a_sink_that_is_closed_while_it_sends_answers() -> None:
    arrived = asyncio.Event()

    async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await asyncio.Event().wait()

    async with doing(wait) as receiver, sink_for(receiver.url) as sink:
        sending = asyncio.ensure_future(sink.send([make_delivery()]))
        await arrived.wait()
        await sink.close()
        [said] = await sending
    assert type(said) is Retry
