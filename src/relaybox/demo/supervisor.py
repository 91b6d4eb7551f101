"""Where the demo plays: its processes, what they wrote, what the database says, and the screen."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from relaybox.demo.journal import Change
from relaybox.demo.processes import Part
from relaybox.demo.receivers import receive_flaky, receive_webhooks
from relaybox.demo.relay import deliver
from relaybox.demo.screen import Bar, Line, Screen, View
from relaybox.demo.shop import metadata, read_changes, trade
from relaybox.demo.verdict import Outage, Verdict, compare
from relaybox.demo.workspace import DESTINATIONS, FLAKY, HANDLER, RECEIVERS, WEBHOOK, Place
from relaybox.schema import Tables

PARTS = {"shop": trade, "relay": deliver, WEBHOOK: receive_webhooks, FLAKY: receive_flaky}
TICK = 0.1
MOST_REASONS = 5
LOOK_EVERY = 0.3
"""Seconds between two looks into the database, which has other things to do."""


class TimeUp(Exception):
    """What was waited for did not come in time."""


class Stage:
    """Starts parts and watches them; whatever is still running at the end is ended."""

    def __init__(self, place: Place, tables: Tables, screen: Screen, began: float, deadline: float) -> None:
        self.doing = "starting"
        self.circuits: dict[str, str] = {}
        self._place = place
        self._event = tables.event.c
        self._destination = tables.destination.c
        self._screen = screen
        self._began = began
        self._deadline = deadline
        self._parts: dict[str, Part] = {}
        self._stopped: set[str] = set()
        self._placed = place.placed()
        self._receipts = {name: place.receipts(name) for name in DESTINATIONS}
        self._refs: dict[str, set[str]] = {name: set() for name in DESTINATIONS}
        self._faults = {name: place.faults(name) for name in RECEIVERS}
        self._looked = 0.0
        self._engine = sa.create_engine(sa.make_url(place.database).set(drivername="postgresql+psycopg"))

    def __enter__(self) -> Self:
        metadata.create_all(self._engine)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._engine.dispose()

    def url(self, receiver: str) -> str:
        """Where a receiver takes events."""
        return self._place.url(receiver)

    def say(self, text: str, mood: str = "") -> None:
        """Tell what happened."""
        self._screen.say(time.monotonic() - self._began, text, mood)

    def start(self, name: str) -> Part:
        """Start a part; it is not ready yet."""
        part = self._parts[name] = Part(self._place, name, PARTS[name])
        return part

    def kill(self, name: str) -> int:
        """SIGKILL; the process it was."""
        part = self._parts.pop(name)
        part.kill()
        return part.pid

    def stop(self, name: str) -> None:
        """Ask it to end in order."""
        self._parts.pop(name).stop()
        self._stopped.add(name)

    def end(self) -> None:
        """Kill whatever is still running."""
        with ExitStack() as endings:
            for part in self._parts.values():
                endings.callback(part.kill)
        self._parts.clear()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Watch until something is so; raises ``TimeUp`` at the deadline and ``Broken`` if a part ends."""
        while not condition():
            if time.monotonic() > self._deadline:
                raise TimeUp
            self.watch()
            time.sleep(TICK)

    def wait_until(self, moment: float) -> None:
        """Watch until a moment."""
        self.wait(lambda: time.monotonic() >= moment)

    def watch(self) -> None:
        """Look at everything once, and show it."""
        for part in self._parts.values():
            part.check()
        if time.monotonic() > self._looked + LOOK_EVERY:
            self._looked = time.monotonic()
            self._look()
        self._read()
        self._screen.update(self._view())

    def pending(self) -> int:
        """How many deliveries the outbox has not finished."""
        return self._count(self._event.status == "pending")

    def held_by(self, pid: int) -> int:
        """How many unfinished deliveries a relay holds, or held when it died."""
        mine = self._event.lease_owner.contains(f":{pid}:")
        return self._count(sa.and_(self._event.status == "pending", mine))

    def suspects(self) -> int:
        """How many unfinished deliveries were in a dead relay's hands."""
        return self._count(sa.and_(self._event.status == "pending", self._event.crashes > 0))

    def arrived(self, destination: str) -> int:
        """How many acknowledgements a destination gave."""
        self._read()
        return len(self._receipts[destination].records)

    def reasons(self) -> list[str]:
        """Why deliveries that were not made were not made, the most frequent first."""
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
            committed: list[Change] = read_changes(connection)
        times = {placed.ref: placed.at for placed in self._placed.records}
        return {
            name: compare(committed, self._receipts[name].records, times, outages[name])
            for name in DESTINATIONS
        }

    def _count(self, condition: sa.ColumnElement[bool]) -> int:
        with self._engine.connect() as connection:
            return connection.execute(sa.select(sa.func.count()).where(condition)).scalar_one()

    def _look(self) -> None:
        query = sa.select(self._destination.name, self._destination.circuit)
        with self._engine.connect() as connection:
            self.circuits = {row.name: row.circuit for row in connection.execute(query)}

    def _read(self) -> None:
        self._placed.read()
        for faults in self._faults.values():
            faults.read()
        for name, receipts in self._receipts.items():
            self._refs[name].update(receipt.change.ref for receipt in receipts.read())

    def _view(self) -> View:
        undone = Counter(placed.undone for placed in self._placed.records)
        back = f"{undone['rollback']} transactions and {undone['savepoint']} savepoints rolled back"
        return View(
            elapsed=time.monotonic() - self._began,
            doing=self.doing,
            committed=undone[None],
            lines=[
                Line("shop", f"{undone[None]} committed; {back}", "good"),
                Line("relay", *self._relay_state()),
            ],
            bars=[self._bar(name) for name in DESTINATIONS],
        )

    def _relay_state(self) -> tuple[str, str]:
        relay = self._parts.get("relay")
        if relay is not None:
            return f"process {relay.pid}", "good"
        return ("stopped", "good") if "relay" in self._stopped else ("dead", "bad")

    def _bar(self, name: str) -> Bar:
        arrived = len(self._refs[name])
        return Bar(name, *self._state(name), arrived, len(self._receipts[name].records) - arrived)

    def _state(self, name: str) -> tuple[str, str]:
        closed = self.circuits.get(name, "closed") == "closed"
        if name == HANDLER:
            return "in the relay's process", "good"
        if name not in self._parts:
            return ("down" if closed else "down; circuit open"), "bad"
        if not closed:
            return "back; circuit open until a probe", "waiting"
        if name == FLAKY:
            kinds = Counter(fault.kind for fault in self._faults[name].records)
            return f"{kinds['500']}×500 {kinds['503']}×503 {kinds['hangs']} hung", "waiting"
        return "listening", "good"
