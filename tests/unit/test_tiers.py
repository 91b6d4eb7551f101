"""Every test is in exactly one tier, so that one command runs it and none is forgotten."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import run, tiers
from tests.tiers import TIERS
from tests.waiting import PATIENCE, wait_for

COLLECT = """
import json, pytest
from tests.tiers import TIERS

class Report:
    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        marks = {item.nodeid: {mark.name for mark in item.iter_markers()} for item in items}
        print("FOUND" + json.dumps({test: sorted(found & {*TIERS}) for test, found in marks.items()}))

pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", DIRECTORY], plugins=[Report()])
"""


@pytest.mark.full
@pytest.mark.parametrize("directory", ["tests", "tests/django"])
def test_every_test_has_exactly_one_tier(directory: str, pytestconfig: pytest.Config) -> None:
    code = COLLECT.replace("DIRECTORY", repr(directory))
    shown = subprocess.run(
        [sys.executable, "-c", code], cwd=pytestconfig.rootpath, capture_output=True, text=True
    ).stdout
    found = json.loads(next(line for line in shown.splitlines() if line.startswith("FOUND"))[5:])
    assert [test for test, marks in found.items() if len(marks) != 1] == []
    counts = Counter(marks[0] for marks in found.values())
    assert set(counts) <= set(TIERS)
    assert counts["fast"] > sum(counts.values()) / 3


class Module:
    """The marks of a module."""

    def __init__(self, own_markers: list[Any]) -> None:
        self.own_markers = own_markers


class Item:
    """As much of a test as decides its tier; ``module`` are the marks of its module."""

    def __init__(
        self, path: str, *marks: str, module: tuple[str, ...] = (), fixtures: tuple[str, ...] = ()
    ) -> None:
        self.path = Path(tiers.__file__).parent / path
        self.nodeid = path
        self.fixturenames = fixtures
        self.own_markers = [getattr(pytest.mark, name).mark for name in marks]
        self.module = Module([getattr(pytest.mark, name).mark for name in module])

    def listchain(self) -> list[Any]:
        return [self.module, self]

    def add_marker(self, name: str) -> None:
        self.own_markers.append(getattr(pytest.mark, name).mark)

    def marks(self) -> list[str]:
        return [mark.name for node in self.listchain() for mark in node.own_markers]


@pytest.mark.parametrize(
    ("item", "tier"),
    [
        (Item("unit/test_x.py"), "fast"),
        (Item("docs/test_x.py"), "full"),
        (Item("chaos/test_x.py"), "chaos"),
        (Item("chaos/test_x.py", "fast"), "fast"),
        (Item("unit/test_x.py", module=("full",)), "full"),
        (Item("unit/test_x.py", "fast", module=("full",)), "fast"),
        (Item("integration/test_x.py", "full"), "full"),
        (Item("integration/test_x.py::test_y[postgresql-15]"), "full"),
        (Item("integration/test_x.py", fixtures=("kafka_url",)), "full"),
    ],
)
def test_the_mark_decides_then_the_directory_then_what_it_needs(item: Any, tier: str) -> None:
    tiers.assign([item])
    assert item.marks() == [tier]


def test_a_test_of_two_tiers_is_refused() -> None:
    item: Any = Item("unit/test_x.py", "full", "chaos")
    with pytest.raises(pytest.UsageError, match="is in several tiers, chaos and full: leave one mark"):
        tiers.assign([item])


def test_each_tier_has_commands_and_every_command_an_environment() -> None:
    assert set(TIERS) <= set(run.TIERS)
    for command in (command for commands in run.TIERS.values() for command in commands):
        assert Path(command.environment).name.startswith(".venv")
    assert run.main(["nonsense"]) == 2
    assert run.main([]) == 2


def test_only_an_environment_that_is_optional_may_be_missing(capsys: pytest.CaptureFixture[str]) -> None:
    missing = [run.Command(name, (), ".venv-none", optional=name == "extra") for name in ("extra", "needed")]
    assert [(result.name, result.status) for result in run.run(missing)] == [
        ("needed", run.MISSING),
        ("servers", 0),
    ]
    shown = capsys.readouterr().out
    assert "tests: left out extra: there is no .venv-none" in shown
    assert "tests: there is no .venv-none; `make env-all` creates it" in shown


RUN = """
import sys
from tests import run
from tests.servers import packages

packages.NEEDED["tiny"] = ()
run.TIERS["tiny"] = tuple(run.Command(name, tuple(sys.argv[1:])) for name in ("first", "second"))
sys.exit(run.main(["tiny"]))
"""
TINY = """
import os, time
from pathlib import Path

def test_that_passes():
    pass

def test_that_takes_long():
    Path(__file__).with_suffix(".part").write_text(str(os.getpid()))
    Path(__file__).with_suffix(".part").rename(Path(__file__).with_suffix(".pid"))
    time.sleep(600)
"""


@contextmanager
def running(directory: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yield a run in the middle of its first command, and the process that is in the test."""
    (directory / "test_tiny.py").write_text(TINY)
    (directory / "pytest.ini").write_text("[pytest]\n")
    arguments = [str(directory), f"--basetemp={directory}/tmp", *options]
    with subprocess.Popen(
        [sys.executable, "-c", RUN, *arguments],
        cwd=run.ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            pid = directory / "test_tiny.pid"
            wait_for(lambda: pid.exists() or process.poll() is not None, "the test runs")
            yield process, int(pid.read_text())
        finally:
            process.kill()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_interrupted_prints_its_summaries_and_goes_no_further(
    number: signal.Signals, tmp_path: Path
) -> None:
    with running(tmp_path) as (process, _):
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does
        else:
            process.send_signal(number)
        shown, _ = process.communicate()
    assert process.returncode == run.SIGNALED + number
    assert "KeyboardInterrupt" in shown
    assert "1 passed" in shown
    *_, first, servers = shown.splitlines()
    assert first.startswith("first ")
    assert first.endswith(f"failed ({run.SIGNALED + number})")
    assert servers.startswith("servers ")


@pytest.mark.full
def test_no_process_of_pytest_outlives_a_run_that_is_killed(tmp_path: Path) -> None:
    with running(tmp_path, "--numprocesses=1") as (process, tester):
        watched = os.pidfd_open(tester)
        try:
            process.kill()
            assert select.select([watched], [], [], PATIENCE)[0]
        finally:
            os.close(watched)
