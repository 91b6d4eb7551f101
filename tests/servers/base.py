"""What the servers share: packages, an unprivileged user, a port, a start and a stop."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import TypeAlias

from tests.servers import ports

START_SECONDS = 120.0
STOP_SECONDS = 30.0
PORT_TRIES = 5
NAMESPACE = Path("/proc/self/ns/pid")
# Another container may share the directory, with processes of the same numbers.
PREFIX = f"relaybox-n{NAMESPACE.stat().st_ino if NAMESPACE.exists() else 0}-"
MEMORY = Path("/dev/shm")
ROOM = 2 << 30
"""Bytes that the servers of a run may need together."""

_PR_SET_PDEATHSIG = 1

Command: TypeAlias = Sequence[str | Path]


class Unavailable(Exception):
    """The server cannot be had on this machine; the message says why."""


class Exited(Exception):
    """The server ended before it was ready; the message is the end of its log."""


def apt_install(*packages: str) -> None:
    """Install Debian packages after a line that says so, or raise Unavailable."""
    names = " ".join(packages)
    if os.environ.get("RELAYBOX_INSTALL", "1") == "0":
        raise Unavailable(f"{names} is not installed, and RELAYBOX_INSTALL=0 leaves the system as it is")
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Unavailable(f"{names} is not installed, and only root on Debian can install it from here")
    print(f"tests: installing {names} on this system; RELAYBOX_INSTALL=0 skips its tests", file=sys.stderr)
    # One at a time: parallel test processes would spoil each other's lists of packages.
    with Path(tempfile.gettempdir(), "relaybox-apt.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _update_lists()
        done = _apt("install", "-y", "--no-install-recommends", *packages)
    if done.returncode:
        raise Unavailable(f"apt-get install {names} failed: {last_line(done.stderr)}")


def program(name: str, *packages: str, service: str = "") -> str:
    """Return the path of a program, which these packages bring, or raise Unavailable.

    ``service`` is one that a package starts by itself and that is not wanted.
    """
    # Debian keeps some in a directory that only root has on PATH.
    path = f"{os.environ['PATH']}:/usr/sbin"
    if not shutil.which(name, path=path):
        apt_install(*packages)
        if service:
            subprocess.run(["service", service, "stop"], capture_output=True)
    if not (found := shutil.which(name, path=path)):
        raise Unavailable(f"{name} is not on PATH")
    return found


@cache
def _update_lists() -> None:
    # A failure does not matter if the lists of an earlier update do.
    _apt("update")


def _apt(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=300", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        capture_output=True,
        text=True,
    )


def heed_signals() -> None:
    """Let processes end by SIGINT and SIGQUIT: a shell makes what it runs in the background ignore them."""
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGQUIT, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, handler)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; end now if that has happened already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def guarded(command: Command, *, as_root: bool = False, death: str = "KILL") -> list[str]:
    """Return the command, run as a user other than root, and sent ``death`` when this process dies.

    Only SIGKILL ends a process that a test has stopped.
    """
    if not shutil.which("setpriv"):
        raise Unavailable("setpriv (of util-linux) is not installed")
    prefix = ["setpriv", f"--pdeathsig={death}"]
    if os.geteuid() == 0 and not as_root:
        user = pwd.getpwnam("nobody")
        prefix += [f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
    return [*prefix, *map(str, command)]


@contextmanager
def workspace(*, durable: bool = False) -> Iterator[Path]:
    """Yield a temporary directory of the servers' user, in memory unless it must be durable."""
    with tempfile.TemporaryDirectory(
        prefix=f"{PREFIX}{os.getpid()}-", dir=None if durable else memory()
    ) as name:
        if os.geteuid() == 0:
            user = pwd.getpwnam("nobody")
            os.chown(name, user.pw_uid, user.pw_gid)
        yield Path(name)


def kept_workspace() -> Path:
    """Return a temporary directory that lasts as long as this process."""
    directory = ExitStack()
    atexit.register(directory.close)
    return directory.enter_context(workspace())


def memory() -> Path | None:
    """Return a directory in memory, if there is one with room and TMPDIR does not name another place."""
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK) or shutil.disk_usage(MEMORY).free < ROOM:
        return None
    return MEMORY


def remove_abandoned() -> None:
    """Remove the workspaces of processes that were killed: those in memory would fill it."""
    for place in {MEMORY, Path(tempfile.gettempdir())} if NAMESPACE.exists() else ():
        for directory in place.glob(f"{PREFIX}*"):
            process = directory.name.removeprefix(PREFIX).partition("-")[0]
            if process.isdecimal() and not Path("/proc", process).exists():
                shutil.rmtree(directory, ignore_errors=True)


def prepare(command: Command, directory: Path) -> None:
    """Run a command that lays out a data directory."""
    done = subprocess.run(guarded(command), cwd=directory, capture_output=True, text=True)
    if done.returncode:
        raise Unavailable(f"{Path(command[0]).name} failed: {last_line(done.stderr or done.stdout)}")


@contextmanager
def running(
    command: Callable[[int], Command],
    directory: Path,
    ready: str,
    *,
    as_root: bool = False,
    death: str = "KILL",
) -> Iterator[int]:
    """Run what ``command`` spells out for a port; yield the port once the log says ``ready``.

    ``as_root``: it may be root, where others perhaps cannot read the program. ``death``: the signal that it
    gets when this process dies.
    """

    def launch(port: int) -> subprocess.Popen[bytes]:
        return _launch(command(port), directory, ready, as_root=as_root, death=death)

    process, port = _start(launch)
    try:
        yield port
    finally:
        _stop(process)


def last_line(text: str) -> str:
    return (text.strip().splitlines() or ["no output"])[-1]


def _start(launch: Callable[[int], subprocess.Popen[bytes]]) -> tuple[subprocess.Popen[bytes], int]:
    reason = ""
    # Another process may take the free port before the server: after an early exit, try another port.
    for _ in range(PORT_TRIES):
        port = free_port()
        try:
            return launch(port), port
        except Exited as error:
            reason = str(error)
    raise Unavailable(reason)


def free_port() -> int:
    """Return a port at which nothing listens, and which no outgoing connection takes."""
    return ports.own().take()


def _launch(
    command: Command, directory: Path, ready: str, *, as_root: bool = False, death: str = "KILL"
) -> subprocess.Popen[bytes]:
    log = directory / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            guarded(command, as_root=as_root, death=death),
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Ctrl-C in the terminal is for the tests, which then stop their servers in order.
            start_new_session=True,
        )
    try:
        _wait(process, log, ready)
    except BaseException:
        _stop(process)
        raise
    return process


def _wait(process: subprocess.Popen[bytes], log: Path, ready: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    # The log is asked, not the port, where after a clash a stranger's server would answer.
    while ready not in (text := log.read_text(errors="replace")):
        if process.poll() is not None:
            raise Exited(f"the server ended at once: {last_line(text)}")
        if time.monotonic() > deadline:
            raise Unavailable(f"the server was not ready after {START_SECONDS:g} s: {last_line(text)}")
        time.sleep(0.02)


def _stop(process: subprocess.Popen[bytes]) -> None:
    # SIGQUIT is the quick end of PostgreSQL and MariaDB alike; their data is temporary.
    process.send_signal(signal.SIGQUIT)
    # One that a test has stopped takes the signal only when it goes on.
    process.send_signal(signal.SIGCONT)
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
