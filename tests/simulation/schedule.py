"""One schedule: the system that a plan describes, run in virtual time, and judged."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from unittest import mock
from uuid import UUID

from relaybox.core import circuit
from relaybox.core.event import Delivery
from relaybox.core.settings import Destination
from relaybox.database.pools.places import UPKEEP
from relaybox.database.statements.delivery import Texts
from relaybox.emit.wakes.local import LocalWake
from relaybox.relay import claim, crashpoint, decide, lane, rest, settle, sizing, suspects
from relaybox.relay.batch import Batch, InFlight, size
from relaybox.relay.gate import Gate
from relaybox.relay.lane import Lane
from relaybox.relay.observer import Observer, Observers
from relaybox.relay.relay import Relay
from relaybox.relay.shared import Shared
from relaybox.relay.upkeep import agreement, caretaker, membership, prune
from relaybox.relay.upkeep.caretaker import Caretaker
from relaybox.relay.upkeep.membership import Membership
from relaybox.relay.upkeep.schedule import log as schedule_log
from relaybox.relay.upkeep.tally import DatabaseTime, Tally
from relaybox.stores.sql import claims, outcomes, upkeep
from relaybox.stores.sql.upkeep import SqlUpkeep
from relaybox.stores.sql.upkeep import prune as prune_rows
from relaybox.stores.store import Claim, DeadLetter, Settlement
from relaybox.stores.upkeep import Member
from relaybox.testing.checker import Committed, Finding, Received, check
from tests.simulation import upkeep_tables
from tests.simulation.application import Application
from tests.simulation.database import Database, Emitted, Row, Transaction, to_datetime
from tests.simulation.driver import SUFFERS, Site
from tests.simulation.plan import BYTES, SUSPENDED, Plan, draw
from tests.simulation.receivers import Applied, BulkSink, Receiver, SimSink
from tests.simulation.statements import HELD_BY, UpkeepServer
from tests.simulation.upkeep_tables import Agreed, Prunings, known_to
from tests.simulation.world import Node, World

Tell: TypeAlias = Callable[[str], None]

PATIENCE = 240.0  # Seconds of virtual time, beyond what one slow key may take, to drain what was healed
STUCK = 2.0  # Seconds beyond a lease after which the first of a key must be due
GAP = 0.2  # Seconds between two settles
PRUNES, BEATS = 4.0, 1.0
MEMBERSHIP: Any = Membership.__init__.__kwdefaults__


@dataclass
class Result:
    seed: int
    findings: list[Finding]
    events: int = 0
    deliveries: int = 0
    duplicates: int = 0
    drained: bool = False
    faults: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    seconds: float = 0.0


class NodeClock:
    def __init__(self, node: Node) -> None:
        self.now = node.now
        self._node = node

    def sleep(self, seconds: float) -> asyncio.Future[None]:
        """Wait so long. A future needs no task of its own where several things are waited for."""
        future = self._node.create_future()
        self._node.call_later(seconds, _done, future)
        return future


class SimWake(LocalWake):
    def __init__(self, alive: bool) -> None:
        super().__init__()
        self.alive = alive


class Schedule:
    def __init__(self, plan: Plan, tell: Tell | None = None) -> None:
        self.plan = plan
        self._tell_of = tell
        self.world = World(plan.seed)
        self.database = Database(self.world)
        self.server = UpkeepServer(self.database)
        self.site = Site(self.world, plan.flavour, self.server, plan.weather, self._dies)
        self.receivers = {destination.name: self._receiver(destination) for destination in plan.destinations}
        self.application = Application(self.world, self.server, plan, self._tell)
        self.nodes: dict[Node, Relay] = {}
        self.wakes: dict[Node, SimWake] = {}
        self.deaths: Counter[str] = Counter()
        self.all_nodes: list[Node] = []
        self.whole: set[Node] = set()
        self.retentions: dict[Node, dict[str, float]] = {}
        self.faults: Counter[str] = Counter()
        self._healed = False
        self._extra = plan.events
        self._attended = 0
        self._points = Counter[str]()
        self._statements = 0
        self._blocking = {d.name for d in plan.destinations if d.on_failed == "block"}
        self.judge = Judge(self)

    def run(self) -> Result:
        self.application.start()
        self._schedule_faults()
        with self._environment():
            try:
                self._live()
                return self._judge()
            finally:
                for node in list(self.nodes):
                    node.crash()
                self.world.end()

    def _live(self) -> None:
        # The first is alone, and need not wait for others to know of it.
        for number in range(self.plan.relays):
            self.world.after(number * 0.1, self._replace)
        self.world.run(self.plan.trouble)
        # A stall that lasts to the end has to be known as well.
        for node in self.nodes:
            node.resume()
        if self.plan.heals:
            self._heal()
            self.world.run(self.plan.trouble + self._patience)

    @property
    def _patience(self) -> float:
        slowest = max(receiver.troubles.crawls for receiver in self.receivers.values())
        return PATIENCE + slowest * self.plan.events

    # The relays.

    def _start_relay(self) -> None:
        node = Node(self.world, f"relay-{len(self.all_nodes)}")
        self.all_nodes.append(node)
        node.at_crash.append(partial(self._died, node))
        relay, wake = self._relay(node)
        self.nodes[node], self.wakes[node] = relay, wake
        node.call_soon(self._enter, node, relay)

    def _enter(self, node: Node, relay: Relay) -> None:
        task = node.start(relay.run(signals=False))
        task.add_done_callback(partial(self._left, node))

    def _left(self, node: Node, task: Any) -> None:
        if not task.cancelled() and task.exception() is not None:
            self.world.errors.append(f"{node.name} ended with {task.exception()!r}")
        self.nodes.pop(node, None)
        self.wakes.pop(node, None)
        self._replace()

    def _relay(self, node: Node) -> tuple[Relay, SimWake]:
        plan, clock, wake = self.plan, NodeClock(node), SimWake(self.plan.alive)
        destinations = self._known_to(node)
        store = self.site.open_store(node)
        member = Member(node.name, "host", 1, "0")
        tally = NodeTally(node, DatabaseTime(clock, lambda: to_datetime(0.0)))
        silent = plan.differs is None or (plan.differs.silent and node in self.whole)
        upkeep = SqlUpkeep(store)
        if silent:
            upkeep.reports = Agreed(store.driver, upkeep.sql, UPKEEP)
        window = upkeep_tables.WINDOW if plan.keyed else prune.IDEMPOTENCY_WINDOW
        options: dict[str, Any] = {"died": self._is_dead, "idempotency_window": window}
        # One that lacks all of them has another one, where nothing happens.
        has = destinations or [replace(plan.destinations[0], name="elsewhere")]
        care = Caretaker(upkeep, has, member, clock, tally, **options)
        shared = Shared(
            store=store,
            wake=wake,
            observer=Observers([tally, *self._watchers(node)]),
            clock=clock,
            random=self.world.random.random,
            owner=node.name,
        )
        by_name = {destination.name: destination for destination in plan.destinations}
        lanes = [
            Lane(destination, self._sink(node, destination), shared, _dead_letter(destination, by_name))
            for destination in destinations
        ]
        return Relay(lanes, shared, care, nullcontext, _nothing, patience=1.0), wake

    def _known_to(self, node: Node) -> list[Destination]:
        """Return the destinations that a relay is configured with: one relay has all of the plan."""
        if self.whole & self.nodes.keys():
            known = known_to(self.plan.differs, self.plan.destinations)
            self.faults["different settings"] += known is not self.plan.destinations
        else:
            known = self.plan.destinations
            self.whole.add(node)
        self.retentions[node] = {destination.name: destination.retention for destination in known}
        return known

    def _watchers(self, node: Node) -> list[Observer]:
        return [] if self._tell_of is None else [Watcher(self.world, node, self._tell_of)]

    def _sink(self, node: Node, destination: Destination) -> Any:
        kind = BulkSink if self.plan.bulk[destination.name] else SimSink
        return kind(node, self.receivers[destination.name], destination.concurrency)

    def _is_dead(self, name: str) -> bool:
        return self.deaths[name] > 0

    def _died(self, node: Node) -> None:
        self.deaths[node.name] += 1
        self.judge.died(node)
        self.nodes.pop(node, None)
        self.wakes.pop(node, None)
        if not self.world.over:
            self.faults["relay died"] += 1
            self.world.after(self.world.random.uniform(0.0, 0.5), self._replace)

    def _replace(self) -> None:
        # Of those that differ, one must know every destination.
        if len(self.nodes) < self.plan.relays or not self.whole & self.nodes.keys():
            self._start_relay()

    def _receiver(self, destination: Destination) -> Receiver:
        troubles = self.plan.troubles[destination.name]
        return Receiver(self.world, destination.name, troubles, destination.timeout, _number)

    def _tell(self, destinations: Iterable[str]) -> None:
        """Wake relays, some of them and late, because a transaction committed."""
        random = self.world.random.random
        for node, wake in self.wakes.items():
            for name in destinations:
                if random() < self.plan.wakes:
                    node.call_later(random() * 0.01, wake.wake, name)

    # The faults.

    def _schedule_faults(self) -> None:
        plan, after = self.plan, self.world.after
        for at, _ in plan.crashes:
            after(at, self._to_somebody, "crash", Node.crash)
        for at, seconds in plan.stalls:
            after(at, self._stall, seconds)
        for at, seconds in plan.suspensions:
            after(at, self._suspend, seconds)
        for at in plan.churn:
            after(at, self._churn)
        for at, seconds in plan.kills:
            after(at, self._kill_server, seconds)
        for at, seconds in plan.read_only:
            after(at, self._read_only, seconds)
        for at, seconds in plan.cuts:
            after(at, self._cut_off, seconds)
        for at, seconds in plan.steps:
            after(at, self._step_clock, seconds)
        if plan.restarts is not None:
            after(min(plan.restarts, 0.5 * plan.trouble), self._restart, plan.restarts)
        for at, seconds in plan.row_locks:
            after(at, self._lock_rows, seconds)
        for at, seconds in plan.table_locks:
            after(at, self._lock_table, seconds)

    def _kill_server(self, seconds: float) -> None:
        self.application.forget(self.site.kill(seconds))

    def _to_somebody(self, what: str, do: Any) -> None:
        if self.nodes and not self._healed:
            self.faults[what] += 1
            do(self.world.random.choice(list(self.nodes)))

    def _stall(self, seconds: float) -> None:
        def stall(node: Node) -> None:
            node.stall()
            self.world.after(seconds, node.resume)

        self._to_somebody("stall", stall)

    def _suspend(self, seconds: float) -> None:
        if self.nodes:
            self.faults[SUSPENDED] += 1
            # The one that has been there for longest: it has most in flight.
            next(iter(self.nodes)).suspend(seconds)

    def _churn(self) -> None:
        def leave(node: Node) -> None:
            self.whole.discard(node)
            node.call_soon(self.nodes[node].stop)
            self._start_relay()

        self._to_somebody("churn", leave)

    def _restart(self, seconds: float) -> None:
        """Replace every relay, as a rollout does; again and again."""
        for node in list(self.nodes):
            self.faults["restart"] += 1
            self.whole.discard(node)
            node.call_soon(self.nodes[node].stop)
            self._start_relay()
        self.world.after(seconds, self._restart, seconds)

    def _dies(self, node: Node) -> bool:
        """True if a node dies before the statement that it is about to send."""
        self._statements += 1
        if self._healed or self._statements not in self.plan.deaths:
            return False
        self.faults["died between statements"] += 1
        node.crash()
        return True

    def _read_only(self, seconds: float) -> None:
        self.site.weather.read_only_until = self.world.now + seconds
        self.site.trouble("read-only", seconds)

    def _cut_off(self, seconds: float) -> None:
        def cut(node: Node) -> None:
            node.trouble(seconds)
            self.site.cut_off[node.name] = self.world.now + seconds

        self._to_somebody("cut off", cut)

    def _step_clock(self, seconds: float) -> None:
        self.database.skew += seconds
        # What is leased at that moment may be over at once, and its relay does not know.
        self.site.trouble("clock step", max(destination.lease for destination in self.plan.destinations))

    def _lock_rows(self, seconds: float) -> None:
        """Lock some of the leased and parked rows, and now and then a destination, for another client."""
        stranger, luck = self._stranger("row locks", seconds), self.world.random
        if self.plan.flavour == "single":
            return
        for id_, row in list(self.database.rows.items()):
            held = row.token is not None or (row.status == "pending" and row.next_attempt_at is None)
            if held and luck.random() < 0.3:
                self.database.lockable(stranger, id_)
        if luck.random() < 0.3:
            self.database.lockable(stranger, (HELD_BY, luck.choice(self.plan.destinations).name))

    def _lock_table(self, seconds: float) -> None:
        """Lock the table against all writes, as CREATE INDEX does."""
        stranger = self._stranger("table lock", seconds)
        if self.plan.flavour != "single":
            self.server.table_lock = stranger

    def _stranger(self, what: str, seconds: float) -> Transaction:
        stranger = self.database.begin("stranger")
        if self.plan.flavour == "single":
            # All that there is to lock; the application needs it too.
            self.database.lockable(stranger, "writer")
            seconds = min(seconds, 0.3)
        self.faults[what] += 1
        self.site.trouble(what, seconds)
        self.world.after(seconds, self.database.rollback, stranger)
        return stranger

    def _at_point(self, point: str) -> None:
        """Kill the node if one of the plan's crashes is at this crash point."""
        self._points[point] += 1
        if self._healed:
            return
        for planned in self.plan.crash_points:
            if planned == (point, self._points[point]):
                self.faults[f"died at {point!r}"] += 1
                running: Any = asyncio.get_running_loop()
                running.crash()

    def _heal(self) -> None:
        """End all faults but those of events."""
        self._healed = True
        self.site.weather.heal()
        self.site.cut_off.clear()
        for receiver in self.receivers.values():
            receiver.troubles.heal()
        while len(self.nodes) < self.plan.relays:
            self._start_relay()
        self._attend()

    def _attend(self) -> None:
        """Until all is at its end: events still come, and an operator gives up those that failed."""
        if not self._left_over():
            self.world.over = True
            return
        self._attended += 1
        if self._attended % 4 == 0:
            self.application.emit([self._extra])
            self._extra += 1
        self.world.after(0.25, self._attend)

    def _left_over(self) -> bool:
        """True if something is open that is not behind a failed event of its key."""
        if self.application.under_way:
            return True
        rows, waiting = self.database.rows, (*self.database.due.values(), *self.database.parked.values())
        return any(not self._is_blocked(rows[entry[-1]]) for index in waiting for entry in index)

    def _is_blocked(self, row: Row) -> bool:
        """True if it is behind an event of its key that failed for good."""
        emitted = row.emitted
        if row.status != "pending" or emitted.ordering_key is None:
            return False
        if emitted.destination not in self._blocking:
            return False
        position, id_ = self.database.open[emitted.destination, emitted.ordering_key][0]
        return position < emitted.position and self.database.rows[id_].status == "failed"

    # The judgement.

    def _judge(self) -> Result:
        application, world = self.application, self.world
        result = Result(
            self.plan.seed,
            self.judge.findings(),
            len({e.event_id for e in application.events}),
            steps=world.steps,
        )
        result.drained = self._healed
        result.faults = self.faults + self.site.weather.met
        result.seconds = world.now
        for destination in self.plan.destinations:
            self._judge_destination(destination, result)
            result.findings += self._starved(destination)
        if self._healed and not world.over:
            text = f"not at its end {self._patience:g} s after everything was healed"
            result.findings.append(Finding("stuck", "", None, text))
        result.findings += [Finding("untrue", "", None, error) for error in world.errors]
        return result

    def _judge_destination(self, destination: Destination, result: Result) -> None:
        name = destination.name
        receiver = self.receivers[name]
        arrived = {applied.event_id.int for applied in receiver.applied}
        # By the integer of an id, because a UUID is hashed in Python.
        own = (row for row in self.database.rows.values() if row.emitted.destination == name)
        rows = {row.emitted.event_id.int: row for row in own}
        # What arrived unacknowledged may be behind a failed one too; an operator would discard it.
        blocked = {event for event, row in rows.items() if self._is_blocked(row)}
        report = check(
            [row for row in self._committed(name) if row.event_id.int not in blocked - arrived],
            [Received(name, a.event_id, _bytes(a.payload)) for a in receiver.applied],
            status={
                (name, row.emitted.event_id): "discarded" if event in blocked else row.status
                for event, row in rows.items()
                if event not in blocked - arrived
            },
            in_flight=self._excused(receiver),
            on_failed=destination.on_failed or "skip",
            drained=self._healed,
        )
        result.findings += report.findings
        result.deliveries += report.received
        result.duplicates += report.duplicates
        result.faults += receiver.met

    def _starved(self, destination: Destination) -> Iterator[Finding]:
        """Yield what a slow key held up; where keys are slow, at most some events are rejected.

        Earlier events of other keys may be a queue, which moves on by a claim with every settle.
        """
        receiver, longest = self.receivers[destination.name], destination.poll_interval + STUCK
        slow, late = receiver.troubles.slow_keys, self.plan.longest_transaction
        came = receiver.rejected | {applied.event_id: applied.at for applied in receiver.applied}
        events = [one for one in self.application.events if one.destination == destination.name]
        quick = [one for one in events if one.ordering_key not in slow]
        rejects = receiver.troubles.rejects
        blocked = {one.ordering_key for one in events if _number(one.event_id) in rejects}
        if destination.on_failed == "skip":
            blocked = set()
        free: dict[str | None, float] = {}  # When the event before the next of a key came
        for emitted in quick if slow else ():
            key = emitted.ordering_key
            at = came.get(emitted.event_id, self.world.now)
            since = max(emitted.created + late, free.get(key, 0.0))
            ahead = [came.get(one.event_id, 0.0) for one in quick if one.created <= emitted.created]
            queue = sum(since < moment < at for moment in ahead) / destination.batch_size * GAP
            if key not in blocked and at - since > longest + queue:
                text = f"waited for {at - since:.1f} s, though its key is not slow"
                yield Finding("stuck", destination.name, emitted.event_id, text)
            free[key] = max(at, free.get(key, 0.0))

    def _committed(self, name: str) -> list[Committed]:
        events: Iterable[Emitted] = self.application.events
        if name == "dead":
            events = self.judge.dead_letters
        known = sorted((e for e in events if e.destination == name), key=lambda e: e.position)
        return [Committed(name, e.event_id, e.ordering_key, e.position, _bytes(e.payload)) for e in known]

    def _excused(self, receiver: Receiver) -> dict[tuple[str, UUID], int]:
        """For each event that came again: how often a fault befell what was in flight in between.

        What was sent on a lease that a killed server forgot excuses itself: its settle finds no row, and its
        relay learns that only then, which may be long after the server is back.
        """
        excused = Counter({(receiver.name, event_id): count for event_id, count in receiver.misled.items()})
        forgotten = self.database.forgotten
        before: dict[int, Applied] = {}
        for delivery in receiver.applied:
            if delivery.begun < forgotten.get(delivery.token, 0.0):
                excused[receiver.name, delivery.event_id] += 1
                continue
            number = delivery.event_id.int
            one, before[number] = before.get(number), delivery
            if one is not None:
                since = min(one.begun, delivery.begun)
                troubled = (*one.node.troubled, *delivery.node.troubled, *self.site.troubled)
                excused[receiver.name, delivery.event_id] += any(
                    begins <= delivery.at and since <= ends for begins, ends in troubled
                )
        return excused

    @contextmanager
    def _environment(self) -> Iterator[None]:
        """Make what the product takes from its surroundings repeatable, and its longest waits shorter.

        Polls and settles come less often than they do at work: they are most of what a schedule costs.
        """
        luck = self.world.random

        def random_uuid() -> UUID:
            return UUID(int=luck.getrandbits(128))

        most = sizing.BYTES_IN_FLIGHT if self.plan.large is None else BYTES
        changes: list[tuple[Any, str, Any]] = [
            (sizing, "BYTES_IN_FLIGHT", most),
            (sizing, "BYTES_A_CLAIM", most // sizing.BATCHES_IN_FLIGHT),
            (claim, "BYTES_A_CLAIM", most // sizing.BATCHES_IN_FLIGHT),
            (lane, "BYTES_A_CLAIM", most // sizing.BATCHES_IN_FLIGHT),
            (InFlight, "add", lambda in_flight, batch: self.judge.weigh(in_flight, batch)),
            (Gate, "may_begin", lambda own, *given: self.judge.may_begin(own, *given)),
            # Nothing asks for all tasks, and remembering each of them is expensive.
            (asyncio.tasks._all_tasks, "add", id),  # type: ignore[attr-defined]
            (claims, "uuid4", random_uuid),
            (outcomes, "uuid7", random_uuid),
            (upkeep, "texts", lambda *_: Texts({"fence": ""})),
            (caretaker, "PRUNE", 1.0 if self.plan.differs or self.plan.keyed else PRUNES),
            (prune, "PROMPT", upkeep_tables.PROMPT),
            (prune_rows, "PROMPT", upkeep_tables.PROMPT),
            (agreement.log, "disabled", True),
            (schedule_log, "disabled", True),
            (rest, "SHORTEST_POLL", 0.2),
            (settle, "GAP", GAP),
            (settle, "GAP_WHERE_ORDERED", GAP),
            (rest, "SHORTEST_POLL_WITH_WAKE", 0.5),
            (suspects, "SHORTEST_POLL_WITH_WAKE", 0.5),
            (membership, "LIVE", 2),
            (circuit, "FIRST_PAUSE", 0.2),
            (decide, "LONGEST_PAUSE", 1.0),
            (circuit, "LONGEST_PAUSE", 1.0),
        ]
        with ExitStack() as stack:
            for module, name, value in changes:
                stack.enter_context(mock.patch.object(module, name, value))
            stack.enter_context(mock.patch.dict(MEMBERSHIP, interval=BEATS))
            stack.callback(crashpoint.watch, None)
            crashpoint.watch(self._at_point if self.plan.crash_points else None)
            yield


class NodeTally(Tally):
    """Remembers also what a node will not try again: what it could not give back runs out."""

    def __init__(self, node: Node, time: DatabaseTime) -> None:
        super().__init__(node.name, time)
        self._node = node

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        if doing == "release":
            self._node.trouble()


class Watcher(Observer):
    """Writes what a relay does, to find the cause of a finding."""

    def __init__(self, world: World, node: Node, tell: Tell) -> None:
        self._world = world
        self._node = node
        self._write = tell

    def claimed(self, destination: str, claim: Claim) -> None:
        if claim.deliveries or claim.failed or claim.parked:
            rows = ", ".join(f"{d.position}({d.attempts})" for d in (*claim.deliveries, *claim.failed))
            failed = f", {len(claim.failed)} failed" if claim.failed else ""
            self._tell(destination, f"claims {rows}, {claim.parked} parked{failed}")

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        rows = ", ".join(
            f"{d.position} {type(o).__name__}" + " lost" * (d.id in lost) for d, o in settlements
        )
        self._tell(destination, f"settles {rows}")

    def circuit(self, destination: str, state: str, reason: str) -> None:
        self._tell(destination, f"circuit {state} {reason}")

    def trouble(self, destination: str, doing: str, error: BaseException) -> None:
        self._tell(destination, f"cannot {doing}: {error!r}")

    def _tell(self, destination: str, text: str) -> None:
        if not self._node.dead:
            self._write(f"{self._world.now:8.3f} {self._node.name} {destination}: {text}")


def run_seed(seed: int, *, tell: Tell | None = None) -> Result:
    return Schedule(draw(seed), tell).run()


def _dead_letter(destination: Destination, others: dict[str, Destination]) -> DeadLetter | None:
    if destination.dead_letter is None:
        return None
    other = others[destination.dead_letter]
    return DeadLetter(other.name, other.max_attempts, ordered=other.ordered)


def _number(event_id: UUID) -> int:
    return (event_id.int >> 64) - 1


def _bytes(payload: str | None) -> bytes:
    return (payload or "").encode()


def _done(future: Any) -> None:
    if not future.done():
        future.set_result(None)


async def _nothing() -> None:
    """Do nothing: there is nothing to close."""


if TYPE_CHECKING:
    from tests.simulation.schedule import Schedule


class Judge:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._database = schedule.database
        self._leases = {destination.name: destination.lease for destination in schedule.plan.destinations}
        self.dead_letters: list[Emitted] = []  # What was put there by the settles that failed it elsewhere
        schedule.database.on_change = self._changed
        self._commit = schedule.database.commit
        schedule.database.commit = self._committing  # type: ignore[method-assign]
        for receiver in schedule.receivers.values():
            receiver.on_request = self._sent
        self._writer: object = None
        self._sizes: Counter[str] = Counter()  # How many rows were leased under each token
        self._bytes: Counter[str] = Counter()  # How large they are together
        self._add, self._may_begin = InFlight.add, Gate.may_begin
        self._deaths: Counter[tuple[str, UUID]] = Counter()
        """How often a relay died that held this row and no other under its token."""
        self._dying: dict[str | None, set[UUID]] = {}
        """The suspects that each relay was sending when it died."""
        self._blocking = {d.name for d in schedule.plan.destinations if d.on_failed == "block"}
        self._stranded: dict[tuple[str, str], object] = {}
        """The keys whose first row is parked: nobody will settle anything before it."""
        self._findings: list[Finding] = []
        self._prunings = Prunings(schedule.server, schedule.plan, schedule.retentions.__getitem__)

    def findings(self) -> list[Finding]:
        found = self._findings
        for destination in self._schedule.plan.destinations:
            found = found + list(self._blameless(destination))
        return found + list(self._dead_letters())

    def _committing(self, transaction: Transaction, *, flush: bool = True) -> None:
        self._writer = transaction.node
        for event_id, text in self._prunings.forgotten(transaction):
            self._findings.append(Finding("untrue", "", event_id, text))
        changed = [(row or self._database.rows.get(id_)) for id_, row in transaction.rows.items()]
        self._commit(transaction, flush=flush)
        for line in {
            (row.emitted.destination, row.emitted.ordering_key) for row in changed if row is not None
        }:
            self._look_at(line)

    def _look_at(self, line: tuple[str, str | None]) -> None:
        """Report the first row of a key if it stays parked for too long."""
        name, key = line
        if key is None or name not in self._leases:
            return
        if self._parked_head(name, key) is None:
            self._stranded.pop((name, key), None)
        elif (name, key) not in self._stranded:
            since = self._stranded[name, key] = object()
            self._schedule.world.after(self._leases[name] + STUCK, self._judge_stranded, name, key, since)

    def _parked_head(self, name: str, key: str) -> Row | None:
        rows = (self._database.rows[id_] for _, id_ in self._database.open[name, key])
        head = next((row for row in rows if row.status == "pending" or name in self._blocking), None)
        parked = head is not None and head.status == "pending" and head.next_attempt_at is None
        return head if parked else None

    def _judge_stranded(self, name: str, key: str, since: object) -> None:
        row = self._parked_head(name, key)
        if row is not None and self._stranded.get((name, key)) is since:
            self._find("stuck", row, f"is parked behind nothing, a lease and {STUCK:g} s long")

    def _changed(self, before: Row | None, row: Row | None) -> None:
        wrong = self._prunings.changed(before, row, self._writer)
        if before is not None and wrong is not None:
            self._find("lost", before, wrong)
        if before is None and row is not None and row.emitted.destination == "dead":
            self.dead_letters.append(row.emitted)
        if before is not None and row is not None and before.status in ("delivered", "discarded"):
            self._find("untrue", row, f"changed after it was {before.status}")
        if row is not None and row.leased_until is not None and row.token is None:
            self._find("untrue", row, f"is leased until {row.leased_until:g} to nobody")
        if before is None or before.token is None:
            if row is not None and row.token is not None:
                self._claimed(row)
            return
        self._judge_writer(before, row)
        if row is not None and row.deaths > before.deaths:
            # It was not settled: its relay died, or lost it.
            if before.deaths > 1 and self._sizes[before.token] == 1:
                self._deaths[row.emitted.destination, row.emitted.event_id] += 1
            if row.attempts > before.attempts:
                self._judge_blame(before)
            self._ran_out(before)
        if row is not None and row.token is not None and row.token != before.token:
            self._claimed(row, before)

    def _sent(self, node: Node, deliveries: Sequence[Delivery]) -> None:
        """Check that a relay sends only what it holds, by its own clock."""
        if {"clock step", "server killed"} & set(self._schedule.plan.faults):
            return
        for delivery in deliveries:
            row = self._database.rows.get(delivery.id.hex)
            token = delivery.lease_token.hex
            if row is not None and (row.token != token or row.unleased(self._database.now())):
                self._find("untrue", row, f"was sent by {node.name} when its lease had run out")

    def _judge_writer(self, before: Row, row: Row | None) -> None:
        """Check that only the holder of a row ends its lease, moves its end, or records an outcome."""
        if before.leased_until is None or before.leased_until <= self._database.now():
            return
        writer = getattr(self._writer, "name", None)
        held = before.status, before.token, before.leased_until
        if writer != before.owner and (row is None or held != (row.status, row.token, row.leased_until)):
            self._find("untrue", before, f"was changed by {writer} while {before.owner} held it")

    def died(self, node: Node) -> None:
        under_way = (deliveries for deliveries, answer in node.suspects if not answer.done())
        self._dying[node.name] = {delivery.id for deliveries in under_way for delivery in deliveries}

    def _judge_blame(self, row: Row) -> None:
        """Check that a death counts only if no other suspect was being sent, unless a lock hides that."""
        others = self._dying.get(row.owner, set()) - {row.emitted.id}
        if others and not {"row locks", "table lock"} & set(self._schedule.plan.faults):
            self._find("untrue", row, f"is blamed for a death of {row.owner}, which sent other suspects")

    def _claimed(self, row: Row, before: Row | None = None) -> None:
        assert row.token is not None
        if before is not None and not before.unleased(self._read_by(row)):
            self._find("duplicate", row, f"was claimed by {row.owner} while {before.owner} held it")
        self._sizes[row.token] += 1
        self._judge_size(row)

    def _read_by(self, claimed: Row) -> float:
        """Return what the database's clock said to the claim; it may have stepped back before the commit."""
        now = self._database.now()
        if "clock step" not in self._schedule.plan.faults:
            return now
        return max(now, (claimed.leased_until or 0.0) - self._leases[claimed.emitted.destination])

    def _judge_size(self, row: Row) -> None:
        self._bytes[row.token or ""] += row.emitted.size
        size, count = self._bytes[row.token or ""], self._sizes[row.token or ""]
        if count > 1 and size > sizing.BYTES_A_CLAIM:
            self._find("untrue", row, f"is one of {count} rows that {row.owner} claimed, {size} bytes")

    def weigh(self, in_flight: InFlight, batch: Batch) -> None:
        """Add to what a lane has in flight: no more than it may have, but for one row and some suspects."""
        self._add(in_flight, batch)
        largest = max(size([delivery]) for delivery in batch.deliveries)
        if in_flight.bytes > sizing.BYTES_IN_FLIGHT + sizing.BYTES_A_CLAIM + 2 * largest:
            [first, *_] = batch.deliveries
            text = f"{in_flight.bytes} bytes are in flight in {first.lease_owner}"
            self._findings.append(Finding("untrue", first.destination, first.event_id, text))

    def may_begin(self, own: Gate, batch: Batch, delivery: Delivery) -> bool:
        """Let a lane decide; nothing may begin on a lease that is over."""
        begins = self._may_begin(own, batch, delivery)
        row = self._database.rows.get(delivery.id.hex)
        held = row is not None and row.token == delivery.lease_token.hex
        if begins and held and row.unleased(self._database.now()) and not self._schedule.plan.steps:
            self._find("duplicate", row, f"{row.owner} begins to send it on a lease that is over")
        return begins

    def _ran_out(self, row: Row) -> None:
        if row.leased_until is None or row.leased_until > self._database.now():
            return
        if self._is_well(row.owner, row):
            self._find("duplicate", row, f"the lease of {row.owner} ran out, though nothing befell it")

    def _is_well(self, owner: str | None, row: Row) -> bool:
        """True if, in the last lease, no fault hit a relay or anybody it may have waited for."""
        schedule = self._schedule
        if {"slow network", "lost answers"} & set(schedule.plan.faults):
            return False
        lease = self._leases[row.emitted.destination]
        until = (row.leased_until or 0.0) - self._database.skew
        since = min(until, schedule.world.now) - 1.5 * lease
        troubled = [*schedule.site.troubled]
        for node in schedule.all_nodes:
            if node.stalled or (node.dead and node.name == owner):
                return False
            failed = [begins for begins, ends in node.troubled if _is_trip(begins, ends) and begins >= since]
            if node.name == owner and len(failed) > 1:
                # One is made up for, because it is tried again.
                return False
            troubled += [(begins, ends) for begins, ends in node.troubled if not _is_trip(begins, ends)]
        return not any(ends >= since for _, ends in troubled)

    def _blameless(self, destination: Destination) -> Iterator[Finding]:
        """Events that failed before they were refused, or killed a relay, as often as they may."""
        receiver = self._schedule.receivers[destination.name]
        for row in self._database.rows.values():
            event_id, name = row.emitted.event_id, row.emitted.destination
            if row.status == "pending" and not 0 <= row.attempts <= row.emitted.max_attempts:
                text = f"is pending after {row.attempts} attempts of {row.emitted.max_attempts}"
                yield Finding("untrue", name, event_id, text)
            if name != destination.name or row.status != "failed":
                continue
            tries = receiver.charged[event_id] + self._deaths[name, event_id]
            if (
                tries < row.emitted.max_attempts
                and receiver.number(event_id) not in receiver.troubles.rejects
            ):
                text = f"failed after {tries} failures of its own: {row.error}"
                yield Finding("untrue", name, event_id, text)

    def _dead_letters(self) -> Iterator[Finding]:
        to = {destination.name: destination.dead_letter for destination in self._schedule.plan.destinations}
        failed: Counter[UUID] = Counter()
        for row in self._database.rows.values():
            if row.status == "failed" and to[row.emitted.destination] is not None:
                failed[row.emitted.event_id] += 1
        copies = Counter(emitted.event_id for emitted in self.dead_letters)
        for event_id in failed | copies:
            if failed[event_id] != copies[event_id]:
                text = f"failed {failed[event_id]} times and was copied {copies[event_id]} times"
                kind = "lost" if failed[event_id] > copies[event_id] else "duplicate"
                yield Finding(kind, "dead", event_id, text)

    def _find(self, kind: str, row: Row, text: str) -> None:
        self._findings.append(Finding(kind, row.emitted.destination, row.emitted.event_id, text))  # type: ignore[arg-type]


def _is_trip(begins: float, ends: float) -> bool:
    """True if a node's trouble is one round trip that failed."""
    return abs(ends - begins - SUFFERS) < 1e-9
