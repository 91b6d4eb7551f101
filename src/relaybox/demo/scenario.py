"""The demo's scenario, and the supervisor that starts, kills and watches its processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import sqlalchemy as sa

from relaybox.database.schema import Tables
from relaybox.demo.processes import Part
from relaybox.demo.screen import Bar, Line, Screen
from relaybox.demo.shop import LEASE, PARTS, TIMEOUT, changes, metadata
from relaybox.demo.verdict import Outage, Verdict, compare
from relaybox.demo.workspace import (
    DESTINATIONS,
    FLAKY,
    RECEIVERS,
    WEBHOOK,
    Change,
    Fault,
    Placed,
    Reader,
    Receipt,
    Workspace,
)

TICK = 0.1
MOST_REASONS = 5
LOOK_EVERY = 0.3
"""Seconds between two queries, so that the database is not slowed down."""
RECEIVER_DOWN_AT, RECEIVER_DOWN_FOR = 0.1, 2.0
RELAY_KILLED_AT, RELAY_DEAD_FOR = 0.45, 1.0
"""When, as a fraction of the time in which orders are placed, and for how many seconds."""
CAUGHT_UP = 60
"""Deliveries that may be pending in normal operation."""


class TimeUp(Exception):
    """The deadline passed while waiting."""


class Supervisor:
    """The parent of all parts: it starts and watches them, and kills those that still run at the end."""

    def __init__(
        self, workspace: Workspace, tables: Tables, screen: Screen, began: float, deadline: float
    ) -> None:
        self.doing = "starting"
        self.circuits: dict[str, str] = {}
        self.workspace = workspace
        self._event = tables.event.c
        self._destination = tables.destination.c
        self._screen = screen
        self._began = began
        self._deadline = deadline
        self._parts: dict[str, Part] = {}
        self._stopped: set[str] = set()
        self._placed = Reader(workspace.journal("shop", Placed), Placed)
        self._receipts = {name: Reader(workspace.journal(name, Receipt), Receipt) for name in DESTINATIONS}
        self._refs: dict[str, set[str]] = {name: set() for name in DESTINATIONS}
        self._faults = {name: Reader(workspace.journal(name, Fault), Fault) for name in RECEIVERS}
        self._looked = 0.0
        self._engine = workspace.engine()
        metadata.create_all(self._engine)

    def close(self) -> None:
        """Kill the running parts and disconnect."""
        self.end()
        self._engine.dispose()

    def say(self, text: str, mood: str = "") -> None:
        """Show an event on the screen."""
        self._screen.say(time.monotonic() - self._began, text, mood)

    def start(self, name: str) -> Part:
        """Start a part, without waiting until it is ready."""
        part = self._parts[name] = Part(self.workspace, name, PARTS[name])
        return part

    def kill(self, name: str) -> int | None:
        """Kill a part with SIGKILL and return its process id."""
        part = self._parts.pop(name)
        part.kill()
        return part.pid

    def stop(self, name: str) -> None:
        """Ask a part to end in order."""
        self._parts.pop(name).stop()
        self._stopped.add(name)

    def end(self) -> None:
        """Kill the running parts."""
        with ExitStack() as endings:
            for part in self._parts.values():
                endings.callback(part.kill)
        self._parts.clear()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Watch until a condition is true. Raise ``TimeUp`` at the deadline, ``Broken`` if a part fails."""
        while not condition():
            if time.monotonic() > self._deadline:
                raise TimeUp
            self.watch()
            time.sleep(TICK)

    def wait_until(self, moment: float) -> None:
        """Watch until a time."""
        self.wait(lambda: time.monotonic() >= moment)

    def watch(self) -> None:
        """Check everything once, and show it."""
        for part in self._parts.values():
            part.check()
        if time.monotonic() > self._looked + LOOK_EVERY:
            self._looked = time.monotonic()
            query = sa.select(self._destination.name, self._destination.circuit)
            with self._engine.connect() as connection:
                self.circuits = {row.name: row.circuit for row in connection.execute(query)}
        self._read()
        committed, parts = self._view()
        self._screen.update(time.monotonic() - self._began, self.doing, committed, parts)

    def pending(self, *conditions: sa.ColumnElement[bool]) -> int:
        """Return the number of unfinished deliveries."""
        query = sa.select(sa.func.count()).where(self._event.status == "pending", *conditions)
        with self._engine.connect() as connection:
            return connection.execute(query).scalar_one()

    def held_by(self, pid: int | None) -> int:
        """Return the number of unfinished deliveries that a relay holds, or held when it died."""
        return self.pending(self._event.lease_owner.contains(f":{pid}:"))

    def suspects(self) -> int:
        """Return the number of unfinished deliveries that a dead relay held."""
        return self.pending(self._event.crashes > 0)

    def arrived(self, destination: str) -> int:
        """Return the number of a destination's acknowledgements."""
        self._read()
        return len(self._receipts[destination].records)

    def reasons(self) -> list[str]:
        """Return why deliveries are unfinished, the most frequent reasons first."""
        event, count = self._event, sa.func.count()
        query = (
            sa.select(count, event.destination, event.status, event.error_message)
            .where(event.status != "delivered")
            .group_by(event.destination, event.status, event.error_message)
            .order_by(count.desc())
            .limit(MOST_REASONS)
        )
        with self._engine.connect() as connection:
            rows = connection.execute(query).all()
        return [
            f"{number} × {name}, {status}: {error or 'not tried'}" for number, name, status, error in rows
        ]

    def judge(self, outages: dict[str, list[Outage]]) -> dict[str, Verdict]:
        """Compare what each destination acknowledged with what the database holds."""
        self._read()
        with self._engine.connect() as connection:
            committed = [Change(*row) for row in connection.execute(sa.select(changes))]
        times = {placed.ref: placed.at for placed in self._placed.records}
        return {
            name: compare(committed, self._receipts[name].records, times, outages[name])
            for name in DESTINATIONS
        }

    def _read(self) -> None:
        self._placed.read()
        for faults in self._faults.values():
            faults.read()
        for name, receipts in self._receipts.items():
            self._refs[name].update(receipt.change.ref for receipt in receipts.read())

    def _view(self) -> tuple[int, list[Line]]:
        undone = Counter(placed.undone for placed in self._placed.records)
        relay = self._parts.get("relay")
        state = f"process {relay.pid}" if relay else "stopped" if "relay" in self._stopped else "dead"
        back = f"{undone['rollback']} transactions and {undone['savepoint']} savepoints rolled back"
        bars = [
            Bar(name, *self._state(name), len(refs), len(self._receipts[name].records) - len(refs))
            for name, refs in self._refs.items()
        ]
        shop = Line("shop", f"{undone[None]} committed; {back}", "good")
        return undone[None], [shop, Line("relay", state, "bad" if state == "dead" else "good"), *bars]

    def _state(self, name: str) -> tuple[str, str]:
        closed = self.circuits.get(name, "closed") == "closed"
        if name not in RECEIVERS:
            return "in the relay's process", "good"
        if name not in self._parts:
            return ("down" if closed else "down; circuit open"), "bad"
        if not closed:
            return "back; circuit open until a probe", "waiting"
        if name == FLAKY:
            kinds = Counter(fault.kind for fault in self._faults[name].records)
            return f"{kinds['500']}×500 {kinds['503']}×503 {kinds['hangs']} hung", "waiting"
        return "listening", "good"


