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

from relaybox.cli import app
from tests import warm
from tests.integration.project import COMMAND, Project
from tests.waiting import PATIENCE, wait_for

COLD = {
    "init": ("init", 0),
    "database": ("migrate", 0),
    "config": ("config check", 0),
    "actions": ("send-test console", 0),
    "relay": ("drain", 0),
    "status": ("status", 0),
    "events": ("events list", 0),
    "failures": ("failures", 0),
    "doctor": ("doctor", 0),
    "top": ("top", 0),
    "verify": ("verify console --inbox shop", 2),
    "backfill": ("backfill --destination console", 2),
    "reconcile": ("reconcile --destination console", 2),
    "reindex": ("reindex --destination console", 2),
    "web": ("web --help", 0),
    "demo": ("demo --help", 0),
}
"""A command of each module of ``relaybox.cli`` and its exit status, in the order in which they run."""

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


@pytest.mark.full
def test_a_command_of_each_module_starts_cold(tmp_path: Path) -> None:
    parts = [app, *(group.typer_instance for group in app.registered_groups)]
    modules = {command.callback.__module__ for part in parts for command in part.registered_commands}
    assert modules == {f"relaybox.cli.{name}" for name in COLD}
    project = Project(tmp_path)
    for words, status in COLD.values():
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
