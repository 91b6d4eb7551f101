"""Every peer and every bare loop drains its rows; ``make bench`` measures their rates."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import sqlalchemy as sa

from benchmarks import limits
from benchmarks.harness import server_cpu
from benchmarks.peers import PEERS, PROMPT, Peer
from benchmarks.peers.base import MeasuredPeer, check
from benchmarks.process import Loop, apart, begin
from relaybox.database.schema import make_tables
from tests.databases import engine

ROWS = 200


def name(peer: Peer) -> str:
    return f"{peer.name}, {'kept' if peer.keeps else 'deleted'}"


@pytest.fixture
def url(fresh_database: Callable[[str], str]) -> str:
    return fresh_database("postgresql-18")


@pytest.mark.parametrize("peer", PEERS, ids=name)
async def test_a_peer_drains_every_row(peer: Peer, url: str) -> None:
    assert await peer.drain(url, ROWS, keys=20) > 0
    assert peer.version()
    assert peer.configuration()


@pytest.mark.parametrize("peer", PROMPT, ids=lambda peer: peer.name)
async def test_a_peer_says_how_long_each_event_waited(peer: Peer, url: str) -> None:
    waits = await peer.waits(url, rate=100, seconds=0.3)
    assert len(waits) == 30
    assert all(wait >= 0 for wait in waits)


@dataclass(frozen=True)
class Known:
    """A setup with a known rate."""

    rate: float

    async def drain(self, url: str, rows: int, keys: int) -> float:
        on_asyncio = type(asyncio.get_running_loop()).__module__.startswith("asyncio")
        return self.rate * (2 if on_asyncio else 1)

    async def receive(self, url: str, count: int, ready: Callable[[], None]) -> dict[int, float]:
        ready()
        if not self.rate:
            raise LookupError("not today")
        return {n: time.monotonic() + 100 + 1 / self.rate for n in range(count)}

    async def emit(self, url: str, rate: float, count: int) -> list[float]:
        return [time.monotonic()] * count


@pytest.mark.parametrize(("loops", "chosen"), [(("uvloop",), "uvloop"), (("uvloop", "asyncio"), "asyncio")])
async def test_a_peer_is_tuned_to_its_fastest_setup_and_loop(loops: Sequence[Loop], chosen: str) -> None:
    peer = MeasuredPeer("known", False, False, [Known(1), Known(3), Known(2)], loops=loops)
    await peer.tune("", keys=0)
    assert (peer.setup, peer.loop) == (Known(3), chosen)


async def test_a_peer_is_tuned_to_its_shortest_waits_and_one_that_fails_is_left_out() -> None:
    peer = MeasuredPeer("known", False, False, [Known(0), Known(0.1), Known(1)], loops=("uvloop",))
    await peer.tune_waits(lambda: nullcontext("there"), rate=10)
    assert peer.setup == Known(1)
    none = MeasuredPeer("known", False, False, [Known(0)], loops=("uvloop",))
    with pytest.raises(RuntimeError, match="not today"):
        await none.tune_waits(lambda: nullcontext("there"), rate=10)


@pytest.mark.parametrize(("driver", "keep"), [("psycopg", True), ("asyncpg", False)])
async def test_a_bare_loop_drains_every_row(driver: limits.Driver, keep: bool, url: str) -> None:
    metadata = sa.MetaData()
    make_tables(metadata)
    metadata.create_all(engine(url))
    assert await limits.two_connections(url, ROWS, keep=keep, driver=driver) > 0


def test_what_the_server_has_taken_grows_with_what_it_does(url: str) -> None:
    before = server_cpu(url)
    with engine(url).connect() as connection:
        connection.execute(sa.text("SELECT count(*) FROM generate_series(1, 3000000)"))
    assert 0 < before < server_cpu(url)


def test_rows_that_are_missing_or_handled_twice_are_no_result() -> None:
    check(3, 3, 3)
    for seen, done in ((2, 3), (4, 3), (3, 2)):
        with pytest.raises(RuntimeError, match="of 3 rows"):
            check(seen, done, 3)


async def fail() -> None:
    raise LookupError("nothing here")


async def vanish() -> None:
    os._exit(1)


async def look(size: int) -> tuple[str, int, bytes]:
    begin()
    return type(asyncio.get_running_loop()).__module__, gc.get_freeze_count(), b"x" * size


@pytest.mark.parametrize(("loop", "module"), [("uvloop", "uvloop"), ("asyncio", "asyncio.unix_events")])
async def test_what_is_measured_runs_on_its_loop_and_leaves_its_past_uncollected(
    loop: Loop, module: str
) -> None:
    found, frozen, answer = await apart(look, 10_000_000, seconds=60, loop=loop)
    assert found == module
    assert frozen > 1_000
    assert len(answer) == 10_000_000


@pytest.mark.parametrize(("work", "message"), [(fail, "nothing here"), (vanish, "ended without an answer")])
async def test_what_goes_wrong_in_a_process_of_its_own_is_reported(work: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        await apart(work, seconds=60)
