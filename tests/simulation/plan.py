"""What a seed draws: the shape of the system, the faults that befall it, and how hard."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from relaybox.config import Backoff, Destination
from relaybox.crashpoint import CRASH_POINTS, CrashPoint
from tests.simulation.driver import Weather
from tests.simulation.queries import Flavour
from tests.simulation.receivers import ANSWERS, OUTAGES, Outage, Troubles

EVENTS = 200
EMITTING = 1.0
"""Seconds in which events are emitted."""
FAULTS = (
    "crash", "crash point", "stall", "churn", "lost requests", "lost answers", "refused", "slow network",
    "server killed", "read-only", "cut off", "clock step", "receiver slow", "receiver errors",
    "receiver lies", "outage", "poison", "killer", "late wakes",
)  # fmt: skip


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
    trouble: float
    """After which nothing new goes wrong: all is healed, or it is over."""
    faults: tuple[str, ...]
    weather: Weather
    troubles: dict[str, Troubles]
    wakes: float
    """The chance that a commit is told to a relay."""
    alive: bool
    abort: float
    longest_transaction: float
    crashes: list[tuple[float, float]] = field(default_factory=list)
    """When one relay dies, and how long it is missing."""
    crash_points: list[tuple[CrashPoint, int]] = field(default_factory=list)
    stalls: list[tuple[float, float]] = field(default_factory=list)
    churn: list[float] = field(default_factory=list)
    kills: list[tuple[float, float]] = field(default_factory=list)
    read_only: list[tuple[float, float]] = field(default_factory=list)
    cuts: list[tuple[float, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)


def draw(seed: int) -> Plan:
    """The plan of a seed: always the same."""
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
        DRAWS[fault](plan, luck, luck.uniform(0.2, 1.0))
    return plan


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


def _some(
    plan: Plan, luck: Random, most: float, shortest: float, longest: float
) -> list[tuple[float, float]]:
    """So many at most: when it begins, and how long it takes."""
    count = max(1, round(most))
    return [(luck.uniform(0.1, plan.trouble), luck.uniform(shortest, longest)) for _ in range(count)]


def _rarely(strength: float) -> float:
    """Half of the time so rarely that what is forgotten or repeated has this one cause."""
    return 1.0 if strength > 0.6 else 0.3


def _crash(plan: Plan, luck: Random, strength: float) -> None:
    plan.crashes = _some(plan, luck, 4 * strength, 0.0, 1.0)


def _crash_point(plan: Plan, luck: Random, strength: float) -> None:
    points = [luck.choice(CRASH_POINTS) for _ in range(max(1, round(4 * strength)))]
    plan.crash_points = [(point, luck.randint(1, 30 if point in ("answered",) else 6)) for point in points]
    if "outage" in plan.faults:
        # Mostly whoever has just been told to probe.
        plan.crash_points.append(("circuit changed", luck.choice((1, 2, 2, 4))))


def _stall(plan: Plan, luck: Random, strength: float) -> None:
    lease = plan.destinations[0].lease
    plan.stalls = _some(plan, luck, 3 * strength, 0.1, 2 * lease)


def _churn(plan: Plan, luck: Random, strength: float) -> None:
    plan.churn = [at for at, _ in _some(plan, luck, 4 * strength, 0.0, 1.0)]


def _lost_requests(plan: Plan, luck: Random, strength: float) -> None:
    plan.weather.fates["request lost"] = 0.1 * strength * _rarely(strength)


def _lost_answers(plan: Plan, luck: Random, strength: float) -> None:
    plan.weather.fates["answer lost"] = luck.choice((0.1, 0.4)) * strength


def _refused(plan: Plan, luck: Random, strength: float) -> None:
    plan.weather.fates["refused"] = 0.2 * strength * _rarely(strength)


def _slow_network(plan: Plan, luck: Random, strength: float) -> None:
    plan.weather.slow = 0.2 * strength


def _server_killed(plan: Plan, luck: Random, strength: float) -> None:
    plan.kills = _some(plan, luck, 2 * strength, 0.1, 2.0)


def _read_only(plan: Plan, luck: Random, strength: float) -> None:
    plan.read_only = _some(plan, luck, 2 * strength, 0.1, 2.0)


def _cut_off(plan: Plan, luck: Random, strength: float) -> None:
    plan.cuts = _some(plan, luck, 3 * strength, 0.2, 4.0)


def _clock_step(plan: Plan, luck: Random, strength: float) -> None:
    plan.steps = [(luck.uniform(0.1, plan.trouble), luck.uniform(-2.0, 4.0) * strength)]


def _receiver_slow(plan: Plan, luck: Random, strength: float) -> None:
    for troubles in plan.troubles.values():
        troubles.slow = 0.1 * strength


def _receiver_errors(plan: Plan, luck: Random, strength: float) -> None:
    _answers(plan, luck, strength, applied=False)


def _receiver_lies(plan: Plan, luck: Random, strength: float) -> None:
    _answers(plan, luck, strength, applied=True)


def _answers(plan: Plan, luck: Random, strength: float, *, applied: bool) -> None:
    for troubles in plan.troubles.values():
        kinds = [answer for answer in ANSWERS.values() if answer[0] == applied and luck.random() < 0.6]
        troubles.chances += [(0.1 * strength, *answer) for answer in kinds]


def _outage(plan: Plan, luck: Random, strength: float) -> None:
    name = luck.choice(list(plan.troubles))
    for begins, length in _some(plan, luck, 2 * strength, 0.2, 3.0):
        looks = OUTAGES[luck.choice(list(OUTAGES))]
        plan.troubles[name].outages.append(Outage(begins, begins + length, looks))


def _poison(plan: Plan, luck: Random, strength: float) -> None:
    for destination in plan.destinations:
        name, troubles = destination.name, plan.troubles[destination.name]
        if name != "dead":
            most = 3 if destination.dead_letter is None else 12
            bad = luck.sample(range(plan.events), max(1, round(most * strength)))
            kinds = [luck.choice(("rejects", "never", "chokes")) for _ in bad]
            for kind in set(kinds):
                of = frozenset(number for number, its in zip(bad, kinds, strict=True) if its == kind)
                setattr(troubles, kind, of)


def _killer(plan: Plan, luck: Random, strength: float) -> None:
    name = luck.choice([name for name in plan.troubles if name != "dead"])
    plan.troubles[name].kills = frozenset({luck.randrange(plan.events)})


def _late_wakes(plan: Plan, luck: Random, strength: float) -> None:
    plan.wakes = 0.1


DRAWS = dict(
    zip(
        FAULTS,
        (
            _crash, _crash_point, _stall, _churn, _lost_requests, _lost_answers, _refused, _slow_network,
            _server_killed, _read_only, _cut_off, _clock_step, _receiver_slow, _receiver_errors,
            _receiver_lies, _outage, _poison, _killer, _late_wakes,
        ),
        strict=True,
    )
)  # fmt: skip
