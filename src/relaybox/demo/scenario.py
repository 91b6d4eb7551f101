"""The demo's scenario, and the supervisor that watches its parts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from relaybox.database.schema import Tables
from relaybox.demo.processes import Part, Parts
from relaybox.demo.records import Journals, Rows
from relaybox.demo.screen import PartState, Screen
from relaybox.demo.shop import LEASE, PARTS, TIMEOUT
from relaybox.demo.verdict import Outage, Verdict, compare
from relaybox.demo.workspace import DESTINATIONS, FLAKY, RECEIVERS, WEBHOOK, Workspace

TICK = 0.1
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
    """The parent of all parts: it watches them and what they wrote, and shows it."""

    def __init__(
        self, workspace: Workspace, tables: Tables, screen: Screen, began: float, deadline: float
    ) -> None:
        self.doing = "starting"
        self.circuits: dict[str, str] = {}
        self.workspace = workspace
        self.parts = Parts(workspace, PARTS)
        self.rows = Rows(workspace.engine(), tables)
        self._journals = Journals(workspace)
        self._screen = screen
        self._began = began
        self._deadline = deadline
        self._looked = 0.0

    def close(self) -> None:
        """Kill the running parts and disconnect."""
        self.parts.end()
        self.rows.close()

    def say(self, text: str, mood: str = "") -> None:
        """Show an event on the screen."""
        self._screen.say(time.monotonic() - self._began, text, mood)

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
        self.parts.check()
        if time.monotonic() > self._looked + LOOK_EVERY:
            self._looked = time.monotonic()
            self.circuits = self.rows.circuits()
        self._journals.read()
        committed, lines = self._view()
        self._screen.update(time.monotonic() - self._began, self.doing, committed, lines)

    def arrived(self, destination: str) -> int:
        """Return the number of a destination's acknowledgements."""
        self._journals.read()
        return len(self._journals.receipts[destination].records)

    def judge(self, outages: dict[str, list[Outage]]) -> dict[str, Verdict]:
        """Compare what each destination acknowledged with what the database holds."""
        self._journals.read()
        committed = self.rows.changes()
        times = {placed.ref: placed.at for placed in self._journals.placed.records}
        receipts = self._journals.receipts
        return {
            name: compare(committed, receipts[name].records, times, outages[name]) for name in DESTINATIONS
        }

    def _view(self) -> tuple[int, list[PartState]]:
        undone = Counter(placed.undone for placed in self._journals.placed.records)
        relay = self.parts.running.get("relay")
        state = f"process {relay.pid}" if relay else "stopped" if "relay" in self.parts.stopped else "dead"
        back = f"{undone['rollback']} transactions and {undone['savepoint']} savepoints rolled back"
        bars = [PartState(name, *self._state(name), *self._journals.count(name)) for name in DESTINATIONS]
        shop = PartState("shop", f"{undone[None]} committed; {back}", "good")
        return undone[None], [shop, PartState("relay", state, "bad" if state == "dead" else "good"), *bars]

    def _state(self, name: str) -> tuple[str, str]:
        closed = self.circuits.get(name, "closed") == "closed"
        if name not in RECEIVERS:
            return "in the relay's process", "good"
        if name not in self.parts.running:
            return ("down" if closed else "down; circuit open"), "bad"
        if not closed:
            return "back; circuit open until a probe", "waiting"
        if name == FLAKY:
            kinds = Counter(self._journals.faults[name].records)
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
            supervisor.wait(lambda: not supervisor.rows.pending())
        except TimeUp:
            supervisor.say("time is up", "bad")
            supervisor.parts.end()
            return False
        supervisor.doing = "comparing"
        supervisor.parts.stop("relay")
        supervisor.watch()
        return True

    def _begin(self) -> None:
        supervisor = self._supervisor
        for part in [supervisor.parts.start(name) for name in (*RECEIVERS, "relay")]:
            self._until_ready(part)
        for name in RECEIVERS:
            self._forge(name)
        self._shop = supervisor.parts.start("shop")
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
        except OSError as error:
            # On a busy machine the receiver may answer late.
            self._supervisor.say(f"{name}: a forged event got no answer: {error}")
            return
        self._supervisor.say(f"{name}: a forged event was answered {status.value} {status.phrase}")

    def _interrupt_receiver(self) -> None:
        supervisor = self._supervisor
        supervisor.wait_until(self._opened + RECEIVER_DOWN_AT * self._seconds)
        begin = time.monotonic()
        pid = supervisor.parts.kill(WEBHOOK)
        supervisor.doing = "the webhook receiver is down"
        supervisor.say(f"the webhook receiver (process {pid}) is killed: connections are refused", "bad")
        supervisor.wait_until(begin + RECEIVER_DOWN_FOR)
        before = supervisor.arrived(WEBHOOK)
        self._until_ready(supervisor.parts.start(WEBHOOK))
        supervisor.say(f"the webhook receiver is back after {time.monotonic() - begin:.1f} s", "good")
        supervisor.wait(
            lambda: supervisor.arrived(WEBHOOK) > before and supervisor.circuits.get(WEBHOOK) == "closed"
        )
        self.outages[WEBHOOK].append((begin, time.monotonic()))
        supervisor.say("a probe got through: the circuit is closed", "good")
        supervisor.doing = "the webhook receiver catches up"
        supervisor.wait(lambda: supervisor.rows.pending() < CAUGHT_UP)
        supervisor.say("the webhook receiver has caught up", "good")
        supervisor.doing = "orders are placed"

    def _kill_relay(self) -> None:
        supervisor = self._supervisor
        supervisor.wait_until(self._opened + RELAY_KILLED_AT * self._seconds)
        begin = time.monotonic()
        pid = supervisor.parts.kill("relay")
        held = supervisor.rows.held_by(pid)
        supervisor.doing = "the relay is dead"
        supervisor.say(f"the relay (process {pid}) gets SIGKILL while it holds {held} deliveries", "bad")
        supervisor.wait_until(begin + RELAY_DEAD_FOR)
        relay = supervisor.parts.start("relay")
        self._until_ready(relay)
        supervisor.say(f"another relay (process {relay.pid}) takes over", "good")
        supervisor.doing = "the dead relay's leases run out"
        supervisor.wait_until(begin + LEASE)
        supervisor.wait(lambda: not supervisor.rows.held_by(pid) and not supervisor.rows.suspects())
        for outages in self.outages.values():
            outages.append((begin, time.monotonic()))
        supervisor.say("what the dead relay held is delivered", "good")

    def _until_ready(self, part: Part) -> None:
        self._supervisor.wait(lambda: part.ready)
