"""A server of Redis that is down, breaks connections or says nothing, and what becomes of events."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import pytest
from redis.asyncio import Redis

from relaybox.outcome import Delivered, Retry, Unavailable
from relaybox.testing.sink_contract import make_delivery
from tests.conftest import available
from tests.integration.outages import MANY, Entry, OutageContract, Place, checked, untroubled
from tests.integration.sinking import send, sink_to
from tests.servers import redis as server
from tests.waiting import PATIENCE


class RedisPlace(Place):
    """A stream that takes everything: the duplicate has the same event id."""

    scheme = "redis"
    silence = "no answer"
    duplicates = MANY // 5

    @property
    def url(self) -> str:
        return server.url_of(self.server)

    async def declare(self) -> None:
        """It is made with its first entry."""

    async def entries(self) -> list[Entry]:
        async with Redis.from_url(self.url, decode_responses=True) as client:
            found = await client.xrange("order-events")
        return [Entry(fields, fields["data"]) for _, fields in found]


@pytest.fixture
def place() -> Iterator[RedisPlace]:
    """A server that a test may stop."""
    with available("Redis", server.broker()) as started:
        yield RedisPlace(started)


class TestRedisOutages(OutageContract):
    async def test_a_connection_that_the_server_closed_while_it_lay_idle_is_no_failure(
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
        async def mend() -> None:
            allowed = {"commands": ["+@all"], "keys": ["*"], "channels": ["*"]}
            async with Redis.from_url(place.url) as client:
                await client.acl_setuser("shop", enabled=True, passwords=["+s3cret"], **allowed)

        login, trouble = server.url_of(place.server, "shop:s3cret"), "refuses the credentials"
        assert trouble in await checked(login)
        await untroubled(database, login, trouble, mend)


@asynccontextmanager
async def answering(*replies: bytes) -> AsyncIterator[str]:
    """The URL of a server that answers so to the commands that add, and then breaks off."""
    left, ended = list(replies), asyncio.Event()

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while chunk := await reader.read(1 << 16):
                for name in re.findall(rb"\*\d+\r\n\$\d+\r\n(\w+)\r\n", chunk):
                    if name == b"XADD" and not left:
                        writer.close()
                        break
                    writer.write(left.pop(0) if name == b"XADD" else b"*0\r\n")
        writer.close()
        ended.set()

    async with await asyncio.start_server(talk, "127.0.0.1", 0) as listening:
        yield f"redis://127.0.0.1:{listening.sockets[0].getsockname()[1]}/0"
        await asyncio.wait_for(ended.wait(), PATIENCE)


UNAVAILABLE = (
    *("LOADING Redis is loading the dataset in memory", "MASTERDOWN Link with MASTER is down"),
    *("CLUSTERDOWN The cluster is down", "MOVED 3999 127.0.0.1:6381", "NOAUTH Authentication required."),
    *("MISCONF Redis is configured to save RDB snapshots", "ERR unknown command 'XADD'"),
)


@pytest.mark.parametrize(
    ("reply", "kind"), [*((text, Unavailable) for text in UNAVAILABLE), ("ERR something else", Retry)]
)
async def test_what_a_server_says_of_itself_is_no_events_fault(reply: str, kind: type) -> None:
    async with answering(f"-{reply}\r\n".encode()) as url:
        [answer] = await send(url, make_delivery())
    assert type(answer) is kind
    assert answer.reason


async def test_what_was_answered_before_the_connection_broke_counts() -> None:
    async with answering(b"$3\r\n1-1\r\n", b"-WRONGTYPE no\r\n", b"$3\r\n1-3\r\n") as url:
        answers = await send(url, *(make_delivery() for _ in range(5)))
    kinds = [type(answer) for answer in answers]
    assert kinds == [Delivered, Unavailable, Delivered, Unavailable, Unavailable]
