"""What a seed does to a broker, one harm after the other, and to the relays meanwhile."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from relaybox.crashpoint import CRASH_POINTS
from tests.chaos.faults import CALM, Draw, Fault
from tests.chaos.fleet import Doom

FIRST = 1.0
"""Seconds in which the first events are emitted, before anything happens."""


class Blow(NamedTuple):
    """One harm: when it comes after the end of the one before, and how long it lasts, in seconds."""

    kind: str
    gap: float
    lasts: float
    asked: bool = True
    """Whether it lasts until somebody who asks why is told; else it may be over before it is felt."""


class BrokerDraw(NamedTuple):
    """A schedule before it runs."""

    general: Draw
    blows: tuple[Blow, ...]


def draw(seed: int, kinds: Sequence[str], *, every: bool = False) -> BrokerDraw:
    """What this seed does to a broker that these can befall; ``every``: all of them, no relay is hit."""
    random = Random(seed)
    calm = random.random() < CALM and not every
    chosen = random.sample(kinds, len(kinds) if every else random.randint(1, min(3, len(kinds))))
    blows = () if calm else tuple(_blow(random, kind, every) for kind in chosen)
    hit = not (calm or every)
    return BrokerDraw(
        Draw(
            seed,
            relays=random.randint(2, 3),
            seconds=FIRST,
            faults=_faults(random, blows) if hit else (),
            dooms=_dooms(random) if hit else (),
            batch=random.choice((5, 20, 20, 100)),
            concurrency=random.choice((4, 50, 50)),
        ),
        blows,
    )


def _blow(random: Random, kind: str, every: bool) -> Blow:
    asked = random.random() < 0.7 or every
    lasts = random.uniform(0.3, 0.6 if every else 1.5) if asked else random.uniform(0.0, 0.4)
    return Blow(kind, random.uniform(0.1, 0.6), lasts, asked)


def _faults(random: Random, blows: Sequence[Blow]) -> tuple[Fault, ...]:
    """Relays are killed and leave, but none stands still: what it had under way has no end that is known."""
    if random.random() < 0.5:
        return ()
    seconds = FIRST + sum(blow.gap + blow.lasts for blow in blows)
    kinds = random.choices(("kill relay", "kill relay", "relay leaves"), k=random.randint(1, 3))
    return tuple(sorted((Fault(kind, random.uniform(0.2, 1.0) * seconds) for kind in kinds), key=_at))


def _at(fault: Fault) -> float:
    return fault.at


def _dooms(random: Random) -> tuple[Doom, ...]:
    if random.random() < 0.6:
        return ()
    count = random.randint(1, 2)
    points = random.choices(CRASH_POINTS, k=count)
    return tuple(Doom(point, random.choice((1, 2, 5)), signal.SIGKILL) for point in points)
