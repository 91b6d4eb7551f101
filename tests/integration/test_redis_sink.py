"""Events as entries of real Redis Streams, a server that refuses, and one that goes away."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from uuid import uuid4

import pytest
from redis.asyncio import Redis

from relaybox import Destination
from relaybox.core.outcome import Delivered, Reject, Retry, Throttled, Unavailable, Unreachable
from relaybox.errors import ConfigError
from relaybox.sinks.redis import BATCH, RedisSink
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration import outages
from tests.integration.receivers import Receiver, listening
from tests.integration.sinking import altered, check_refused, send, sink_to
from tests.integration.test_http_exchange import certificate
from tests.servers import base
from tests.servers import redis as server


class RedisPlace(outages.Place):
    """A stream that takes everything: the duplicate has the same event id."""

    scheme = "redis"
    silence = "no answer"
    duplicates = outages.MANY // 5

    def __init__(self, url: str, server: Any = None) -> None:
        super().__init__(server)
        self.address = url
        self.stream = "order-events" if server else f"s{uuid4().hex}"
        self.url = url if server else f"{url}?stream={self.stream}"

    async def entries(self) -> list[outages.Entry]:
        async with Redis.from_url(self.address, decode_responses=True) as client:
            return [(fields, fields["data"]) for _, fields in await client.xrange(self.stream)]


@pytest.fixture
def place(redis_url: str) -> RedisPlace:
    """Return a stream of this test on a shared server."""
    return RedisPlace(redis_url)


async def test_an_event_is_an_entry_with_its_headers_as_fields(place: RedisPlace) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"tenant": "acme", "of": 7, "data": "mine", "traceparent": trace, "größe\r\n": "\x00"}
    delivery = make_delivery('{"total": 42}', headers=json.dumps(headers))
    assert await send(place.url, delivery) == [Delivered()]
    [(entry, body)] = await place.entries()
    del entry["data"]
    assert json.loads(body)["data"] == {"total": 42}
    assert entry == {
        "event-id": str(delivery.event_id),
        "event-type": "order.paid",
        "aggregate-type": "Order",
        "aggregate-id": "1",
        "content-type": "application/json",
        "timestamp": "2025-01-31T12:00:00.250000Z",
        "tenant": "acme",
        "of": "7",
        "traceparent": trace,
        "größe\r\n": "\x00",
    }


async def test_the_stream_is_named_by_a_template_in_lower_case_unless_it_is_written(redis_url: str) -> None:
    name = f"Shop{uuid4().hex}"
    delivery = altered(aggregate_type=name)
    written = {"stream": "{aggregate_type}.{event_type}"}
    assert await send(redis_url, delivery) == [Delivered()]
    assert await send(redis_url, delivery, options=written) == [Delivered()]
    async with Redis.from_url(redis_url) as client:
        for stream in (f"{name.lower()}-events", f"{name}.order.paid"):
            assert await client.xlen(stream) == 1
            await client.delete(stream)


async def test_bytes_are_the_body_as_they_are(place: RedisPlace) -> None:
    assert await send(place.url, make_delivery(data=b"\xff\x00"), format="payload") == [Delivered()]
    async with Redis.from_url(place.address) as client:
        [(_, fields)] = await client.xrange(place.stream)
    assert (fields[b"data"], fields[b"content-type"]) == (b"\xff\x00", b"application/octet-stream")


async def test_a_stream_is_kept_at_its_length(place: RedisPlace) -> None:
    deliveries = [make_delivery() for _ in range(30)]
    exactly = f"{place.url}&maxlen=10&approximate=false"
    assert await send(exactly, *deliveries) == [Delivered()] * 30
    ids = [entry["event-id"] for entry, _ in await place.entries()]
    assert ids == [str(delivery.event_id) for delivery in deliveries[-10:]]


async def test_more_than_a_pipeline_holds_is_sent_in_several(place: RedisPlace) -> None:
    deliveries = [make_delivery() for _ in range(3 * BATCH + 1)]
    assert await send(place.url, *deliveries) == [Delivered()] * len(deliveries)
    assert {entry["event-id"] for entry, _ in await place.entries()} == {str(d.event_id) for d in deliveries}


async def test_a_key_that_is_not_a_stream_is_unavailable_and_the_others_are_untouched(redis_url: str) -> None:
    name = uuid4().hex
    [bad, good] = [altered(aggregate_id=f"{name}-{end}") for end in ("a", "b")]
    async with Redis.from_url(redis_url) as client:
        await client.set(f"{name}-a", "a text")
        [wrong, passed] = await send(redis_url, bad, good, options={"stream": "{aggregate_id}"})
        await client.delete(f"{name}-a", f"{name}-b")
    check_refused(wrong, Unavailable, "WRONGTYPE", f"'{name}-a'")
    assert passed == Delivered()


async def test_a_body_over_the_servers_limit_is_rejected_with_the_limit_and_takes_no_other_with_it() -> None:
    limit = 1024 * 1024
    with available("Redis", server.broker("--proto-max-bulk-len", str(limit))) as started:
        large, fits, small = (make_delivery(data=b"x" * size) for size in (limit + 1, limit, 1))
        answers = await send(server.url_of(started), large, fits, small, format="payload")
    check_refused(answers[0], Reject, f"proto-max-bulk-len is {limit}")
    assert answers[1:] == [Delivered()] * 2


async def test_what_the_server_cannot_take_now_is_unavailable() -> None:
    with available("Redis", server.broker()) as started:
        url = server.url_of(started)
        async with sink_to(url) as sink, Redis.from_url(url) as client:

            async def answered() -> Any:
                return (await sink.send([make_delivery()]))[0]

            assert await answered() == Delivered()
            await client.config_set("maxmemory", "1")
            check_refused(await answered(), Throttled, "maxmemory")
            await client.config_set("maxmemory", "0")
            await client.replicaof("127.0.0.1", "1")
            check_refused(await answered(), Unavailable, "read only")
            await client.config_set("replica-serve-stale-data", "no")
            assert isinstance(await answered(), Unavailable)
            await client.replicaof("NO", "ONE")
            await client.config_set("min-replicas-to-write", "1")
            check_refused(await answered(), Unavailable, "NOREPLICAS")
            await client.config_set("min-replicas-to-write", "0")
            assert await answered() == Delivered()


async def test_credentials_are_checked_and_never_shown() -> None:
    with available("Redis", server.broker("--requirepass", "s3cret word")) as started:
        assert await send(server.url_of(started, ":s3cret%20word"), make_delivery()) == [Delivered()]
        assert await send(server.url_of(started), make_delivery(), auth="s3cret word") == [Delivered()]
        [missing] = await send(server.url_of(started), make_delivery())
        [wrong] = await send(server.url_of(started, ":wr0ng"), make_delivery())
        async with Redis.from_url(server.url_of(started, ":s3cret%20word")) as client:
            await client.acl_setuser(
                "shop", enabled=True, passwords=["+pw"], commands=["+@all", "-xadd"], keys=["*"]
            )
        [denied] = await send(server.url_of(started, "shop:pw"), make_delivery())
    for refused in (missing, wrong):
        check_refused(refused, Unavailable, "refuses the credentials")
        assert "wr0ng" not in refused.reason
    assert isinstance(denied, Unavailable)
    assert "no permissions" in denied.reason.lower()


async def test_a_server_that_has_enough_clients_is_busy() -> None:
    with available("Redis", server.broker("--maxclients", "1")) as started:
        async with Redis.from_url(server.url_of(started)) as client:
            await client.ping()
            [answer] = await send(server.url_of(started), make_delivery())
    # The server may be gone before its reason is read.
    assert isinstance(answer, Throttled | Unreachable)


async def test_tls_is_verified() -> None:
    with base.workspace() as directory:
        file = str(certificate(directory / "server.pem"))
        tls = ("--tls-cert-file", file, "--tls-key-file", file, "--tls-ca-cert-file", file)
        with available(
            "Redis", server.broker(*tls, "--tls-auth-clients", "no", "--tls-port", "0")
        ) as started:
            async with Redis.from_url(server.url_of(started)) as client:
                await client.config_set("port", "0")
                await client.config_set("tls-port", str(started.port))
            url = server.url_of(started).replace("redis:", "rediss:")
            [trusted] = await send(url, make_delivery(), options={"ca": file})
            [unknown] = await send(url, make_delivery())
    assert trusted == Delivered()
    check_refused(unknown, Unreachable, "CERTIFICATE_VERIFY_FAILED")


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("redis://h/orders", {}, "the database's number"),
        ("redis://h/0?steam=x", {}, "did you mean 'stream'"),
        ("redis://h/0?stream={order}", {}, "names 'order'"),
        ("redis://h/0?maxlen=0", {}, "maxlen"),
        ("redis://h/0?maxlen=many", {}, "whole number"),
        ("redis://h/0", {"approximate": True}, "without maxlen"),
        ("redis://h/0?maxlen=1&approximate=yes", {}, "true or false"),
        ("redis://a,b/0", {}, "more than one host"),
        ("redis://h:x/0", {}, "host:port"),
        ("redis://h/0", {"ca": "x"}, "no setting 'ca'"),
        ("rediss://h/0", {"ca": "/nowhere"}, "cannot be read"),
        ("rediss://h/0", {"key": "x"}, "without certificate"),
    ],
)
def test_wrong_settings_are_reported(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RedisSink(Destination("shop", url, options=options))


class TestRedisOutages(outages.OutageContract):
    @pytest.fixture
    def place(self) -> Iterator[RedisPlace]:
        """Run a server that a test may stop."""
        with available("Redis", server.broker()) as started:
            yield RedisPlace(server.url_of(started), started)

    async def test_a_connection_that_the_server_closed_while_it_was_idle_is_not_a_failure(
        self, place: RedisPlace
    ) -> None:
        async with sink_to(place.url) as sink:
            assert await sink.send([make_delivery()]) == [Delivered()]
            async with Redis.from_url(place.url) as client:
                await client.client_kill_filter(_type="normal", skipme=True)
            assert await sink.send([make_delivery()]) == [Delivered()]

    async def test_a_wrong_password_is_reported_and_holds_up_no_other_destination(
        self, place: RedisPlace, database: str
    ) -> None:
        async def repair() -> None:
            allowed = {"commands": ["+@all"], "keys": ["*"], "channels": ["*"]}
            async with Redis.from_url(place.url) as client:
                await client.acl_setuser("shop", enabled=True, passwords=["+s3cret"], **allowed)

        login, trouble = server.url_of(place.server, "shop:s3cret"), "refuses the credentials"
        assert trouble in await outages.checked(login)
        await outages.untroubled(database, login, trouble, repair)


@asynccontextmanager
async def answering(*replies: bytes) -> AsyncIterator[str]:
    """Yield the URL of a server that answers so to the commands that add, and then breaks off."""
    left = list(replies)

    async def talk(_: Receiver, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            for name in re.findall(rb"\*\d+\r\n\$\d+\r\n(\w+)\r\n", chunk):
                if name == b"XADD" and not left:
                    return
                writer.write(left.pop(0) if name == b"XADD" else b"*0\r\n")

    async with listening(talk) as receiver:
        yield f"redis://127.0.0.1:{receiver.port}/0"


UNAVAILABLE = (
    *("LOADING Redis is loading the dataset in memory", "MASTERDOWN Link with MASTER is down"),
    *("CLUSTERDOWN The cluster is down", "MOVED 3999 127.0.0.1:6381", "NOAUTH Authentication required."),
    *("MISCONF Redis is configured to save RDB snapshots", "ERR unknown command 'XADD'"),
)


@pytest.mark.parametrize(
    ("reply", "kind"), [*((text, Unavailable) for text in UNAVAILABLE), ("ERR something else", Retry)]
)
async def test_a_servers_own_trouble_is_not_blamed_on_an_event(reply: str, kind: type) -> None:
    async with answering(f"-{reply}\r\n".encode()) as url:
        [answer] = await send(url, make_delivery())
    assert type(answer) is kind
    assert answer.reason


async def test_what_was_answered_before_the_connection_broke_counts() -> None:
    async with answering(b"$3\r\n1-1\r\n", b"-WRONGTYPE no\r\n", b"$3\r\n1-3\r\n") as url:
        answers = await send(url, *(make_delivery() for _ in range(5)))
    assert [type(answer) for answer in answers] == [Delivered, Unavailable] * 2 + [Unavailable]
