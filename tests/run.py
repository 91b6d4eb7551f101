"""Run tiers of the tests with one set of servers: ``python -m tests.run fast``.

Every command of a tier runs even if one before it failed. The exit status is that of the first that failed.
Ctrl-C and SIGTERM end the run after pytest's summary, with 128 plus the number of the signal; a second one
ends pytest at once. If this process is killed, so are pytest and the servers.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.servers import base, packages, shared

ROOT = Path(__file__).parents[1]
# Tests wait more than they compute, so two cores have work for more than two processes.
SIDE_BY_SIDE = ("--numprocesses", "4", "--dist", "worksteal")
EVERY_DJANGO = (*SIDE_BY_SIDE, "tests/django", "-m", "not chaos and not processes")
UNIT = (*SIDE_BY_SIDE, "tests/unit", "-m", "fast")
REQUIRED = "RELAYBOX_REQUIRE_SERVERS" in os.environ
VERSIONS = ("3.12", "3.13", "3.14")
MISSING = 3
"""The status of a command whose environment does not exist."""
SIGNALED = 128
"""The status of a command that a signal to this process ended, less the number of the signal."""

# About three minutes with fixed seeds: schedules of real processes, deaths of relays and databases, clocks
# that step, a full disk, the demo.
SLICE = (
    "tests/chaos/test_schedules.py",
    "tests/chaos/test_clocks.py",
    "tests/chaos/test_death.py",
    "tests/chaos/test_recovery.py",
    "tests/chaos/test_relay_deaths.py::test_an_event_that_kills_its_relay_is_failed_and_all_others_are_delivered",
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
        # It needs a version of Python that may be missing, but not where everything is required.
        Command("Django 6.1", EVERY_DJANGO, ".venv-django61", optional=not REQUIRED),
        *(Command(f"unit, Python {each}", UNIT, f".venv-{each}", optional=True) for each in VERSIONS),
    ),
    "slice": (Command("a slice of chaos", SLICE),),
    # No test of Django is in this tier, and a command without tests would fail.
    "chaos": (Command("chaos", ("-m", "chaos")),),
}


class Terminated(SystemExit):
    """This process got SIGTERM."""


@dataclass(frozen=True, slots=True)
class Result:
    """How a command ended, and what it took."""

    name: str
    status: int
    seconds: float
    processor: float


def run(commands: list[Command]) -> list[Result]:
    """Run the commands one after the other until a signal ends one; the last result is the servers' own."""
    host = shared.Host()
    host.start()
    results: list[Result] = []
    try:
        for command in commands:
            if not _left_out(command):
                results.append(_run(command))
                if results[-1].status > SIGNALED:
                    break
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
    # Of a group of its own: what it does not get from the terminal is passed on to it here.
    with subprocess.Popen(_guarded(command), cwd=ROOT, process_group=0) as pytest:
        status = _wait(pytest)
    return Result(command.name, status, time.monotonic() - started, _processor() - before)


def _wait(pytest: subprocess.Popen[bytes]) -> int:
    """Return pytest's status; after a signal let it print its summary, unless a second one comes."""
    try:
        return pytest.wait()
    except KeyboardInterrupt:
        number = signal.SIGINT
    except Terminated:
        number = signal.SIGTERM
    pytest.send_signal(signal.SIGINT)
    try:
        pytest.wait()
    except (KeyboardInterrupt, Terminated):
        pytest.kill()
    return SIGNALED + number


def _guarded(command: Command) -> list[str]:
    words = [command.pytest, *command.arguments]
    try:
        return base.guarded(words, as_root=True)
    except base.Unavailable as reason:
        print(f"tests: pytest goes on if this process is killed: {reason}", flush=True)
        return list(map(str, words))


def _terminate(*_: object) -> NoReturn:
    raise Terminated(SIGNALED + signal.SIGTERM)


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
    signal.signal(signal.SIGTERM, _terminate)
    packages.install(names)
    results = run([command for name in names for command in TIERS[name]])
    print(f"\n{'tests':<20} {'minutes':>8} {'CPU-s':>8}")
    for result in results:
        failed = "" if result.status == 0 else f"  failed ({result.status})"
        print(f"{result.name:<20} {result.seconds / 60:>8.1f} {result.processor:>8.0f}{failed}")
    statuses = [result.status for result in results if result.status]
    return min(statuses, key=lambda status: status < SIGNALED, default=0)


if __name__ == "__main__":
    # The processes below import the same packages, not copies in their own directory.
    os.chdir(ROOT)
    sys.exit(main(sys.argv[1:]))