class Scenario:
    """The steps of the demo, and the outages of each destination."""

    def __init__(self, supervisor: Supervisor, seconds: float) -> None:
        self.outages: dict[str, list[Outage]] = {name: [] for name in DESTINATIONS}
        self._supervisor = supervisor
        self._seconds = seconds

    def run(self) -> bool:
        """Run the scenario. True if it ended in time."""
        supervisor = self._supervisor
        try:
            self._begin()
            self._interrupt_receiver()
            self._kill_relay()
            supervisor.doing = "the last orders"
            supervisor.wait(lambda: not self._shop.is_alive())
            supervisor.say("the shop is closed; the relay delivers what is left")
            supervisor.doing = "delivering the rest"
            supervisor.wait(lambda: not supervisor.pending())
        except TimeUp:
            supervisor.say("time is up", "bad")
            supervisor.end()
            return False
        supervisor.doing = "comparing"
        supervisor.stop("relay")
        supervisor.watch()
        return True

    def _begin(self) -> None:
        supervisor = self._supervisor
        for part in [supervisor.start(name) for name in (*RECEIVERS, "relay")]:
            self._until_ready(part)
        for name in RECEIVERS:
            self._forge(name)
        self._shop = supervisor.start("shop")
        self._until_ready(self._shop)
        self._opened = time.monotonic()
        supervisor.doing = "orders are placed"
        supervisor.say(f"the shop is open for {self._seconds:g} s")

    def _forge(self, name: str) -> None:
        """Send a forged event; if a receiver accepts it, the verdict shows a phantom."""
        body = b'{"type": "order.placed", "aggregate_id": "1", "data": {"ref": "forged", "number": 1}}'
        headers = {
            "webhook-id": "forged",
            "webhook-timestamp": str(int(time.time())),
            "webhook-signature": "v1,Zm9yZ2Vk",
        }
        status = HTTPStatus.OK
        try:
            urlopen(Request(self._supervisor.workspace.url(name), body, headers), timeout=TIMEOUT).close()
        except HTTPError as error:
            status = HTTPStatus(error.code)
        self._supervisor.say(f"{name}: a forged event was answered {status.value} {status.phrase}")

    def _interrupt_receiver(self) -> None:
        supervisor = self._supervisor
        supervisor.wait_until(self._opened + RECEIVER_DOWN_AT * self._seconds)
        begin = time.monotonic()
        pid = supervisor.kill(WEBHOOK)
        supervisor.doing = "the webhook receiver is down"
        supervisor.say(f"the webhook receiver (process {pid}) is killed: connections are refused", "bad")
        supervisor.wait_until(begin + RECEIVER_DOWN_FOR)
        before = supervisor.arrived(WEBHOOK)
        self._until_ready(supervisor.start(WEBHOOK))
        supervisor.say(f"the webhook receiver is back after {time.monotonic() - begin:.1f} s", "good")
        supervisor.wait(
            lambda: supervisor.arrived(WEBHOOK) > before and supervisor.circuits.get(WEBHOOK) == "closed"
        )
        self.outages[WEBHOOK].append((begin, time.monotonic()))
        supervisor.say("a probe got through: the circuit is closed", "good")
        supervisor.doing = "the webhook receiver catches up"
        supervisor.wait(lambda: supervisor.pending() < CAUGHT_UP)
        supervisor.say("the webhook receiver has caught up", "good")
        supervisor.doing = "orders are placed"

    def _kill_relay(self) -> None:
        supervisor = self._supervisor
        supervisor.wait_until(self._opened + RELAY_KILLED_AT * self._seconds)
        begin = time.monotonic()
        pid = supervisor.kill("relay")
        held = supervisor.held_by(pid)
        supervisor.doing = "the relay is dead"
        supervisor.say(f"the relay (process {pid}) gets SIGKILL while it holds {held} deliveries", "bad")
        supervisor.wait_until(begin + RELAY_DEAD_FOR)
        relay = supervisor.start("relay")
        self._until_ready(relay)
        supervisor.say(f"another relay (process {relay.pid}) takes over", "good")
        supervisor.doing = "the dead relay's leases run out"
        supervisor.wait_until(begin + LEASE)
        supervisor.wait(lambda: not supervisor.held_by(pid) and not supervisor.suspects())
        for outages in self.outages.values():
            outages.append((begin, time.monotonic()))
        supervisor.say("what the dead relay held is delivered", "good")

    def _until_ready(self, part: Part) -> None:
        self._supervisor.wait(lambda: part.ready)
