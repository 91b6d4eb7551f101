"""One schedule: emitters, relays and a receiver; faults while events flow; healing, and the verdict."""

from __future__ import annotations

import base64
import math
import os
import signal
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

import msgspec
import sqlalchemy as sa

from relaybox.testing.checker import Committed, Excuses, Received, Report, check
from relaybox.wire.signature import verify
from tests.chaos import receiver, workload
from tests.chaos.cluster import Ground
from tests.chaos.drivers import DRIVERS, ERRORS
from tests.chaos.faults import NETWORK, POOLER, Draw, draw
from tests.chaos.fleet import LEASE, TIMEOUT, Emitters, Fleet
from tests.chaos.proxy import Proxy
from tests.chaos.receiver import Applied
from tests.chaos.storm import Scene, Storm
from tests.chaos.workload import LOOSE, ORDERED, SECRET, Place, Rows, event_type, written
from tests.servers import pgbouncer

ANY_TIME = 1e12  # Seconds: relays with a wrong clock sign a wrong time, and the signature holds all the same


class Verdict(NamedTuple):
    """The checker's report, and what only the business rows can tell: by kind, in words."""

    report: Report
    events: int
    others: tuple[tuple[str, str], ...]

    @property
    def findings(self) -> Counter[str]:
        counts: Counter[str] = Counter({"not atomic": 0, "failed": 0})
        for kind, number in self.report.counts.items():
            counts[kind] += number
        counts.update(kind for kind, _ in self.others)
        return counts

    @property
    def words(self) -> list[str]:
        return [*map(str, self.report.findings), *(f"{kind}: {text}" for kind, text in self.others)]


def judge(
    rows: Rows,
    applied: Sequence[Applied],
    bound: Excuses,
    *,
    kept: bool = True,
    elsewhere: Mapping[str, Sequence[Received]] | None = None,
) -> Verdict:
    """Compare what was committed with what arrived; every row is expected to be delivered.

    ``kept``: rows that were delivered are still there. ``elsewhere``: what arrived at ordered destinations
    beside the receiver's, each of which gets every event.
    """
    beside = elsewhere or {}
    orders = {UUID(order.event_id): order for order in rows.orders()}
    events = rows.events()
    # Not the rows' own positions, which are judged by themselves: of some there is no row any more.
    in_order = enumerate(sorted(orders.items(), key=lambda item: item[1].n))
    committed = [
        Committed(name, event_id, order.name, position, order.payload.encode())
        for position, (event_id, order) in in_order
        for name in (*destinations(order.n), *beside)
    ]
    status = {(event.destination, event.event_id): event.status for event in events}
    keyed = [row._replace(key=None) if row.destination == LOOSE else row for row in committed]
    arrived = [*map(received, applied), *(one for several in beside.values() for one in several)]
    report = check(keyed, arrived, status=status, in_flight=bound)
    others = (*_not_atomic(orders, events, kept, tuple(beside)), *_not_final(events))
    return Verdict(report, len(orders), others)


def destinations(n: int) -> list[str]:
    return [ORDERED, LOOSE] if event_type(n) == "order.loud" else [ORDERED]


def received(applied: Applied) -> Received:
    signed = verify(applied.body, applied.headers, SECRET, tolerance=ANY_TIME, now=0)
    return Received(applied.endpoint, UUID(applied.headers["webhook-id"]), payload_of(applied.body), signed)


def payload_of(message: bytes) -> bytes:
    """Return the payload of an envelope as the business row stores it."""
    body = msgspec.json.decode(message)
    payload = base64.b64decode(body["data_base64"]) if "data_base64" in body else body["data"]
    return written(payload).encode()


def _not_atomic(
    orders: dict[UUID, Any], events: list[Any], kept: bool, beside: tuple[str, ...]
) -> Iterator[tuple[str, str]]:
    """Events and orders belong together one to one; so do the orders of their positions and numbers."""
    wanted = {
        (name, event_id) for event_id, order in orders.items() for name in (*destinations(order.n), *beside)
    }
    found = Counter((event.destination, event.event_id) for event in events)
    for pair, count in (found - Counter(wanted)).items():
        yield "not atomic", f"{count} rows too many of {pair}"
    if not kept:
        return
    for pair in wanted - found.keys():
        yield "not atomic", f"an order without the row {pair}"
    numbers: dict[str, list[int]] = defaultdict(list)
    for event in events:
        if event.destination == ORDERED and event.event_id in orders:
            numbers[event.aggregate_id].append(orders[event.event_id].n)
    for name, seen in numbers.items():
        if seen != list(range(1, len(seen) + 1)):
            yield "not atomic", f"by position the orders of {name} are {seen}"


