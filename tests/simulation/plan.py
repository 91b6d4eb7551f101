"""What a seed draws: the shape of the system, its faults, and how severe they are."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from relaybox.core.settings import Backoff, Destination
from relaybox.relay.crashpoint import CRASH_POINTS, CrashPoint
from tests.simulation.driver import Weather
from tests.simulation.receivers import ANSWERS, OUTAGES, Outage, Troubles
from tests.simulation.statements import Flavour
from tests.simulation.upkeep_tables import Differs, draw_difference, draw_keyed

EVENTS = 200
EMITTING = 1.0  # Seconds in which events are emitted
LARGE = 1_000  # Characters of a large payload
BYTES = 4 * 3_500  # That may be in flight where payloads are large
FAULTS = (
    "crash", "crash point", "stall", "churn", "lost requests", "lost answers", "refused", "slow network",
    "server killed", "read-only", "cut off", "clock step", "receiver slow", "receiver errors",
    "receiver lies", "outage", "poison", "killer", "late wakes", "death between statements", "restarts",
    "row locks", "table lock",
)  # fmt: skip
SUSPENDED, SLOW_KEYS, SLOW_NEIGHBOUR = "machine suspended", "slow keys", "slow neighbour"


@dataclass
class Plan:
    """One schedule. Moments are seconds of true time."""

    seed: int
    flavour: Flavour
    destinations: list[Destination]
    bulk: dict[str, bool]
    relays: int
    keys: int
    events: int
    heals: bool
    trouble: float  # After which nothing new goes wrong: all is healed, or it is over
    faults: tuple[str, ...]
    weather: Weather
    troubles: dict[str, Troubles]
    wakes: float  # The chance that a commit wakes a relay
    alive: bool
    abort: float
    longest_transaction: float
    crashes: list[tuple[float, float]] = field(default_factory=list)
    """When one relay dies, and how long it is missing."""
    crash_points: list[tuple[CrashPoint, int]] = field(default_factory=list)
    deaths: set[int] = field(default_factory=set)
    """Before which of the statements that relays send the one dies that would send it."""
    restarts: float | None = None  # How often every relay is replaced, also when all is healed
    stalls: list[tuple[float, float]] = field(default_factory=list)
    churn: list[float] = field(default_factory=list)
    kills: list[tuple[float, float]] = field(default_factory=list)
    read_only: list[tuple[float, float]] = field(default_factory=list)
    cuts: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    row_locks: list[tuple[float, float]] = field(default_factory=list)
    table_locks: list[tuple[float, float]] = field(default_factory=list)
    """When a stranger takes a lock, and how long it is held."""
    suspensions: list[tuple[float, float]] = field(default_factory=list)
    differs: Differs | None = None
    keyed: bool = False
    large: int | None = None  # From which event on payloads are large


def draw(seed: int) -> Plan:
    luck = Random(f"plan {seed}")
    faults = tuple(fault for fault in FAULTS if luck.random() < luck.choice((0.1, 0.3)))
    if luck.random() < 0.1:
        faults = ()
    destinations = _destinations(luck)
    if faults and "poison" not in faults and any(destination.dead_letter for destination in destinations):
        faults += ("poison",)
    plan = Plan(
        seed=seed,
        flavour=luck.choice(("pipeline", "pipeline", "steps", "single")),
        destinations=destinations,
        bulk={destination.name: luck.random() < 0.6 for destination in destinations},
        relays=luck.choice((1, 2, 2, 2, 3)),
        keys=luck.choice((3, 8, 20)),
        events=EVENTS,
        heals=luck.random() < 0.5,
        trouble=luck.uniform(2.0, 3.0),
        faults=faults,
        weather=Weather(latency=luck.choice((0.0005, 0.002, 0.01))),
        troubles={
            destination.name: Troubles(luck.choice((0.002, 0.005, 0.02))) for destination in destinations
        },
        wakes=luck.choice((0.0, 0.5, 1.0)),
        alive=luck.random() < 0.8,
        abort=0.1,
        longest_transaction=luck.choice((0.01, 0.1, 0.5)),
    )
    for fault in faults:
        _befall(plan, fault, luck, luck.uniform(0.2, 1.0))
    if plan.restarts is not None:
        # A relay that ends every few seconds does not live to see that it is the event at which others choke,
        # and counts no attempt: it would try it for as long as relays are restarted.
        for troubles in plan.troubles.values():
            troubles.chokes = frozenset()
    _slow_down(plan, Random(f"slow {seed}"))
    if faults:
        _suspend(plan, Random(f"{seed} sleeping machines"))
    plan.differs, plan.keyed = draw_difference(plan), draw_keyed(plan)
    own = Random(f"{seed} large events")
    if own.random() < 0.12:
        plan.large = own.randrange(EVENTS // 2)
    return plan


def _slow_down(plan: Plan, luck: Random) -> None:
    """Draw slow keys where at most some events are rejected, and slow neighbours of a killer."""
    names = [destination.name for destination in plan.destinations if destination.name != "dead"]
    if "killer" in plan.faults and luck.random() < 0.7:
        for name in names:
            if not plan.troubles[name].kills:
                plan.troubles[name].crawls = luck.choice((0.1, 0.3))
                plan.faults += (SLOW_NEIGHBOUR,)
    elif not plan.faults and luck.random() < 0.5:
        rejecting = luck.random() < 0.3
        few: dict[str, Any] = {"concurrency": 16, "batch_size": 5, "timeout": 3.0, "lease": 4.0}
        if rejecting:
            # Several of one key are claimed together.
            few |= {"concurrency": 4, "batch_size": 20}
        plan.destinations = [replace(destination, **few) for destination in plan.destinations]
        if rejecting:
            plan.destinations = [_skipping(destination) for destination in plan.destinations]
        plan.bulk = dict.fromkeys(plan.bulk, False)
        plan.keys, plan.relays, plan.heals = (5 if rejecting else 12), 1, True
        crawls = luck.choice((0.4, 2.0))
        for name in names:
            plan.troubles[name].crawls = crawls
            slow = range(2 if rejecting else 8)
            plan.troubles[name].slow_keys = frozenset(f"key {number}" for number in slow)
            if rejecting:
                plan.troubles[name].rejects = frozenset(luck.sample(range(plan.events), plan.events // 10))
        plan.faults = (SLOW_KEYS,)


def _skipping(destination: Destination) -> Destination:
    return replace(destination, on_failed="skip") if destination.ordered else destination


def _destinations(luck: Random) -> list[Destination]:
    options = {
        "lease": luck.choice((1.0, 2.0)),
        "timeout": 0.5,
        "batch_size": luck.choice((10, 20, 50)),
        "poll_interval": luck.choice((0.5, 2.0)),
        "concurrency": luck.choice((1, 2, 8, 16)),
        "backoff": Backoff(base=0.1, cap=0.5),
        "max_attempts": luck.choice((2, 2, 3)),
    }
    kinds = luck.choice((("ordered",), ("ordered",), ("plain",), ("skipping",), ("ordered", "plain")))
    made = []
    for kind in kinds:
        own = {"ordered": kind != "plain", **({"on_failed": "skip"} if kind == "skipping" else {})}
        if luck.random() < 0.2:
            own["retention"] = luck.choice((0.0, 2.0))
        if luck.random() < 0.15:
            own["dead_letter"] = "dead"
        made.append(Destination(kind, "memory:", **options, **own))
    if any(destination.dead_letter for destination in made):
        made.append(Destination("dead", "memory:", **options))
    return made


def _suspend(plan: Plan, luck: Random) -> None:
    """Suspend a relay's machine, for longer than a lease as a rule; it is back before the trouble ends."""
    if luck.random() < 0.08:
        plan.faults += (SUSPENDED,)
        begins = luck.uniform(0.1, 0.5 * plan.trouble)
        plan.suspensions = [(begins, luck.uniform(0.5, 0.9) * (plan.trouble - begins))]


