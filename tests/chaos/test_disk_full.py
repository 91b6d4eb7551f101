"""The database's disk is full for a while: callers get an error, the relay waits, then goes on by itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import count
from uuid import UUID

import msgspec
import pytest
import sqlalchemy as sa

from relaybox.core.event import Delivery
from relaybox.relay.observer import Observer
from relaybox.stores.store import Claim, Settlement
from tests.chaos.scene import KEYS, Scene
from tests.conftest import available
from tests.integration.shop import MEMBERSHIP, SOON
from tests.servers import fresh, small_disk
from tests.servers.small_disk import SmallDisk
from tests.waiting import await_for, wait_for

BACKLOG = 200
AFTERWARDS = 1_000_000
REFUSED = 30


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallDisk]:
    monkeypatch.setitem(MEMBERSHIP, "interval", SOON)
    with available("small disk", small_disk.server()) as disk:
        yield disk


class Watch(Observer):
    def __init__(self) -> None:
        self.troubles: Counter[str] = Counter()
        self.in_fault: set[int] | None = None
        """What it held at any moment of the fault; None: there is none as yet, or no longer."""
        self.held: set[int] = set()

    def claimed(self, destination: str, claim: Claim) -> None:
        new = set(map(number, claim.deliveries))
        self.held |= new
        if self.in_fault is not None:
            self.in_fault |= new

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        self.held -= {number(delivery) for delivery, _ in settlements}

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        self.troubles[doing] += 1


def number(delivery: Delivery) -> int:
    return int(msgspec.json.decode(delivery.payload or "")["n"])


class Business(Scene):
    """A shop that places an order and tells of it in one transaction."""

    def __init__(self, url: str) -> None:
        super().__init__(url, lease="2s", timeout="2s")
        self.failed = 0
        self._acknowledged: set[int] = (
            set()
        )  # The orders whose transaction was committed, as far as the caller knows
        with self.shop.engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE orders (n integer)"))

    def place(self, numbers: Iterable[int]) -> None:
        """Orders, each if the database takes it."""
        for n in numbers:
            try:
                with self.shop.engine.begin() as connection:
                    connection.execute(sa.text("INSERT INTO orders VALUES (:n)"), {"n": n})
                    payload = {"n": n, "text": "x" * 2000}
                    self.shop.outbox.emit(connection, "Order", n % KEYS, "order.paid", payload)
            except sa.exc.OperationalError:
                self.failed += 1
            else:
                self._acknowledged.add(n)

    def write_log(self) -> None:
        """Something that needs room in the server's log alone."""
        message = sa.text("SELECT pg_logical_emit_message(false, 'noise', repeat('x', 200000))")
        with suppress(sa.exc.OperationalError), self.shop.engine.begin() as connection:
            connection.execute(message)

    def check(self) -> set[int]:
        """Return what was delivered twice; check that each order has its event and none is lost."""
        emitted = self.numbers()
        with self.shop.engine.connect() as connection:
            assert emitted == set(connection.scalars(sa.text("SELECT n FROM orders")))
        assert emitted >= self._acknowledged
        assert self.shop.states() == {"delivered": len(emitted)}
        return self.repeated(emitted)


@pytest.mark.parametrize("strain", ["table", "log"])
async def test_a_full_disk_loses_nothing_and_the_relay_goes_on_when_there_is_room(
    disk: SmallDisk, strain: str
) -> None:
    with fresh.database(disk.url) as url:
        scene, watch = Business(url), Watch()
        scene.place(range(BACKLOG))
        async with scene.shop.outbox.relay(observers=[watch]):
            await await_for(lambda: len(scene.taken) >= 40, "a part delivered")
            held = watch.in_fault = set(watch.held)
            disk.fill()
            await asyncio.to_thread(press_on, scene, disk, strain)
            gave_up = await asyncio.to_thread(disk.free)
            watch.in_fault = None
            await asyncio.to_thread(scene.place, range(AFTERWARDS, AFTERWARDS + 20))
            await await_for(lambda: "pending" not in scene.shop.states(), "everything delivered")
        repeated = scene.check()
    assert scene.failed
    assert gave_up or strain == "table"
    assert watch.troubles or strain == "table"
    assert repeated <= held


def press_on(scene: Business, disk: SmallDisk, strain: str) -> None:
    """Emit on the full disk, and write to the log alone, until the server has refused enough or given up."""
    numbers = count(BACKLOG)

    def refused() -> bool:
        scene.place([next(numbers)])
        if strain == "log":
            scene.write_log()
            return disk.gave_up()
        return scene.failed >= REFUSED

    wait_for(refused, "somebody felt that the disk is full")
