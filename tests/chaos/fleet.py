"""Relays in processes of their own, and their faults; one that is killed is replaced.

Everybody's duplicates are bounded by what was in flight: whenever a relay comes to grief, the rows that it
holds leases of are added to that bound.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from relaybox import Outbox
from relaybox.core import circuit
from relaybox.relay import crashpoint, decide, send
from relaybox.sinks.http import status
from tests.chaos import broken, workload
from tests.chaos.nursery import Change, Nursery
from tests.chaos.workload import Place, Rows
from tests.integration.shop import MEMBERSHIP, SOON

WARM = (
    *("relaybox.operate.open_relay", "relaybox.stores.sql.upkeep", "relaybox.emit.wakes.postgres"),
    *(
        "relaybox.database.pools.postgresql",
        "relaybox.database.pools.mysql",
        "relaybox.database.pools.sqlite",
    ),
)
"""What a relay would import when it begins is there before it is forked."""
for name in WARM:
    importlib.import_module(name)

PATIENCE = 5.0
"""Seconds that a relay which is asked to leave has for what it is sending: more than a request may take."""
LEASE, TIMEOUT = 2.5, 1.5
BEYOND_A_LEASE = (2.7, 3.6)  # For how many seconds relays stand still
BEGINS = 10.0
"""Seconds in which a relay that finds no database may end: its supervisor starts it again."""
HOPELESS = 20  # After so many relays that ended by themselves, no more are started


class Doom(msgspec.Struct, frozen=True):
    """The signal that a relay sends itself when it comes to a crash point for the ``count``-th time."""

    point: str
    count: int
    signal: int


class Plan(msgspec.Struct, frozen=True):
    place: Place
    doom: Doom | None = None
    hasty: bool = True  # Whether pauses are shorter than they are for users
    defect: str = ""  # One of those in ``tests.chaos.broken``


def main(plan: bytes) -> None:
    ours = msgspec.json.decode(plan, type=Plan)
    if ours.hasty:
        hasten()
    if ours.doom is not None:
        crashpoint.watch(_watcher(ours.doom))
    outbox = ours.place.outbox()
    if ours.defect:
        broken.spoil(ours.defect, outbox)
    asyncio.run(_run(outbox))


async def _run(outbox: Outbox) -> None:
    # To ask a relay that hangs what it waits for.
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, _tell)
    await outbox.relay(patience=PATIENCE).run()


def _tell() -> None:
    for task in asyncio.all_tasks():
        task.print_stack(limit=6)


def hasten() -> None:
    """Pauses that are right for days are too long for a schedule of seconds."""
    MEMBERSHIP["interval"] = SOON
    circuit.FIRST_PAUSE = 0.1
    circuit.LONGEST_PAUSE = decide.LONGEST_PAUSE = 0.5  # type: ignore[attr-defined]
    decide.LONGEST_AFTER = status.LONGEST_RETRY_AFTER = 0.8
    send.PROBE_MARGIN = 0.5


def _watcher(doom: Doom) -> Callable[[str], None]:
    left = doom.count

    def watch(point: str) -> None:
        nonlocal left
        if point == doom.point:
            left -= 1
            if left == 0:
                os.kill(os.getpid(), doom.signal)

    return watch


@dataclass
class Relay:
    pid: int
    nursery: Nursery
    began: float = field(default_factory=time.monotonic)
    doomed: bool = False
    replaced: bool = True  # Whether another takes its place when it ends
    leaving: bool = False
    killed: bool = False
    stopped: bool = False
    resumes: float = 0.0  # When it goes on, if it stands still
    held: set[Any] = field(default_factory=set)  # The rows it held when it came to grief


def _expected(relay: Relay) -> set[int]:
    codes = set()
    if relay.killed or relay.doomed:
        codes.add(-signal.SIGKILL)
    if relay.leaving:
        # By the signal itself where it had not begun yet.
        codes |= {0, -signal.SIGTERM}
    return codes


@dataclass
class Fleet:
    """The relays of a schedule. Each takes one of the ways to the database, and is born in a nursery."""

    places: list[Place]
    nurseries: list[Nursery]
    rows: Rows
    random: Random
    directory: Path
    dooms: list[Doom]
    defect: str = ""
    bound: int = 0  # How many deliveries they may have made twice
    unexpected: list[str] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)  # What relays did to themselves
    killed: set[int] = field(default_factory=set)  # The processes that ended where they stood
    _relays: dict[int, Relay] = field(default_factory=dict)

    @property
    def busy(self) -> list[Relay]:
        return [one for one in self._relays.values() if not (one.leaving or one.killed or one.stopped)]

    @property
    def alive(self) -> bool:
        return bool(self._relays)

    def start(self, *, replaced: bool = True) -> Relay:
        doom = self.dooms.pop(0) if self.dooms and replaced else None
        nursery, place = self.random.choice(self.nurseries), self.random.choice(self.places)
        pid = nursery.start("relay", Plan(place, doom, defect=self.defect), self.directory / "relays.log")
        self._relays[pid] = relay = Relay(pid, nursery, doomed=doom is not None, replaced=replaced)
        return relay

    def kill(self, relay: Relay) -> None:
        os.kill(relay.pid, signal.SIGKILL)
        relay.killed = True
        # Afterwards: before it, the relay could still claim more.
        relay.held |= self._held(relay)

    def stop(self, relay: Relay, seconds: float) -> None:
        os.kill(relay.pid, signal.SIGSTOP)
        relay.stopped, relay.resumes = True, time.monotonic() + seconds
        relay.held |= self._held(relay)

    def _resume(self, relay: Relay) -> None:
        relay.stopped = False
        # Again: a claim that was under way when it was stopped may have been carried out since.
        self.bound += len(relay.held | self._held(relay))
        relay.held = set()
        os.kill(relay.pid, signal.SIGCONT)

    def leave(self, relay: Relay) -> None:
        """SIGTERM: it finishes what it is sending."""
        relay.leaving = True
        os.kill(relay.pid, signal.SIGTERM)

    def look(self, changes: Iterable[Change]) -> None:
        """Replace each relay that ended, and resume each that stood still for long enough."""
        for change in changes:
            if change.pid in self._relays:
                self._changed(self._relays[change.pid], change)
        now = time.monotonic()
        for relay in self._relays.values():
            if relay.stopped and relay.resumes <= now:
                self._resume(relay)

    def _changed(self, relay: Relay, change: Change) -> None:
        relay.held |= self._held(relay)
        if change.code is None:
            if not relay.stopped:
                relay.stopped = True
                relay.resumes = time.monotonic() + self.random.uniform(*BEYOND_A_LEASE)
                self.happened["stop at crash point"] += 1
            return
        del self._relays[relay.pid]
        if change.code == -signal.SIGKILL and not relay.killed:
            self.happened["kill at crash point"] += 1
        asks_first = self.places[0].url.startswith("mysql")
        if asks_first and change.code == 1 and time.monotonic() - relay.began < BEGINS:
            # On MariaDB it asks the server for its name, and ends if there is no server.
            self.happened["could not begin"] += 1
        elif change.code not in _expected(relay):
            self.unexpected.append(f"a relay ended with {change.code}")
        if change.code:
            self.bound += len(relay.held)
            self.killed.add(relay.pid)
        if relay.replaced and len(self.unexpected) < HOPELESS:
            self.start()

    def _held(self, relay: Relay) -> set[Any]:
        return self.rows.held_until_taken_over(f"%:{relay.pid}:%")

    def spare(self) -> None:
        """Spare relays that start from now on, and resume those that stand still."""
        self.dooms.clear()
        for relay in self._relays.values():
            relay.resumes = 0.0

    def dismiss(self, look: Callable[[], None], patience: float = 60.0) -> None:
        """Ask all relays to leave; one that does not is a finding."""
        for relay in self._relays.values():
            relay.replaced = False
            if not relay.leaving and not relay.killed:
                self.leave(relay)
        end = time.monotonic() + patience
        while self._relays and time.monotonic() < end:
            look()
            time.sleep(0.01)
        self.unexpected += [f"a relay did not leave within {patience:g} s"] * len(self._relays)
        self.interrogate()
        self.close()

    def interrogate(self) -> None:
        for pid in self._relays:
            os.kill(pid, signal.SIGUSR1)
        if self._relays:
            time.sleep(0.3)

    def close(self) -> None:
        for pid in self._relays:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@dataclass
class Emitters:
    """They run until each has committed its part; one that is killed is followed by another."""

    nursery: Nursery
    log: Path
    unexpected: list[str] = field(default_factory=list)
    _plans: dict[int, workload.Plan] = field(default_factory=dict)
    _killed: set[int] = field(default_factory=set)

    @property
    def busy(self) -> bool:
        return bool(self._plans)

    def start(self, plan: workload.Plan) -> None:
        self._plans[self.nursery.start("emitter", plan, self.log)] = plan

    def kill(self, random: Random) -> None:
        if alive := sorted(self._plans.keys() - self._killed):
            victim = random.choice(alive)
            self._killed.add(victim)
            os.kill(victim, signal.SIGKILL)

    def look(self, changes: Iterable[Change]) -> None:
        for pid, code in changes:
            plan = self._plans.pop(pid, None)
            if plan is None:
                continue
            if pid in self._killed:
                # It is not known how many it had; with all of them again there are enough.
                self.start(msgspec.structs.replace(plan, seed=plan.seed + 1_000_003, seconds=0.0))
            elif code != 0:
                self.unexpected.append(f"an emitter ended with {code}: {last_line(self.log)}")

    def close(self) -> None:
        for pid in self._plans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    lines = log.read_text().splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"
