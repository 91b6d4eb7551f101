"""What an event costs PostgreSQL in what can be counted: rows touched, index updates, log written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import psycopg
import pytest
import sqlalchemy as sa

from relaybox.core.outcome import Delivered
from relaybox.database import dialects
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.stores.sql.steps import StoreSteps
from relaybox.stores.store import Settlement, Want
from tests.databases import POSTGRESQL
from tests.integration.filled import create_tables, emit

EVENTS = 1_000


class Touched(NamedTuple):
    """What became of rows of ``outbox_event``, and how they were found."""

    inserted: int
    updated: int
    hot: int
    """Updates that touched no index."""
    deleted: int
    seq_scans: int
    fetched: int
    """Rows that an index led to."""


class Session:
    """One connection on which steps are run, and what they did to the table."""

    def __init__(self, url: str, tables: Tables) -> None:
        self._statements = Statements(tables, dialects.POSTGRESQL, "format")
        self.steps = StoreSteps(self._statements)
        self.connection = psycopg.connect(url, autocommit=True)
        self.connection.adapters.register_loader("jsonb", psycopg.types.string.TextLoader)

    def run(self, steps: Steps[Any]) -> Any:
        """Run the steps in one transaction."""
        with self.connection.transaction():
            self.connection.execute(self._statements("pin_plan").sql)
            try:
                queries = next(steps)
                while True:
                    cursors = [self.connection.execute(*query) for query in queries]
                    queries = steps.send([list(cursor) if cursor.description else [] for cursor in cursors])
            except StopIteration as end:
                return end.value

    def touched(self) -> Touched:
        """Return the rows touched so far on this connection."""
        self.connection.execute("SELECT pg_stat_force_next_flush()")
        query = (
            "SELECT n_tup_ins, n_tup_upd, n_tup_hot_upd, n_tup_del, seq_scan, idx_tup_fetch"
            " FROM pg_stat_user_tables WHERE relname = 'outbox_event'"
        )
        return Touched(*self.connection.execute(query).fetchone() or (0,) * 6)

    def wal(self) -> int:
        """Return the bytes of log that all clients have written so far."""
        query = "SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"
        return int(self.connection.execute(query).fetchone()[0])  # type: ignore[index]


class Meter:
    """What a session did to the table and wrote to the log, from one look to the next."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._touched, self._wal = session.touched(), session.wal()
        self.totals: dict[str, tuple[Touched, int]] = {}

    def read(self, phase: str) -> None:
        """Add what was done since the last time to a phase."""
        touched, wal = self._session.touched(), self._session.wal()
        before, written = self.totals.get(phase, (Touched(0, 0, 0, 0, 0, 0), 0))
        since = zip(before, touched, self._touched, strict=True)
        self.totals[phase] = (
            Touched(*(so_far + now - then for so_far, now, then in since)),
            (written + wal - self._wal),
        )
        self._touched, self._wal = touched, wal


def measure(url: str, want: Want, *, keep: bool) -> dict[str, tuple[Touched, float]]:
    """Deliver ``EVENTS`` events; return rows touched by each phase, and bytes of log for an event."""
    engine, tables = create_tables(url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE outbox_event SET (autovacuum_enabled = off)"))
    emit(engine, tables, EVENTS)
    session = Session(url, tables)
    meter = Meter(session)
    for _ in range(EVENTS // want.limit):
        claim = session.run(session.steps.claim(want))
        meter.read("claim")
        assert len(claim.deliveries) == want.limit
        assert not session.run(session.steps.extend(claim.deliveries, 60.0)).lost
        meter.read("extend")
        settlements = [Settlement(delivery, Delivered(keep=keep)) for delivery in claim.deliveries]
        assert not session.run(session.steps.settle(settlements, "block")).lost
        meter.read("settle")
    session.connection.close()
    return {phase: (touched, wal / EVENTS) for phase, (touched, wal) in meter.totals.items()}


PLAIN = Want("plain", "me", limit=100, suspects=False)
KEYS = Want("keys", "me", limit=100, ordered=True)
# For each event, as measured: rows that an index led to, and bytes of log without full-page images, which
# depend on when the last checkpoint was.
MEASURED = {
    (PLAIN, True): {"claim": (1, 225), "extend": (3, 155), "settle": (1, 434)},
    (PLAIN, False): {"claim": (1, 225), "extend": (3, 155), "settle": (1, 77)},
    (KEYS, True): {"claim": (2.05, 210), "extend": (3, 155), "settle": (1.09, 454)},
    (KEYS, False): {"claim": (2.05, 210), "extend": (3, 155), "settle": (1.09, 96)},
}


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "deleted"])
@pytest.mark.parametrize("want", [PLAIN, KEYS], ids=["unordered", "ordered"])
@pytest.mark.parametrize("kind", POSTGRESQL)
def test_what_an_event_does_to_the_table_and_the_log(
    kind: str,
    want: Want,
    keep: bool,
    fresh_database: Callable[[str], str],
    record_property: Callable[[str, object], None],
) -> None:
    phases = measure(fresh_database(kind), want, keep=keep)
    for phase, (touched, wal) in phases.items():
        record_property(phase, [*touched, wal])
        fetched, logged = MEASURED[want, keep][phase]
        assert wal <= 1.15 * logged + 2, f"{phase}: {wal:.0f} bytes of log an event; they were {logged}"
        rows = touched.fetched / EVENTS
        assert rows <= 1.15 * fetched, f"{phase}: {rows} rows looked at for an event; they were {fetched}"
        assert touched.seq_scans == touched.inserted == 0
    (claim, _), (extend, _), (settle, _) = phases.values()
    for leasing in (claim, extend):
        assert (leasing.updated, leasing.hot, leasing.deleted) == (EVENTS, EVENTS, 0), "all of them HOT"
    assert (settle.updated, settle.deleted) == ((EVENTS, 0) if keep else (0, EVENTS))
