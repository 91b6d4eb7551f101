"""Commands from a warm interpreter end when they should, and start as cold ones do."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from relaybox.cli import app
from tests import warm
from tests.integration.project import COMMAND, Project
from tests.waiting import PATIENCE, wait_for

COLD = {
    "init": 0,
    "sql": 0,
    "migrate": 0,
    "config check": 0,
    "send-test console": 0,
    "drain": 0,
    "prune": 0,
    "status": 0,
    "events list": 0,
    "failures": 0,
    "doctor": 0,
    "top": 0,
    "why 01900000-0000-7000-8000-000000000000": 1,
    "verify console --inbox shop": 2,
    "debezium": 2,
    "backfill --destination console": 2,
    "reconcile --destination console": 2,
    "reindex --destination console": 2,
    "relay --help": 0,
    "web --help": 0,
    "demo --help": 0,
}
"""Commands of every module of ``relaybox.cli`` with their exit status, in the order in which they run."""

FOR_EVER = """
[destinations.console]
sink = "console:"
"""
"""With a destination, a relay runs until it is stopped."""

OWNER = """
import os, sys, time
from pathlib import Path
from tests import warm

command = warm.start(sys.argv[2:], Path(sys.argv[1]), os.environ, 2, 2)
_, interpreter = warm._server(os.getpid())
print(command.pid, interpreter.pid, flush=True)
time.sleep(600)
"""


def module_of(words: str) -> str:
    """Return the module of a command, which may be one of a group."""
    command = get_command(app)
    for word in words.split():
        command = getattr(command, "commands", {}).get(word, command)
    return str(command.callback.__module__)


@pytest.mark.full
def test_a_command_of_each_module_starts_cold(tmp_path: Path) -> None:
    parts = [app, *(group.typer_instance for group in app.registered_groups)]
    modules = {command.callback.__module__ for part in parts for command in part.registered_commands}
    assert {module_of(words) for words in COLD} == modules
    project = Project(tmp_path)
    for words, status in COLD.items():
        project.run(*words.split(), status=status, command=COMMAND)


def test_the_interpreter_outlives_the_thread_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm, "_server", cache(warm._server.__wrapped__))
    thread = threading.Thread(target=warm.run, args=[["--version"], tmp_path, os.environ])
    thread.start()
    wait_for(lambda: not Path(f"/proc/self/task/{thread.native_id}").exists(), "the thread ends")
    assert warm.run(["--version"], tmp_path, os.environ).returncode == 0


def test_a_command_is_killed_when_the_wait_for_it_is_interrupted(
    tmp_path: Path, migrated_database: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[warm.Process] = []
    wait = warm.Process.wait

    def interrupted(process: warm.Process, timeout: float | None = None) -> int:
        waited.append(process)
        if len(waited) == 1:
            raise KeyboardInterrupt
        return wait(process, timeout)

    monkeypatch.setattr(warm.Process, "wait", interrupted)
    (tmp_path / "relaybox.toml").write_text(FOR_EVER)
    with pytest.raises(KeyboardInterrupt):
        warm.run(["relay", "--database", migrated_database("sqlite")], tmp_path, os.environ)
    assert waited[0].poll() == -signal.SIGKILL


def test_commands_and_the_interpreter_end_with_a_process_that_is_killed(
    tmp_path: Path, migrated_database: Callable[[str], str]
) -> None:
    (tmp_path / "relaybox.toml").write_text(FOR_EVER)
    arguments = [str(tmp_path), "relay", "--database", migrated_database("sqlite")]
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, *arguments],
        cwd=warm.ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as owner:
        try:
            assert owner.stdout is not None
            watched = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        finally:
            owner.kill()
    assert len(watched) == 2
    for process in watched:
        assert select.select([process], [], [], PATIENCE)[0]
        os.close(process)
