"""PostgreSQL 18 on a disk of its own, small enough to be filled: a tmpfs, which only root can mount."""

from __future__ import annotations

import errno
import os
import pwd
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.servers import base, postgres18

MEGABYTES = 80
SETTINGS = (
    *("listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=50", "shared_buffers=16MB"),
    # Commits are written, and the log is kept so short that a full disk is felt by it soon.
    *("fsync=off", "max_wal_size=4MB", "min_wal_size=2MB"),
)
READY = "ready to accept connections"


class SmallDisk:
    """A server that can be started again after it gave up, and the disk below it."""

    def __init__(self, binaries: Path, directory: Path, disk: Path) -> None:
        self._directory = directory
        self._disk = disk
        self._port = base.free_port()
        data, initdb = (
            disk / "data",
            ["--username=relaybox", "--auth=trust", "--encoding=UTF8", "--no-locale"],
        )
        base.prepare([binaries / "initdb", "-D", data, *initdb, "--no-sync", "--wal-segsize=1"], directory)
        options = [word for setting in SETTINGS for word in ("-c", setting)]
        self._command: base.Command = [binaries / "postgres", "-D", data, "-p", str(self._port), *options]
        self._process = self._launch()

    @property
    def url(self) -> str:
        """Return the URL of the server's own database."""
        return f"postgresql://relaybox:relaybox@127.0.0.1:{self._port}/postgres"

    def fill(self) -> None:
        """Leave no room at all."""
        with (self._disk / "ballast").open("wb") as ballast:
            # The server writes meanwhile: the rest is taken by the page, until nothing is left.
            for piece in (1 << 20, 1 << 12):
                while _grow(ballast.fileno(), piece):
                    pass

    def free(self) -> bool:
        """Make room again, and start the server if it has given up; whether it had."""
        (self._disk / "ballast").unlink()
        gave_up = self.gave_up()
        if gave_up:
            self._process = self._launch()
        return gave_up

    def gave_up(self) -> bool:
        """True if the server has ended by itself."""
        return self._process.poll() is not None

    def stop(self) -> None:
        """End the server."""
        base._stop(self._process)

    def _launch(self) -> subprocess.Popen[bytes]:
        return base._launch(self._command, self._directory, READY, death="QUIT")


def _grow(file: int, piece: int) -> bool:
    """Make a file larger; whether there was room for it."""
    try:
        os.posix_fallocate(file, os.fstat(file).st_size, piece)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


@contextmanager
def server() -> Iterator[SmallDisk]:
    """Yield a new server with room."""
    with (
        postgres18._reachable(postgres18._site_packages()) as packages,
        base.workspace() as directory,
        _mounted(directory / "disk") as disk,
    ):
        made = SmallDisk(packages / postgres18.INSTALLATION / "bin", directory, disk)
        try:
            yield made
        finally:
            made.stop()


@contextmanager
def _mounted(place: Path) -> Iterator[Path]:
    if os.geteuid() != 0:
        raise base.Unavailable("only root can mount a small disk")
    place.mkdir()
    user = pwd.getpwnam("nobody")
    options = f"size={MEGABYTES}m,mode=700,uid={user.pw_uid},gid={user.pw_gid}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "relaybox", place], capture_output=True, text=True
    )
    if done.returncode:
        raise base.Unavailable(f"a small disk cannot be mounted: {base.last_line(done.stderr)}")
    try:
        yield place
    finally:
        # Lazily: a process of the server may take a moment to end.
        subprocess.run(["umount", "--lazy", place], check=True)