def _not_final(events: list[Any]) -> Iterator[tuple[str, str]]:
    for event in events:
        if event.status == "failed":
            yield "failed", f"{event.destination} {event.event_id}, though nothing here may fail for good"
        if event.lease_token is not None:
            yield "stuck", f"{event.destination} {event.event_id} is still leased"


EMITTERS = 3
PATIENCE = 60.0  # Seconds for everything to be delivered once all is well, also where the machine is busy
WARM_UP = 5.0
CALM_LEASE = 10.0  # Where there is no fault, a slow machine shall not be one


class Result(msgspec.Struct, frozen=True):
    seed: int
    database: str
    events: int
    receipts: int
    faults: dict[str, int]
    findings: dict[str, int]
    words: list[str]
    seconds: float
    drained: float  # Seconds from the end of the faults until everything was delivered
    duplicates: int = 0
    bound: int = 0  # How many of the duplicates the faults excuse
    recoveries: list[float] = []  # Seconds from each restart of the database to the first delivery after it
    explained: int = 0  # How often it was asked why events wait, and the answer named the fault
    delay: float = 0.0
    """Seconds for which a destination beside the one in trouble got nothing though events waited for it."""

    @property
    def ok(self) -> bool:
        return not any(self.findings.values())


class Schedule:
    def __init__(self, ground: Ground, url: str, plan: Draw, events: int, defect: str) -> None:
        self._ground = ground
        self._url = url
        self._draw = plan
        self._events = events
        self._defect = defect
        self._nurseries = [ground.nursery]
        if plan.clocks and ground.clocked is not None:
            self._nurseries.append(ground.clocked)
        self._stack = ExitStack()
        home = tempfile.TemporaryDirectory(prefix="relaybox-chaos-")
        self._directory = Path(self._stack.enter_context(home))

    def run(self) -> Result:
        begun = time.monotonic()
        with self._stack:
            scene = self._set_up()
            self._warm_up(scene)
            self._rage(scene, Storm(scene, self._draw))
            healed = time.monotonic()
            if not self._drain(scene):
                scene.unexpected.append(("stuck", f"not drained after {PATIENCE:g} s"))
                scene.fleet.interrogate()
            drained = time.monotonic() - healed
            scene.fleet.dismiss(scene.look)
            applied = scene.receiver.applied(self._directory / "applied")
            verdict = self._judge(scene, applied)
            if verdict.words and not self._defect:
                self._keep_logs()
        arrivals = [one.at for one in applied]
        return Result(
            seed=self._draw.seed,
            database=self.subject,
            events=verdict.events,
            receipts=verdict.report.received,
            duplicates=verdict.report.duplicates,
            bound=scene.bound,
            faults=dict(scene.happened + scene.fleet.happened),
            findings=dict(verdict.findings),
            words=verdict.words,
            seconds=round(time.monotonic() - begun, 2),
            drained=round(drained, 2),
            recoveries=[_first_after(moment, arrivals) for moment in scene.restarts],
        )

    @property
    def subject(self) -> str:
        return self._ground.server.kind

    def _rage(self, scene: Scene, storm: Storm) -> None:
        storm.rage()
        storm.heal()

    def _judge(self, scene: Scene, applied: list[receiver.Applied]) -> Verdict:
        scene.bound += scene.fleet.bound + scene.receiver.state().unanswered
        verdict = judge(scene.rows, applied, scene.bound, kept=self._draw.keep)
        ended = [("ended", text) for text in (*scene.fleet.unexpected, *scene.emitters.unexpected)]
        return verdict._replace(others=(*verdict.others, *ended, *scene.unexpected))

    def _set_up(self) -> Scene:
        place = self._place(remote := self._receiver())
        place.outbox().migrate()
        workload.create(self._url)
        proxies = self._proxies()
        rows = Rows(place)
        self._prepare(rows)
        dooms, random = list(self._draw.dooms), Random(self._draw.seed + 2)
        ways = self._ways(place, proxies)
        fleet = Fleet(ways, self._nurseries, rows, random, self._directory, dooms, self._defect)
        self._stack.callback(fleet.close)
        emitters = Emitters(self._ground.nursery, self._directory / "emitters.log")
        self._stack.callback(emitters.close)
        scene = Scene(
            self._ground, rows, fleet, emitters, remote, proxies, place.batch, lambda: self._look(scene)
        )
        if self._pooler is not None:
            scene.happened[POOLER] += 1
        for _ in range(self._draw.relays):
            fleet.start()
        for number in range(EMITTERS):
            direct = number == self._draw.seed % EMITTERS or "emitters" not in proxies
            way = place if direct else _at(place, proxies["emitters"])
            emitters.start(self._emitter(way, number))
        return scene

    def _prepare(self, rows: Rows) -> None:
        """For what the database is to do before there are relays."""

    def _receiver(self) -> receiver.Remote:
        control = self._directory / "control"
        plan = receiver.Plan(str(control), [ORDERED, LOOSE], self._draw.seed)
        pid = self._ground.nursery.start("receiver", plan, self._directory / "receiver.log")
        self._stack.callback(_end, pid)
        remote = receiver.Remote(control)
        self._stack.callback(remote.close)
        return remote

    def _place(self, remote: receiver.Remote) -> Place:
        lease, timeout = (CALM_LEASE, CALM_LEASE) if self._draw.calm else (LEASE, TIMEOUT)
        return Place(
            self._url,
            remote.state().ports,
            lease=lease,
            timeout=timeout,
            batch=self._draw.batch,
            concurrency=self._draw.concurrency,
            keep=self._draw.keep,
        )

    def _ways(self, place: Place, proxies: dict[str, Proxy]) -> list[Place]:
        """By which relays come to the database: what some cannot do, others are to do for them."""
        ways = [place]
        if self._pooler is not None:
            ways = [msgspec.structs.replace(place, url=self._pooler)]
        if "relays" in proxies:
            ways += [_at(ways[0], proxies["relays"])] * 2
        return ways

    @property
    def _pooler(self) -> str | None:
        pooler = self._ground.pooler
        return pgbouncer.through(pooler, self._url) if self._draw.pooler and pooler is not None else None

    def _emitter(self, place: Place, number: int) -> workload.Plan:
        drivers = DRIVERS[place.url.partition(":")[0]]
        driver = drivers[number % len(drivers)]
        part = -(-self._events // EMITTERS)
        return workload.Plan(place, driver, 10 * self._draw.seed + number, part, self._draw.seconds)

    def _proxies(self) -> dict[str, Proxy]:
        sides = {fault.kind.partition(":")[0] for fault in self._draw.faults if fault.kind in NETWORK}
        targets = {"emitters": sa.make_url(self._url), "relays": sa.make_url(self._pooler or self._url)}
        return {
            side: self._stack.enter_context(Proxy(targets[side].host or "", targets[side].port or 0))
            for side in sorted(sides)
        }

    def _warm_up(self, scene: Scene) -> None:
        """Until something was delivered: before that a relay has nothing to lose."""
        end = time.monotonic() + WARM_UP
        while not scene.receiver.state().applied and time.monotonic() < end:
            scene.look()
            time.sleep(0.01)

    def _look(self, scene: Scene) -> None:
        changes = [change for nursery in self._nurseries for change in nursery.changes()]
        scene.fleet.look(changes)
        scene.emitters.look(changes)

    def _drain(self, scene: Scene) -> bool:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and scene.fleet.alive:
            scene.look()
            with suppress(*ERRORS):
                if self._is_drained(scene):
                    return True
            time.sleep(0.02)
        return False

    def _is_drained(self, scene: Scene) -> bool:
        return not scene.rows.pending()

    def _keep_logs(self) -> None:
        kept = Path(tempfile.gettempdir(), f"relaybox-chaos-{self.subject}-{self._draw.seed}")
        kept.mkdir(exist_ok=True)
        for log in self._directory.glob("*.log"):
            (kept / log.name).write_bytes(log.read_bytes())


def run_schedule(
    ground: Ground, seed: int, events: int = 2000, *, plan: Draw | None = None, defect: str = ""
) -> Result:
    """Run the schedule that this seed draws (or ``plan``) on a fresh database of the ground.

    ``defect``: of every relay, as ``tests.chaos.broken`` has them.
    """
    with ground.server.database() as url:
        drawn = plan or draw(seed, events, ground.means)
        return Schedule(ground, url, drawn, events, defect).run()


def _first_after(moment: float, arrivals: list[float]) -> float:
    """Return the seconds until the first arrival after it, or NaN if nothing was left to arrive."""
    return round(next((at - moment for at in arrivals if at > moment), math.nan), 2)


def _at(place: Place, proxy: Proxy) -> Place:
    url = sa.make_url(place.url).set(port=proxy.port)
    return msgspec.structs.replace(place, url=url.render_as_string(hide_password=False))


def _end(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