def _some(
    plan: Plan, luck: Random, most: float, shortest: float, longest: float
) -> list[tuple[float, float]]:
    """Draw at most so many spans: when each begins, and how long it takes."""
    count = max(1, round(most))
    return [(luck.uniform(0.1, plan.trouble), luck.uniform(shortest, longest)) for _ in range(count)]


def _befall(plan: Plan, fault: str, luck: Random, strength: float) -> None:
    """Add what a fault of this strength does. Half of the time it is so rare that it is the only cause."""
    weather, rarely = plan.weather, 1.0 if strength > 0.6 else 0.3
    match fault:
        case "crash":
            plan.crashes = _some(plan, luck, 4 * strength, 0.0, 1.0)
        case "crash point":
            points = [luck.choice(CRASH_POINTS) for _ in range(max(1, round(4 * strength)))]
            plan.crash_points = [
                (point, luck.randint(1, 30 if point == "answered" else 6)) for point in points
            ]
            if "outage" in plan.faults:
                # Mostly this hits the relay that is about to probe.
                plan.crash_points.append(("circuit changed", luck.choice((1, 2, 2, 4))))
        case "stall":
            plan.stalls = _some(plan, luck, 3 * strength, 0.1, 2 * plan.destinations[0].lease)
        case "churn":
            plan.churn = [at for at, _ in _some(plan, luck, 4 * strength, 0.0, 1.0)]
        case "lost requests":
            weather.fates["request lost"] = 0.1 * strength * rarely
        case "lost answers":
            weather.fates["answer lost"] = luck.choice((0.1, 0.4)) * strength
        case "refused":
            weather.fates["refused"] = 0.2 * strength * rarely
        case "slow network":
            weather.slow = 0.2 * strength
        case "server killed":
            plan.kills = _some(plan, luck, 2 * strength, 0.1, 2.0)
        case "read-only":
            plan.read_only = _some(plan, luck, 2 * strength, 0.1, 2.0)
        case "cut off":
            plan.cuts = _some(plan, luck, 3 * strength, 0.2, 4.0)
        case "clock step":
            plan.steps = [(luck.uniform(0.1, plan.trouble), luck.uniform(-2.0, 4.0) * strength)]
        case "row locks":
            plan.row_locks = _some(plan, luck, 4 * strength, 0.1, 4.0)
        case "table lock":
            plan.table_locks = _some(plan, luck, 2 * strength, 0.1, 3.0)
        case "late wakes":
            plan.wakes = 0.1
        case "death between statements":
            plan.deaths = {luck.randint(1, 300) for _ in range(max(1, round(6 * strength)))}
        case "restarts":
            plan.restarts = luck.uniform(4.0, 20.0)
        case _:
            _befall_receivers(plan, fault, luck, strength)


