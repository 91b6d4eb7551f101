"""Run tiers of the tests with one set of servers: ``python -m tests.run fast``.

Every command of a tier runs even if one before it failed. The exit status is that of the first that failed.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from tests.servers import base, packages, shared

ROOT = Path(__file__).parents[1]
# Tests wait more than they compute, so two cores have work for more than two processes.
SIDE_BY_SIDE = ("--numprocesses", "3", "--dist", "worksteal")
EVERY_DJANGO = (*SIDE_BY_SIDE, "tests/django", "-m", "not chaos and not processes")
VERSIONS = ("3.12", "3.13", "3.14")
MISSING = 3
"""The status of a command whose environment does not exist."""

# About a minute with fixed seeds: schedules of real processes, kills of relays and databases, the demo.
SLICE = (
    "tests/chaos/test_schedules.py",
    "tests/chaos/test_relay_deaths.py::test_killed_between_two_steps",
    "tests/chaos/test_relay_deaths.py::test_killed_while_its_settle_is_under_way",
    "tests/chaos/test_relay_deaths.py::test_asked_to_leave_in_mid_send_it_finishes_and_leaves_nothing",
    "tests/chaos/test_disk_full.py",
    "tests/integration/test_demo.py::test_nothing_is_lost_made_up_or_out_of_order",
)


@dataclass(frozen=True, slots=True)
class Command:
    """A run of pytest in an environment; an ``optional`` one is left out if it does not exist."""

    name: str
    arguments: tuple[str, ...]
    environment: str = ".venv"
    optional: bool = False

    @property
    def pytest(self) -> Path:
        """Return its program."""
        return ROOT / self.environment / "bin" / "pytest"


TIERS: dict[str, tuple[Command, ...]] = {
    "fast": (
        Command("fast", (*SIDE_BY_SIDE, "-m", "fast")),
        Command("fast, Django", (*SIDE_BY_SIDE, "tests/django", "-m", "fast")),
    ),
    "full": (
        Command("full", (*SIDE_BY_SIDE, "-m", "full")),
        Command("full, Django", (*SIDE_BY_SIDE, "tests/django", "-m", "full")),
        Command("Django 4.2", EVERY_DJANGO, ".venv-django42"),
        Command("Django 6.1", EVERY_DJANGO, ".venv-3.13", optional=True),
        *(
            Command(
                f"unit, Python {version}",
                (*SIDE_BY_SIDE, "tests/unit", "-m", "fast"),
                f".venv-{version}",
                optional=True,
            )
            for version in VERSIONS
        ),
    ),
    "slice": (Command("a slice of chaos", SLICE),),
    # No test of Django is in this tier, and a command without tests would fail.
    "chaos": (Command("chaos", ("-m", "chaos")),),
}


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended, and what it took."""

    name: str
    status: int
    seconds: float
    processor: float


def run(commands: list[Command]) -> list[Result]:
    """Run the commands one after the other; the last result is the servers' own."""
    host = shared.Host()
    host.start()
    try:
        results = [_run(command) for command in commands if not _left_out(command)]
    finally:
        before, started = _processor(), time.monotonic()
        host.stop()
    return [*results, Result("servers", 0, time.monotonic() - started, _processor() - before)]


def _left_out(command: Command) -> bool:
    if not command.optional or command.pytest.exists():
        return False
    print(f"tests: left out {command.name}: there is no {command.environment}", flush=True)
    return True


def _run(command: Command) -> Result:
    before, started = _processor(), time.monotonic()
    print(f"tests: {command.name}", flush=True)
    if not command.pytest.exists():
        print(f"tests: there is no {command.environment}; `make env-all` creates it", flush=True)
        return Result(command.name, MISSING, 0, 0)
    status = subprocess.run([command.pytest, *command.arguments], cwd=ROOT).returncode
    return Result(command.name, status, time.monotonic() - started, _processor() - before)


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(names: list[str]) -> int:
    """Run the tiers of these names and return the exit status."""
    unknown = [name for name in names if name not in TIERS]
    if unknown or not names:
        print(f"usage: python -m tests.run {' '.join(f'[{name}]' for name in TIERS)}", file=sys.stderr)
        return 2
    base.heed_signals()
    packages.install(names)
    results = run([command for name in names for command in TIERS[name]])
    print(f"\n{'tests':<20} {'minutes':>8} {'CPU-s':>8}")
    for result in results:
        failed = "" if result.status == 0 else f"  failed ({result.status})"
        print(f"{result.name:<20} {result.seconds / 60:>8.1f} {result.processor:>8.0f}{failed}")
    return next((result.status for result in results if result.status), 0)


if __name__ == "__main__":
    # The processes below import the same packages, not copies in their own directory.
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
