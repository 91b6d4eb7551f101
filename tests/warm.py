"""Run `relaybox` in processes of their own that cost milliseconds.

Most of what a command takes is imports. A warm interpreter has made them, and forks for each command: a
process with its own directory, environment, signals and exit status, as users have it.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from tests.servers import base

ROOT = Path(__file__).parents[1]
MODULES = (
    *("relaybox.__main__", "relaybox.cli.application", "relaybox.demo", "relaybox.operate.doctor"),
    *("relaybox.search", "relaybox.relay.relay", "relaybox.sinks.http.sink"),
    *(
        "relaybox.database.pools.postgresql",
        "relaybox.database.pools.mysql",
        "relaybox.database.pools.sqlite",
    ),
    *("aiohttp", "aiosqlite", "asyncmy", "psycopg", "rich.table", "uvloop"),
)
_LARGEST = 1 << 20
_one_at_a_time = threading.Lock()


class Process:
    """A command that runs, with the part of ``subprocess.Popen`` that tests use."""

    def __init__(self, pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status

    def poll(self) -> int | None:
        """Return the exit status, or None while it runs."""
        return self._wait(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status when it has ended; negative if a signal ended it."""
        found = self._wait(timeout)
        if found is None:
            raise subprocess.TimeoutExpired("relaybox", timeout or 0)
        return found

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _wait(self, seconds: float | None) -> int | None:
        if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
            self.returncode = int(os.read(self._status, 16) or -signal.SIGKILL)
            os.close(self._status)
        return self.returncode


def run(arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command to its end and return its status and what it printed."""
    with (cwd / ".stdout").open("w+b") as out, (cwd / ".stderr").open("w+b") as err:
        process = start(arguments, cwd, env, out.fileno(), err.fileno())
        try:
            code = process.wait()
        except BaseException:
            # Ctrl-C, or the time limit of a test.
            process.kill()
            process.wait()
            raise
        printed = [
            os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode() for file in (out, err)
        ]
    for name in (".stdout", ".stderr"):
        (cwd / name).unlink()
    return subprocess.CompletedProcess(arguments, code, *printed)


def start(arguments: Sequence[str], cwd: Path, env: Mapping[str, str], out: int, err: int) -> Process:
    """Start a command that writes to these descriptors."""
    status, theirs = os.pipe()
    request = json.dumps({"arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}).encode()
    # The answers to two threads could change places.
    with _one_at_a_time:
        server, _ = _server(os.getpid())
        try:
            socket.send_fds(server, [request], [out, err, theirs])
            os.close(theirs)
            return Process(int(server.recv(16)), status)
        except BaseException:
            # Its answer would be taken for that to the next request.
            _server.cache_clear()
            server.close()
            raise


@cache
def _server(_owner: int) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Return this process's warm interpreter and the socket to it; it ends together with this process."""
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (mine, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LARGEST)
    code = f"from tests.warm import serve; serve({theirs.fileno()})"
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, pass_fds=[theirs.fileno()], start_new_session=True
    )
    theirs.close()
    atexit.register(_end, mine, process)
    return mine, process


def _end(server: socket.socket, process: subprocess.Popen[bytes]) -> None:
    server.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(10)
    process.kill()
    process.wait()


def serve(descriptor: int) -> None:
    """Fork for each request, and report each exit status; a forked process returns from here to its end."""
    me = os.getpid()
    for module in MODULES:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    requests = socket.socket(fileno=descriptor)
    running: dict[int, int] = {}
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([requests, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _report(running)
        if requests in ready:
            request, descriptors, _, _ = socket.recv_fds(requests, _LARGEST, 3)
            if not request:
                return
            out, err, status = descriptors
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for other in (descriptor, ended, wake, status, *running.values()):
                    os.close(other)
                requests.detach()
                _become(me, out, err, **json.loads(request))
                return
            os.close(out)
            os.close(err)
            running[pid] = status
            requests.send(str(pid).encode())


def _report(running: dict[int, int]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        descriptor = running.pop(pid)
        os.write(descriptor, str(os.waitstatus_to_exitcode(status)).encode())
        os.close(descriptor)


def _become(parent: int, out: int, err: int, arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    base.die_with_parent(parent)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for target, source in enumerate((nothing, out, err)):
        os.dup2(source, target)
        os.close(source)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path[:1] = [cwd, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = ["relaybox", *arguments]
    del sys.modules["relaybox.__main__"]
    runpy.run_module("relaybox", run_name="__main__", alter_sys=True)
