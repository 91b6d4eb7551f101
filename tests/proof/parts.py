"""The parts of the proof, each a run of its own with a bounded time, and the figures it came to."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as Xml
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from relaybox.testing.checker import KINDS
from tests.chaos.brokers.base import BROKERS
from tests.commit import ROOT, commit
from tests.proof.core import digest

FILE = ROOT / "docs" / "proof.jsonl"


class Run(msgspec.Struct, frozen=True):
    """One part of one run. ``figures`` are the part's own, ``core`` the hash of what was tested."""

    part: str
    date: str
    commit: str
    seconds: float
    figures: dict[str, Any]
    core: str = ""


class CoreChanged(Exception):
    """The core's files were edited during the run, so its figures are of no core."""


def made(part: str, seconds: float, figures: Mapping[str, Any], core: str) -> Run:
    date = datetime.now(UTC).date().isoformat()
    return Run(part, date, commit(), round(seconds, 1), dict(figures), core)


def keep(run: Run, file: Path = FILE) -> None:
    with file.open("ab") as lines:
        lines.write(msgspec.json.encode(run) + b"\n")


def kept(file: Path = FILE) -> list[Run]:
    if not file.exists():
        return []
    return [msgspec.json.decode(line, type=Run) for line in file.read_bytes().splitlines() if line]


def total(runs: Iterable[Run], name: str) -> int:
    return sum(run.figures.get(name, 0) for run in runs)


SIMULATION = "simulation"
DATABASES = ("chaos-postgresql-18", "chaos-mariadb", "chaos-sqlite")
SEARCH = "chaos-search"
CHAOS = (*DATABASES, *(f"chaos-{broker}" for broker in BROKERS), SEARCH)
TESTS = {
    "planted-bugs": ("tests/simulation/test_sensitivity.py", {"RELAYBOX_SEARCH": "1"}),
    "fidelity": ("tests/simulation/test_fidelity.py", {"RELAYBOX_FIDELITY": "300"}),
    "bad-input": ("tests/properties", {"RELAYBOX_INPUTS": "100000"}),
    "recovery": ("tests/chaos/test_recovery.py", {"RELAYBOX_BOUNDS": "1"}),
}
"""Parts that are tests: where, and what makes them long."""
PARTS = (SIMULATION, *CHAOS, *TESTS)
EVENTS = 2_000


def run(part: str, seconds: float, schedules: int) -> tuple[Run, bool]:
    """Run a part for about so long (tests take what they take); whether it kept every promise.

    ``schedules`` bounds the simulation as well. Raise ``CoreChanged`` if the core is not the same at the end.
    """
    began, core = time.monotonic(), digest()
    if part == SIMULATION:
        figures, ok = _simulate(seconds, schedules)
    elif part in CHAOS:
        figures, ok = _storm(part, seconds)
    else:
        figures, ok = _test(*TESTS[part])
    if digest() != core:
        raise CoreChanged(f"{part}: the core was edited during the run; its figures are not kept")
    return made(part, time.monotonic() - began, figures, core), ok


def _simulate(seconds: float, schedules: int) -> tuple[dict[str, Any], bool]:
    first = total([run for run in kept() if run.part == SIMULATION], "schedules")
    with _file() as file:
        options = ["--first", first, "--count", schedules, "--seconds", seconds, "--json", file]
        ok = _run("tests.simulation.run", *options, "--processes", os.cpu_count() or 1)
        figures = msgspec.json.decode(file.read_bytes())
    found = figures["found"]
    return {
        "first": first,
        "schedules": figures["schedules"],
        "events": figures["events"],
        "faults": sum(figures["faults"].values()),
        "kinds": dict(sorted(figures["faults"].items())),
        "again": figures["duplicates"],
        "rate": round(figures["schedules"] / figures["cpu"], 1),
        "broken": len(figures["broken"]),
        **{kind: found.get(kind, 0) for kind in KINDS},
    }, ok


def _storm(part: str, seconds: float) -> tuple[dict[str, Any], bool]:
    """Seeds that no earlier run had, on one database, with one broker or with all search engines."""
    first = total([run for run in kept() if run.part == part], "schedules")
    with _file() as file:
        what = ["--database" if part in DATABASES else "--broker", part.partition("-")[2]]
        subject = ["--search"] if part == SEARCH else what
        options = [*subject, "--seed", first, "--events", EVENTS, "--json", file]
        ok = _run("tests.chaos.run", *options, "--count", 10_000, "--minutes", seconds / 60)
        results = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    found: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for result in results:
        found.update(result["findings"])
        kinds.update(result["faults"])
    # None: nothing was left to deliver when the database was back.
    recoveries = sorted(moment for result in results for moment in result["recoveries"] if moment is not None)
    return {
        "first": first,
        "schedules": len(results),
        "events": sum(result["events"] for result in results),
        "faults": kinds.total(),
        "kinds": dict(sorted(kinds.items())),
        "broken": sum(any(result["findings"].values()) for result in results),
        "recoveries": [round(moment, 2) for moment in recoveries],
        **({} if part == SEARCH else _received(results)),
        **found,
    }, ok


def _received(results: list[dict[str, Any]]) -> dict[str, int]:
    """Return the deliveries that have receipts: an index does not record what it was sent."""
    again = {"again": sum(result["duplicates"] for result in results)}
    bound = {"bound": sum(result["bound"] for result in results)}
    return {**again, **bound, **dict.fromkeys(KINDS, 0)}


def _test(path: str, environment: Mapping[str, str]) -> tuple[dict[str, Any], bool]:
    """Return what the test recorded, by name, and if it passed."""
    with _file() as file:
        # These tests run for minutes by design; the suite's own limit would end them on a busy machine.
        command = [sys.executable, "-m", "pytest", "-q", "--timeout=3600", path, f"--junitxml={file}"]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, check=False)
        suites = Xml.fromstring(file.read_bytes())
    suite = next(suites.iter("testsuite"))
    figures: dict[str, Any] = {"tests": int(suite.attrib["tests"]), "skipped": int(suite.attrib["skipped"])}
    for found in suites.iter("property"):
        figures.setdefault(found.attrib["name"], []).append(_value(found.attrib["value"]))
    return figures, done.returncode == 0


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _run(module: str, *options: object) -> bool:
    return subprocess.run([sys.executable, "-m", module, *map(str, options)], cwd=ROOT).returncode == 0


@contextmanager
def _file() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / "results"
        file.touch()
        yield file
