"""What a seed draws: which faults there are in a schedule, how many, how strong and when."""

from __future__ import annotations

import signal
from random import Random
from typing import NamedTuple

from relaybox.relay.crashpoint import CRASH_POINTS
from tests.chaos.fleet import BEYOND_A_LEASE, Doom
from tests.chaos.receiver import Mood
from tests.chaos.workload import LOOSE, ORDERED

CALM = 0.08  # The part of the schedules that have no fault, and so must have no duplicate
EVENTS_A_SECOND = 700

RELAY = ("kill relay", "kill at crash point", "stop relay", "stop at crash point", "relay leaves", "crowd")
DATABASE = ("kill database", "end sessions", "end listeners")
NETWORK = tuple(
    f"{side}: {what}"
    for side in ("relays", "emitters")
    for what in ("delay", "reset", "hole", "refuse", "cut before commit", "cut after commit")
)
RECEIVER = {
    "receiver: down": Mood("down"),
    "receiver: slow": Mood("slow", seconds=0.3),
    "receiver: 500": Mood("status", status="500 Internal Server Error"),
    "receiver: 503": Mood("status", status="503 Service Unavailable"),
    "receiver: 429, seconds": Mood("status", status="429 Too Many Requests", retry_after="1"),
    "receiver: 429, date": Mood("status", status="429 Too Many Requests", retry_after="date1"),
    "receiver: 429, past date": Mood("status", status="429 Too Many Requests", retry_after="date-3600"),
    "receiver: 429, negative": Mood("status", status="429 Too Many Requests", retry_after="-5"),
    "receiver: 429, absurd": Mood("status", status="429 Too Many Requests", retry_after="1000000000000"),
    "receiver: 429, words": Mood("status", status="429 Too Many Requests", retry_after="soon"),
    "receiver: hangs": Mood("hang"),
    "receiver: closes": Mood("close"),
    "receiver: hangs after it applied": Mood("hang after applying"),
    "receiver: closes after it applied": Mood("close after applying"),
}
DISK = ("disk full",)
APPLICATION = ("kill emitter",)
CLOCK = ("step clocks",)
POOLER = "pooler"


class Means(NamedTuple):
    server: bool = False  # The database is a server, and not a file
    listens: bool = False  # Relays LISTEN
    disk: bool = False  # The disk of the database can be filled
    clocks: bool = False
    pooler: bool = False


class Fault(NamedTuple):
    """One fault: when it begins, in seconds, and how long it lasts."""

    kind: str
    at: float
    lasts: float = 0.0
    where: str = ""  # The receiver's endpoint
    strength: float = 1.0  # How many are hit, or what part of them


class Draw(NamedTuple):
    seed: int
    relays: int
    seconds: float
    faults: tuple[Fault, ...]
    dooms: tuple[Doom, ...]
    clocks: bool = False  # Some relays have a wall clock that steps
    pooler: bool = False
    batch: int = 20
    concurrency: int = 50
    keep: bool = True  # Whether rows that were delivered are kept, or removed at once

    @property
    def calm(self) -> bool:
        return not (self.faults or self.dooms)


def draw(seed: int, events: int, means: Means) -> Draw:
    """Return what this seed does with these means; it is the same every time."""
    random = Random(seed)
    seconds = max(1.0, events / EVENTS_A_SECOND)
    relays = random.randint(2, 3)
    kinds = [] if random.random() < CALM else _kinds(random, means)
    faults: list[Fault] = []
    dooms: list[Doom] = []
    for kind in kinds:
        for _ in range(_times(random, kind)):
            if kind.endswith("crash point"):
                dooms.append(_doom(random, kind))
            else:
                faults.append(_fault(random, kind, seconds))
    random.shuffle(dooms)
    pooler = means.pooler and random.random() < 0.15
    faults.sort(key=lambda fault: fault.at)
    return Draw(
        seed,
        relays,
        seconds,
        tuple(faults),
        tuple(dooms),
        clocks=CLOCK[0] in kinds,
        pooler=pooler,
        batch=random.choice((5, 20, 20, 100)),
        concurrency=random.choice((4, 50, 50)),
        keep=random.random() < 0.8,
    )


def _kinds(random: Random, means: Means) -> list[str]:
    families: list[tuple[float, tuple[str, ...]]] = [(0.7, RELAY), (0.6, tuple(RECEIVER)), (0.1, APPLICATION)]
    if means.server:
        families += [(0.4, DATABASE if means.listens else DATABASE[:2]), (0.4, NETWORK)]
    if means.disk:
        families.append((0.9, DISK))
    if means.clocks:
        families.append((0.15, CLOCK))
    kinds: list[str] = []
    while not kinds:
        for weight, family in families:
            if random.random() < weight:
                kinds += random.sample(family, random.randint(1, min(3, len(family))))
    return kinds


def _times(random: Random, kind: str) -> int:
    match kind:
        case "kill database" | "crowd":
            return random.randint(1, 2)
        case "kill relay" | "kill at crash point":
            return random.randint(1, 6)
    return random.randint(1, 3)


def _doom(random: Random, kind: str) -> Doom:
    number = signal.SIGKILL if kind.startswith("kill") else signal.SIGSTOP
    return Doom(random.choice(CRASH_POINTS), random.choice((1, 1, 2, 5, 20)), number)


def _fault(random: Random, kind: str, seconds: float) -> Fault:
    at = random.uniform(0.1, 0.95) * seconds
    match kind:
        case "stop relay":
            return Fault(kind, at, random.uniform(*BEYOND_A_LEASE))
        case "crowd":
            return Fault(kind, at, random.uniform(0.3, 1.0), strength=random.randint(6, 12))
        case "disk full":
            return Fault(kind, at, random.uniform(0.2, 1.0))
        case "kill database":
            return Fault(kind, at, random.choice((0.0, 0.3)))
        case "end sessions" | "end listeners":
            return Fault(kind, at, strength=random.randint(1, 6))
        case "step clocks":
            return Fault(kind, at, strength=random.choice((-86_400.0, -60.0, -1.5, 1.5, 60.0, 86_400.0)))
        case _ if kind.startswith("receiver"):
            where = random.choice((ORDERED, LOOSE, ORDERED, ""))
            return Fault(kind, at, random.uniform(0.2, 1.0), where, random.choice((0.05, 0.3, 1.0)))
        case _ if kind.endswith(": hole"):
            return Fault(kind, at, random.uniform(0.3, 1.5))
        case _ if kind.endswith((": delay", ": refuse")):
            return Fault(kind, at, random.uniform(0.2, 0.8), strength=random.choice((0.005, 0.03, 0.1)))
    return Fault(kind, at, strength=random.randint(1, 4))
