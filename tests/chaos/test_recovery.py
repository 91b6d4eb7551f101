"""How soon deliveries go on after a kill, with relays as users have them: real servers, every default."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TypeAlias
from uuid import UUID

import pytest
import sqlalchemy as sa

from relaybox import Call
from tests.chaos import fleet, receiver, workload
from tests.chaos.cluster import Cluster, Ground
from tests.chaos.drivers import engine
from tests.chaos.fleet import Doom
from tests.chaos.receiver import Applied, Mood
from tests.chaos.workload import LOOSE, ORDERED, Place, Rows
from tests.waiting import wait_for

Record: TypeAlias = Callable[[str, object], None]

BOUNDS = "RELAYBOX_BOUNDS" in os.environ
"""Whether the bounds are asserted, as ``make test-chaos`` and ``make proof`` do alone on a machine."""
AFTER_DATABASE = 2.0
"""Seconds from the moment at which the database takes connections again to the first delivery."""
AFTER_LEASE = 1.0
"""Seconds beyond the lease until everything that a killed relay held is delivered by another."""
LEASE = 2.0
JOINS = 8.0  # Seconds after which a relay that joins others works


class Stage:
    def __init__(self, ground: Ground, url: str, directory: Path, **settings: float) -> None:
        self.nursery = ground.nursery
        self._log = directory / "relays.log"
        control, self._dump = directory / "control", directory / "applied"
        plan = receiver.Plan(str(control), [ORDERED, LOOSE], 0)
        self._pids = [self.nursery.start("receiver", plan, directory / "receiver.log")]
        self.receiver = receiver.Remote(control)
        self.place = Place(url, self.receiver.state().ports, **settings)
        self.place.outbox().migrate()
        workload.create(url)
        self.rows = Rows(self.place)

    def relay(self, doom: Doom | None = None) -> int:
        plan = fleet.Plan(self.place, doom, hasty=False)
        self._pids.append(self.nursery.start("relay", plan, self._log))
        return self._pids[-1]

    def be(self, mood: Mood) -> None:
        for endpoint in (ORDERED, LOOSE):
            self.receiver.be(endpoint, mood)

    def emit(self, count: int, *, keys: int = 40) -> None:
        calls = [Call("Order", n % keys, "order.loud", {"n": n}) for n in range(count)]
        with engine(self.place.url).begin() as connection:
            self.place.outbox().emit_many(connection, calls)

    def applied(self) -> list[Applied]:
        return self.receiver.applied(self._dump)

    def holds(self, pid: int) -> set[tuple[str, UUID]]:
        event = self.place.outbox().tables.event.c
        query = sa.select(event.destination, event.event_id).where(event.lease_owner.like(f"%:{pid}:%"))
        with engine(self.place.url).connect() as connection:
            return {(row[0], row[1]) for row in connection.execute(query)}

    def joined(self, pid: int) -> bool:
        """True if the relay has run for long enough that the others know it and it has its share."""
        relay = self.place.outbox().tables.relay.c
        query = sa.select(sa.func.now() - relay.started_at).where(relay.pid == pid)
        with engine(self.place.url).connect() as connection:
            age = connection.scalar(query)
        return age is not None and age.total_seconds() > JOINS

    def close(self) -> None:
        self.receiver.close()
        for pid in self._pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def stage(ground: Callable[..., Ground], tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    with ExitStack() as stack:

        def make(**settings: float) -> Stage:
            own = ground("postgresql-18")
            url = stack.enter_context(own.server.database())
            stage = Stage(own, url, tmp_path, **settings)
            stack.callback(stage.close)
            return stage

        yield make


@pytest.mark.parametrize(("relays", "away"), [(1, 0.5), (2, 0.5), (2, 8.0)])
def test_after_a_kill_of_the_database_deliveries_go_on(
    stage: Callable[..., Stage],
    ground: Callable[..., Ground],
    relays: int,
    away: float,
    record_property: Record,
) -> None:
    """Also where it was away for longer than a relay counts as alive without a sign of life."""
    server = ground("postgresql-18").server
    assert isinstance(server, Cluster)
    shop = stage(lease=60.0, timeout=30.0, poll=1.0, batch=20)
    shop.be(Mood("slow", seconds=0.02))
    for _ in range(relays):
        shop.relay()
    shop.emit(4_000)
    wait_for(lambda: shop.receiver.state().applied > 200, "deliveries flow")
    server.kill()
    time.sleep(away)
    server.start()
    back = time.monotonic()
    wait_for(lambda: shop.receiver.state().last > back, "a delivery after the database is back")
    first = next(one.at for one in shop.applied() if one.at > back) - back
    what = f"PostgreSQL killed and {away:g} s away, {relays} relays: the first delivery after it is back"
    record_property("recovery", [what, round(first, 2), f"{AFTER_DATABASE:g} s"])
    assert first < AFTER_DATABASE or not BOUNDS


@pytest.mark.parametrize("batch", [10, 400])
def test_what_a_killed_relay_held_is_delivered_by_another(
    stage: Callable[..., Stage], batch: int, record_property: Record
) -> None:
    shop = stage(lease=LEASE, timeout=LEASE, poll=0.1, batch=batch)
    survivor, victim = shop.relay(), shop.relay()
    wait_for(lambda: shop.joined(survivor) and shop.joined(victim), "both run")
    # So that the victim has all of it, and does not get rid of it.
    os.kill(survivor, signal.SIGSTOP)
    shop.be(Mood("hang"))
    shop.emit(batch, keys=batch)
    wait_for(lambda: len(shop.holds(victim)) == 2 * batch, "the victim holds everything")
    owed = shop.holds(victim)
    os.kill(victim, signal.SIGKILL)
    killed = time.monotonic()
    shop.be(Mood())
    os.kill(survivor, signal.SIGCONT)
    wait_for(lambda: not shop.rows.pending(), "everything is delivered")
    arrived = {(one.endpoint, UUID(one.headers["webhook-id"])): one.at for one in shop.applied()}
    took = max(arrived[one] for one in owed) - killed
    what = (
        f"a relay killed that held {len(owed)} events under a lease of {LEASE:g} s: all delivered by another"
    )
    record_property("recovery", [what, round(took, 2), f"{LEASE + AFTER_LEASE:g} s"])
    assert took < LEASE + AFTER_LEASE or not BOUNDS
