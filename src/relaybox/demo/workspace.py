"""What the processes of the demo share: a database, ports, and a directory with their journals.

A process writes what it saw to a journal of its own, which keeps it even if the process is killed the moment
after.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Generic, TypeVar

import sqlalchemy as sa
from msgspec import Struct, json

HANDLER, WEBHOOK, FLAKY = DESTINATIONS = ("handler", "webhook", "flaky")
RECEIVERS = (WEBHOOK, FLAKY)

SECRET = "secret"

T = TypeVar("T")


class Change(Struct, frozen=True):
    """One step in the life of an order: the ``number``-th of its order, by the shop's own reference."""

    ref: str
    order: int
    number: int
    type: str


class Receipt(Struct, frozen=True):
    """A receiver acknowledged a change; moments are of the machine's monotonic clock, in seconds."""

    change: Change
    at: float


class Placed(Struct, frozen=True):
    """What the shop believes of a change: it was committed, or undone by ``rollback`` or ``savepoint``."""

    ref: str
    at: float
    undone: str | None = None


class Fault(Struct, frozen=True):
    """A receiver did not acknowledge: ``kind`` says how it refused."""

    kind: str
    at: float


@contextmanager
def _locked(file: int, kind: int) -> Iterator[None]:
    """Lock the file: not every file system shows a write to its readers as a whole."""
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


class Journal:
    """Append records to a file: each is one write, so that a killed process does not leave half of one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, record: Struct) -> None:
        """Append a record; when this returns, only the machine itself can lose it."""
        with _locked(self._file, fcntl.LOCK_EX):
            os.write(self._file, json.encode(record) + b"\n")


class Reader(Generic[T]):
    """Read a journal while it grows. ``records`` are those found so far, in the order of writing."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self.records: list[T] = []
        self._path = path
        self._decoder = json.Decoder(kind)
        self._offset = 0

    def read(self) -> list[T]:
        """Return the records that came since the last time."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file, _locked(file.fileno(), fcntl.LOCK_SH):
            file.seek(self._offset)
            text = file.read()
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        fresh = [self._decoder.decode(line) for line in whole.splitlines()]
        self.records += fresh
        return fresh


class Workspace(Struct, frozen=True):
    """Where everything is: ``directory`` has the journals, the logs and the webhooks' secret."""

    directory: str
    database: str
    ports: dict[str, int]
    seconds: float

    def path(self, name: str) -> Path:
        """Return a file of the demo."""
        return Path(self.directory) / name

    def engine(self) -> sa.Engine:
        """Return an engine on the database."""
        return sa.create_engine(sa.make_url(self.database).set(drivername="postgresql+psycopg"))

    def url(self, receiver: str) -> str:
        """Return where a receiver takes events."""
        return f"http://127.0.0.1:{self.ports[receiver]}/events"

    def secret(self) -> str:
        """Return what the relay signs with and the receivers verify with."""
        return self.path(SECRET).read_text()

    def journal(self, owner: str, kind: type[Struct]) -> Path:
        """Return the file in which the shop or a destination writes records of a kind."""
        return self.path(f"{owner}.{kind.__name__}")

    def ready_file(self, pid: int) -> Path:
        """Return the file that a process makes when it is at work."""
        return self.path(f"ready.{pid}")

    def ready(self) -> None:
        """Say that this process is at work."""
        self.ready_file(os.getpid()).touch()
