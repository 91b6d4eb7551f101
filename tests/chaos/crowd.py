"""The emitters of a schedule, as whoever directs them sees them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from random import Random

import msgspec

from tests.chaos.nursery import Change, Nursery
from tests.chaos.workload import Plan


class Emitters:
    """They run until each has committed its part; one that is killed is followed by another."""

    def __init__(self, nursery: Nursery, directory: Path) -> None:
        self.unexpected: list[str] = []
        self._nursery = nursery
        self._log = directory / "emitters.log"
        self._plans: dict[int, Plan] = {}
        self._killed: set[int] = set()

    @property
    def busy(self) -> bool:
        """Whether somebody still emits."""
        return bool(self._plans)

    def start(self, plan: Plan) -> None:
        """One more."""
        self._plans[self._nursery.start("emitter", plan, self._log)] = plan

    def kill(self, random: Random) -> None:
        """SIGKILL for one of them, wherever it is in its transaction."""
        if alive := sorted(self._plans.keys() - self._killed):
            victim = random.choice(alive)
            self._killed.add(victim)
            os.kill(victim, signal.SIGKILL)

    def look(self, changes: Iterable[Change]) -> None:
        """Notice who ended."""
        for pid, code in changes:
            plan = self._plans.pop(pid, None)
            if plan is None:
                continue
            if pid in self._killed:
                # Nobody knows how many it had; with all of them again there are enough.
                self.start(msgspec.structs.replace(plan, seed=plan.seed + 1_000_003, seconds=0.0))
            elif code != 0:
                self.unexpected.append(f"an emitter ended with {code}: {last_line(self._log)}")

    def close(self) -> None:
        """End whoever is left."""
        for pid in self._plans:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def last_line(log: Path) -> str:
    """What a process said last."""
    lines = log.read_text().splitlines() if log.exists() else []
    return lines[-1] if lines else "it said nothing"