def _befall_receivers(plan: Plan, fault: str, luck: Random, strength: float) -> None:
    match fault:
        case "receiver slow":
            for troubles in plan.troubles.values():
                troubles.slow = 0.1 * strength
        case "receiver errors" | "receiver lies":
            applied = fault == "receiver lies"
            for troubles in plan.troubles.values():
                kinds = [
                    answer for answer in ANSWERS.values() if answer[0] == applied and luck.random() < 0.6
                ]
                troubles.chances += [(0.1 * strength, *answer) for answer in kinds]
        case "outage":
            name = luck.choice(list(plan.troubles))
            for begins, length in _some(plan, luck, 2 * strength, 0.2, 3.0):
                looks = OUTAGES[luck.choice(list(OUTAGES))]
                plan.troubles[name].outages.append(Outage(begins, begins + length, looks))
        case "poison":
            for destination in plan.destinations:
                if destination.name != "dead":
                    _poison(plan, destination, luck, strength)
        case "killer":
            name = luck.choice([name for name in plan.troubles if name != "dead"])
            plan.troubles[name].kills = frozenset({luck.randrange(plan.events)})


def _poison(plan: Plan, destination: Destination, luck: Random, strength: float) -> None:
    most = 3 if destination.dead_letter is None else 12
    bad = luck.sample(range(plan.events), max(1, round(most * strength)))
    kinds = [luck.choice(("rejects", "never", "chokes")) for _ in bad]
    for kind in set(kinds):
        of = frozenset(number for number, its in zip(bad, kinds, strict=True) if its == kind)
        setattr(plan.troubles[destination.name], kind, of)
