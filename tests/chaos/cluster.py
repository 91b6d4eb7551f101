"""Database servers that can be killed and started again on the same directory, at the same port.

What is committed must outlive the process, though not the machine: commits are written, and not flushed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias, TypeVar

from tests.chaos.faults import Means
from tests.chaos.nursery import Nursery
from tests.servers import base, faketime, fresh, mariadb, pgbouncer, postgres15, postgres18, small_disk

POSTGRES = (
    *("listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=300"),
    *("fsync=off", "full_page_writes=off", "synchronous_commit=on"),
)
MARIADB = (
    *("--bind-address=127.0.0.1", "--skip-name-resolve", "--max-connections=300"),
    *("--character-set-server=utf8mb4", "--innodb-flush-log-at-trx-commit=2", "--skip-innodb-doublewrite"),
)
LISTENING = {"postgresql": "ready to accept connections", "mysql": "ready for connections"}


class File:
    """SQLite: there is no server."""

    kind = "sqlite"

    @contextmanager
    def database(self) -> Iterator[str]:
        """Yield a file that does not exist yet, in memory if possible: these tests cut no power."""
        memory = Path("/dev/shm")
        with TemporaryDirectory(prefix="relaybox-", dir=memory if memory.is_dir() else None) as directory:
            yield f"sqlite:///{directory}/relaybox.db"


class Small:
    kind = "small-disk"

    def __init__(self, disk: small_disk.SmallDisk) -> None:
        self.full = False
        self._disk = disk

    def fill(self) -> None:
        self.full = True
        self._disk.fill()

    def free(self) -> None:
        """Make room again, and start the server if it gave up."""
        self._disk.free()
        self.full = False

    def database(self) -> AbstractContextManager[str]:
        return fresh.database(self._disk.url)


class Cluster:
    """A server with a directory of its own. ``command`` is what is run, without the port."""

    def __init__(self, kind: str, directory: Path, command: base.Command, url: str, port: str) -> None:
        self.kind = kind
        self._directory = directory
        self._command = command
        self._url = url
        self._port_option = port
        self._ready = LISTENING[url.partition(":")[0]]
        self.port = base.free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self._url.format(port=self.port)

    def database(self) -> AbstractContextManager[str]:
        return fresh.database(self.url)

    def start(self) -> None:
        """Run it; returns when it takes connections."""
        # The file of a process that was killed may name a process that is somebody else by now.
        (self._directory / "data" / "postmaster.pid").unlink(missing_ok=True)
        option = self._port_option.format(port=self.port).split()
        self._process = base._launch([*self._command, *option], self._directory, self._ready, death="QUIT")

    def kill(self) -> None:
        """SIGKILL for every process of it; returns when none is left."""
        assert self._process is not None
        self._process.kill()
        while pids := [pid for pid in _working_in(self._directory / "data") if pid != self._process.pid]:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            base._stop(self._process)


Server: TypeAlias = File | Small | Cluster


def _working_in(directory: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if Path(os.readlink(process / "cwd")) == directory:
                found.append(int(process.name))
    return found


@contextmanager
def running(kind: str) -> Iterator[Server]:
    """Run a server of this kind until the block ends; raise ``base.Unavailable`` if it is not installed."""
    if kind == "sqlite":
        yield File()
        return
    if kind == "small-disk":
        with small_disk.server() as disk:
            yield Small(disk)
        return
    with _laid_out(kind) as cluster:
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()


@contextmanager
def _laid_out(kind: str) -> Iterator[Cluster]:
    match kind:
        case "postgresql-18":
            with postgres18._reachable(postgres18._site_packages()) as packages, base.workspace() as home:
                yield _postgres(kind, packages / postgres18.INSTALLATION / "bin", home)
        case "postgresql-15":
            with base.workspace() as home:
                yield _postgres(kind, postgres15.binaries(), home)
        case "mariadb":
            with base.workspace() as home:
                yield _mariadb(home)
        case _:
            raise ValueError(f"no such database: {kind}")


def _postgres(kind: str, binaries: Path, directory: Path) -> Cluster:
    data = directory / "data"
    initdb = ["--username=relaybox", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
    base.prepare([binaries / "initdb", "-D", data, *initdb], directory)
    settings = [word for setting in POSTGRES for word in ("-c", setting)]
    command = [binaries / "postgres", "-D", data, *settings]
    return Cluster(
        kind, directory, command, "postgresql://relaybox:relaybox@127.0.0.1:{port}/postgres", "-p {port}"
    )


def _mariadb(directory: Path) -> Cluster:
    mariadbd, install_db = mariadb.programs()
    data = directory / "data"
    options = ["--no-defaults", "--skip-name-resolve", f"--datadir={data}", f"--tmpdir={directory}"]
    base.prepare([install_db, *options, "--skip-test-db"], directory)
    account = directory / "account.sql"
    account.write_text(
        mariadb.ACCOUNT.replace("CREATE DATABASE", "CREATE DATABASE IF NOT EXISTS").replace(
            "CREATE USER", "CREATE USER IF NOT EXISTS"
        )
    )
    places = [f"--init-file={account}", "--socket=server.sock"]
    command: list[str | Path] = [mariadbd, *options, *places, *MARIADB]
    return Cluster(
        "mariadb", directory, command, "mysql://relaybox:relaybox@127.0.0.1:{port}/relaybox", "--port={port}"
    )


T = TypeVar("T")


@dataclass(frozen=True)
class Ground:
    server: Server
    nursery: Nursery
    clock: faketime.WallClock | None = None
    clocked: Nursery | None = None  # Whose processes live by that clock
    pooler: str | None = None  # A URL by which the server is reached through a transaction pooler

    @property
    def means(self) -> Means:
        return Means(
            server=isinstance(self.server, Cluster),
            listens=self.server.kind.startswith("postgresql"),
            disk=isinstance(self.server, Small),
            clocks=self.clock is not None,
            pooler=self.pooler is not None,
        )


@contextmanager
def prepared(kind: str, *, plain: bool = False, warm: Sequence[str] = ()) -> Iterator[Ground]:
    """Prepare a ground on a database of this kind; ``plain``: without stepping clocks and pooler.

    ``warm``: modules that its processes find imported.
    """
    with ExitStack() as stack:
        server = stack.enter_context(running(kind))
        nursery = stack.enter_context(Nursery(warm=warm))
        if plain:
            yield Ground(server, nursery)
            return
        # Processes that share a file share the machine and its clock: no other clock could be right.
        clock = None if kind == "sqlite" else _wanted(stack, faketime.clock())
        clocked = None if clock is None else stack.enter_context(Nursery(clock.environment))
        pooler = None
        if isinstance(server, Cluster) and kind.startswith("postgresql"):
            pooler = _wanted(stack, pgbouncer.server(server.url))
        yield Ground(server, nursery, clock, clocked, pooler)


def _wanted(stack: ExitStack, means: AbstractContextManager[T]) -> T | None:
    """Enter the context; return None if what it needs is not installed on this machine."""
    try:
        return stack.enter_context(means)
    except base.Unavailable:
        return None
