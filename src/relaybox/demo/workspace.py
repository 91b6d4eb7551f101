"""What the demo's processes share: a database, ports, and journals that survive a killed process."""

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
    """The ``number``-th change of an order, with the shop's own reference."""

    ref: str
    order: int
    number: int
    type: str


class Receipt(Struct, frozen=True):
    """A receiver acknowledged a change; ``at`` is in seconds of the machine's monotonic clock."""

    change: Change
    at: float


class Placed(Struct, frozen=True):
    """A change in the shop's view: committed, or undone by ``rollback`` or ``savepoint``."""

    ref: str
    at: float
    undone: str | None = None


@contextmanager
def _locked(file: int, kind: int) -> Iterator[None]:
    """Lock the file, because some file systems show readers half a write."""
    fcntl.flock(file, kind)
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


class Journal:
    """A file of records, each one write, so that a killed process does not leave half of one."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def write(self, record: Struct | str) -> None:
        """Append a record; after this, only a crash of the machine can lose it."""
        with _locked(self._file, fcntl.LOCK_EX):
            os.write(self._file, json.encode(record) + b"\n")


class Reader(Generic[T]):
    """A reader of a growing journal; ``records`` holds the records so far, in order."""

    def __init__(self, path: Path, kind: type[T]) -> None:
        self.records: list[T] = []
        self._path = path
        self._decoder = json.Decoder(kind)
        self._offset = 0

    def read(self) -> list[T]:
        """Return the records since the last read."""
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
    """The demo's paths and addresses; ``directory`` has journals, logs and the webhooks' secret."""

    directory: str
    database: str
    ports: dict[str, int]
    seconds: float

    def path(self, name: str) -> Path:
        """Return the path of a file of the demo."""
        return Path(self.directory) / name

    def engine(self) -> sa.Engine:
        """Return an engine on the database."""
        return sa.create_engine(sa.make_url(self.database).set(drivername="postgresql+psycopg"))

    def url(self, receiver: str) -> str:
        """Return a receiver's URL."""
        return f"http://127.0.0.1:{self.ports[receiver]}/events"

    def secret(self) -> str:
        """Return the setting of the secret that the relay signs with and the receivers verify with."""
        return f"file:{self.path(SECRET)}"

    def journal(self, owner: str, kind: type[Struct | str]) -> Path:
        """Return the file for records of a kind from the shop or a destination."""
        return self.path(f"{owner}.{kind.__name__}")

    def ready_file(self, pid: int | None) -> Path:
        """Return the file that a process creates when it is ready."""
        return self.path(f"ready.{pid}")

    def ready(self) -> None:
        """Report that this process is ready."""
        self.ready_file(os.getpid()).touch()
