"""Every peer and every bare loop drains its rows; what they reach is for ``make bench`` to say."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import sqlalchemy as sa

from benchmarks import limits
from benchmarks.peers import PEERS, Peer
from benchmarks.peers.base import apart, check
from relaybox.schema import make_tables

PACKAGES = ("django_outbox_pattern", "faststream_outbox", "pgqueuer", "procrastinate", "txoutbox", "uvloop")
pytestmark = pytest.mark.skipif(
    any(find_spec(package) is None for package in PACKAGES), reason="the group bench is not installed"
)

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


async def test_a_peer_says_how_long_each_event_waited(url: str) -> None:
    peer = PEERS[0]
    waits = await peer.waits(url, rate=100, seconds=0.3)
    assert len(waits) == 30
    assert all(0 <= wait < 10 for wait in waits)


@pytest.mark.parametrize(
    ("loop", "driver", "keep"),
    [
        (limits.two_connections, "psycopg", True),
        (limits.one_connection, "asyncpg", False),
    ],
)
async def test_a_bare_loop_drains_every_row(loop: Any, driver: str, keep: bool, url: str) -> None:
    engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
    metadata = sa.MetaData()
    make_tables(metadata)
    metadata.create_all(engine)
    engine.dispose()
    assert await loop(url, ROWS, keep=keep, driver=driver) > 0


async def test_a_bare_update_takes_time(url: str) -> None:
    assert await limits.bare_update(url, 20) > 0


def test_rows_that_are_missing_or_handled_twice_are_no_result() -> None:
    check(3, 3, 3)
    for seen, done in ((2, 3), (4, 3), (3, 2)):
        with pytest.raises(RuntimeError, match="of 3 rows"):
            check(seen, done, 3)


async def fail() -> None:
    raise LookupError("nothing here")


async def vanish() -> None:
    os._exit(1)


@pytest.mark.parametrize(("work", "message"), [(fail, "nothing here"), (vanish, "ended without an answer")])
async def test_what_goes_wrong_in_a_process_of_its_own_is_told(work: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        await apart(work, seconds=30)
