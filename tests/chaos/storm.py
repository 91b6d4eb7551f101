"""Does what was drawn: each fault begins at its moment, and ends."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.chaos.cluster import Cluster, Ground, Small
from tests.chaos.drivers import ERRORS
from tests.chaos.faults import RECEIVER, Draw, Fault
from tests.chaos.fleet import Emitters, Fleet, Relay
from tests.chaos.proxy import Proxy
from tests.chaos.receiver import Mood, Remote
from tests.chaos.workload import LOOSE, ORDERED, Rows

TERMINATE = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid = :session"
SESSIONS = {
    "postgresql": "SELECT pid FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()",
    "mysql": "SELECT id FROM information_schema.processlist WHERE db = DATABASE() AND id <> CONNECTION_ID()",
}
LISTENERS = f"{SESSIONS['postgresql']} AND query LIKE 'LISTEN%'"


@dataclass
class Scene:
    ground: Ground
    rows: Rows
    fleet: Fleet
    emitters: Emitters
    receiver: Remote
    proxies: dict[str, Proxy]
    batch: int
    look: Callable[[], None]  # Notice who ended, and replace them
    bound: int = 0  # How many deliveries may come again because of faults of the database or the network
    happened: Counter[str] = field(default_factory=Counter)
    unexpected: list[tuple[str, str]] = field(default_factory=list)
    """What the director found by itself, by kind and in words."""
    restarts: list[float] = field(default_factory=list)  # When the database took connections again


class Storm:
    def __init__(self, scene: Scene, draw: Draw) -> None:
        self._scene = scene
        self._random = Random(draw.seed + 1)
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._moods: Counter[str] = Counter()
        self._begun = time.monotonic()
        for fault in draw.faults:
            self._later(fault.at, self._begin, fault)

    def rage(self) -> None:
        while self._agenda or self._scene.emitters.busy:
            self.step()

    def step(self) -> None:
        # After each act: what a dead relay held is seen only until its leases run out.
        self._scene.look()
        if self._agenda and self._agenda[0][0] <= time.monotonic() - self._begun:
            heapq.heappop(self._agenda)[2]()
        else:
            time.sleep(0.01)

    def heal(self) -> None:
        for proxy in self._scene.proxies.values():
            proxy.cut_at_commit("before", 0)
            proxy.set()
        for endpoint in (ORDERED, LOOSE):
            self._scene.receiver.be(endpoint, Mood())
        if self._scene.ground.clock is not None:
            self._scene.ground.clock.step(0)
        self._scene.fleet.spare()

    def _later(self, at: float, act: Callable[..., None], *values: Any) -> None:
        heapq.heappush(self._agenda, (at, next(self._number), lambda: act(*values)))

    def _in(self, seconds: float, act: Callable[..., None], *values: Any) -> None:
        self._later(time.monotonic() - self._begun + seconds, act, *values)

    def _begin(self, fault: Fault) -> None:
        scene, (family, _, what) = self._scene, fault.kind.partition(": ")
        scene.happened[fault.kind] += 1
        match family:
            case "receiver":
                self._misbehave(fault)
            case "relays" | "emitters":
                self._disturb(scene.proxies[family], what, fault)
            case "kill emitter":
                scene.emitters.kill(self._random)
            case "kill database":
                self._kill_database(fault)
            case "disk full":
                self._fill_disk(fault)
            case "end sessions" | "end listeners":
                self._end_sessions(fault)
            case "step clocks":
                assert scene.ground.clock is not None
                scene.ground.clock.step(fault.strength)
            case _:
                self._hit_relays(fault)

    def _hit_relays(self, fault: Fault) -> None:
        fleet = self._scene.fleet
        if fault.kind == "crowd":
            for _ in range(int(fault.strength)):
                self._in(fault.lasts, self._disperse, fleet.start(replaced=False))
            return
        if not fleet.busy:
            return
        # Rather one of the older: a newcomer has little to lose.
        victim = fleet.busy[int(self._random.random() ** 2 * len(fleet.busy))]
        match fault.kind:
            case "kill relay":
                fleet.kill(victim)
            case "relay leaves":
                fleet.leave(victim)
            case "stop relay":
                fleet.stop(victim, fault.lasts)

    def _disperse(self, relay: Relay) -> None:
        fleet = self._scene.fleet
        if relay in fleet.busy:
            self._random.choice((fleet.kill, fleet.leave))(relay)

    def _misbehave(self, fault: Fault) -> None:
        mood = RECEIVER[fault.kind]
        for endpoint in [fault.where] if fault.where else [ORDERED, LOOSE]:
            self._moods[endpoint] += 1
            changed = Mood(mood.kind, fault.strength, mood.seconds, mood.status, mood.retry_after)
            self._scene.receiver.be(endpoint, changed)
            self._in(fault.lasts, self._behave, endpoint, self._moods[endpoint])

    def _behave(self, endpoint: str, mood: int) -> None:
        if self._moods[endpoint] == mood:
            self._scene.receiver.be(endpoint, Mood())

    def _disturb(self, proxy: Proxy, what: str, fault: Fault) -> None:
        at_risk = fault.kind.startswith("relays")
        before = self._scene.rows.held() if at_risk else set()
        match what:
            case "reset":
                proxy.reset()
            case "cut before commit":
                proxy.cut_at_commit("before", int(fault.strength))
            case "cut after commit":
                proxy.cut_at_commit("after", int(fault.strength))
            case _:
                proxy.set(
                    delay=fault.strength if what == "delay" else 0.0,
                    hole=what == "hole",
                    refuse=what == "refuse",
                )
                if what == "refuse":
                    proxy.reset()
                self._in(fault.lasts, self._calm, proxy, at_risk)
        if at_risk:
            self._scene.bound += len(before | self._scene.rows.held())

    def _calm(self, proxy: Proxy, at_risk: bool) -> None:
        if at_risk:
            self._scene.bound += len(self._scene.rows.held())
        proxy.set()

    def _kill_database(self, fault: Fault) -> None:
        scene = self._scene
        server = scene.ground.server
        assert isinstance(server, Cluster)
        scene.bound += self._at_risk()
        server.kill()
        time.sleep(fault.lasts)
        server.start()
        scene.restarts.append(time.monotonic())

    def _fill_disk(self, fault: Fault) -> None:
        scene, server = self._scene, self._scene.ground.server
        assert isinstance(server, Small)
        if server.full:
            return
        scene.bound += self._at_risk()
        server.fill()
        self._in(fault.lasts, server.free)

    def _at_risk(self) -> int:
        """Return how many rows are leased, or may be when the fault ends: one more batch for each lane."""
        scene = self._scene
        held = len(scene.rows.held())
        return min(held + 2 * scene.batch * len(scene.fleet.busy), max(held, scene.rows.pending()))

    def _end_sessions(self, fault: Fault) -> None:
        rows = self._scene.rows
        before = rows.held()
        scheme = "postgresql" if self._scene.ground.means.listens else "mysql"
        query = LISTENERS if fault.kind == "end listeners" else SESSIONS[scheme]
        with suppress(*ERRORS):
            sessions = [row[0] for row in rows.execute(query)]
            for session in self._random.sample(sessions, min(len(sessions), int(fault.strength))):
                # It may have ended by itself.
                with suppress(*ERRORS):
                    ending = TERMINATE if scheme == "postgresql" else "KILL :session"
                    rows.execute(ending, session=session)
        self._scene.bound += len(before | rows.held())
