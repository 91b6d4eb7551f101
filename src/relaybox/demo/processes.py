"""The processes of the demo: started, watched, killed and ended one by one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from relaybox.demo.workspace import Workspace

STOP_SECONDS = 5.0


class Broken(Exception):
    """The demo cannot go on; the message says why."""


class Part:
    """A part of the demo in a process of its own, with a log.

    It is forked: six interpreters that each import everything again would be half of the demo's time.
    """

    def __init__(self, workspace: Workspace, name: str, work: Callable[[Workspace], None]) -> None:
        self.name = name
        self._log = workspace.path(f"{name}.log")
        self._process = get_context("fork").Process(
            target=_work, args=(work, workspace, self._log), name=name
        )
        self._process.start()
        self._ready = workspace.ready_file(self.pid)

    @property
    def pid(self) -> int:
        """Return the number of its process."""
        pid = self._process.pid
        assert pid is not None
        return pid

    @property
    def ready(self) -> bool:
        """True if it is at work."""
        return self._ready.exists()

    @property
    def ended(self) -> bool:
        """True if it has ended."""
        return self._process.exitcode is not None

    def check(self) -> None:
        """Raise ``Broken`` if it has failed."""
        if self._process.exitcode:
            raise Broken(f"{self.name} ended with status {self._process.exitcode}: {last_line(self._log)}")

    def kill(self) -> None:
        """SIGKILL: it gets no chance to say or save anything."""
        self._process.kill()
        self._process.join()

    def stop(self) -> None:
        """Ask it to end, and kill it if it does not."""
        self._process.terminate()
        self._process.join(STOP_SECONDS)
        self.kill()


def _work(work: Callable[[Workspace], None], workspace: Workspace, log: Path) -> None:
    """Run a part, from its fork to its end."""
    # Ctrl-C is for the demo, which then ends its processes in order.
    os.setsid()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    with log.open("ab") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    work(workspace)


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def last_line(log: Path) -> str:
    """Return the last line of a log."""
    return (log.read_text(errors="replace").strip().splitlines() or ["no output"])[-1]


def dying_with_us(command: Sequence[str]) -> list[str]:
    """Return the command such that the system ends it with this process, if there is a tool for that."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig=QUIT", *command] if setpriv else [*command]


def launch(command: Sequence[str], log: Path, options: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    """Start a program that is not a part of the demo."""
    with log.open("ab") as output:
        return subprocess.Popen(
            dying_with_us(command),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            **options,
        )


def end(process: subprocess.Popen[bytes], number: int) -> None:
    """Ask a program to end, and kill it if it does not."""
    process.send_signal(number)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_ports(count: int) -> list[int]:
    """Return ports of this machine that nobody listens at.

    Below those that the system gives to outgoing connections: a receiver must find its port free again.
    """
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
    return found


def unprivileged() -> dict[str, Any]:
    """Return how to run what refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    import pwd

    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
