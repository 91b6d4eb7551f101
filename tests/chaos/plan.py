"""What a run is made of: its rows, its processes and their misfortunes. Travels to the processes as JSON."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa
from msgspec import Struct

from relaybox import Destination, Outbox, Route
from relaybox.store import OnFailed, Store, Want
from tests.servers import fresh

DESTINATION = "chaos"
NEVER_FAILED = 10_000


class Plan(Struct, frozen=True):
    """One run. Chances are per claim, except ``retry`` and ``fail``, which are per row."""

    url: str
    logs: str
    seed: int
    bulk: int
    """Rows that are there at the start."""
    emitted: int
    """Rows that are emitted while the workers run."""
    keys: int = 200
    workers: int = 8
    emitters: int = 2
    limit: int = 50
    lease: float = 1.0
    crash: float = 0.02
    crashes_each: int = 3
    zombie: float = 0.02
    release: float = 0.05
    extend: float = 0.05
    retry: float = 0.02
    fail: float = 0.0
    on_failed: OnFailed = "block"
    ordered: bool = True
    """False: the deliberately broken claim, plain SKIP LOCKED, on the same rows."""
    patience: float = 120.0
    """Seconds until a run that has not come to its end is given up."""

    def want(self, owner: str) -> Want:
        """What a worker asks for."""
        return Want(
            DESTINATION,
            owner,
            limit=self.limit,
            lease=self.lease,
            ordered=self.ordered,
            on_failed=self.on_failed,
        )

    def log(self, owner: str) -> Path:
        """The file in which a worker writes what it did."""
        return Path(self.logs) / f"{owner}.jsonl"


def make_outbox(url: str) -> Outbox:
    """An outbox with the one ordered destination of these tests."""
    place = Destination(DESTINATION, "console:", ordered=True, max_attempts=NEVER_FAILED)
    return Outbox(url, destinations=[place], routes=[Route("*", to=DESTINATION)])


def open_store(url: str, outbox: Outbox) -> Store:
    """A store of one connection."""
    match sa.make_url(url):
        case sa.URL(drivername="postgresql"):
            from relaybox.stores import postgres

            return postgres.open_store(url, outbox.tables, connections=1)
        case sa.URL(drivername="mysql"):
            from relaybox.stores import mysql

            return mysql.open_store(url, outbox.tables, connections=1)
        case sa.URL(database=path):
            from relaybox.stores import sqlite

            return sqlite.open_store(path or "", outbox.tables)


def engine(url: str) -> sa.Engine:
    """An engine that keeps no connection."""
    parsed = sa.make_url(url)
    drivers = {"sqlite": "sqlite"} | fresh.DRIVERS
    return sa.create_engine(parsed.set(drivername=drivers[parsed.drivername]), poolclass=sa.NullPool)
