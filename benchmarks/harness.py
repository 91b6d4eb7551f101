"""Shared parts of the benchmarks: a server with tables, variants in turns, a table and a line of JSON.

Variants take turns within seconds on the same data, so that a noisy machine disturbs all of them equally. The
comparison is the ratio of neighbours. Medians and quartiles are reported.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psycopg
import sqlalchemy as sa

from relaybox.database.schema import Tables, make_tables
from tests.servers import fresh, postgres15, postgres18

Take: TypeAlias = Callable[[], Awaitable[float]]

SERVERS = {"18": postgres18, "15": postgres15}
PAYLOAD = {"note": "x" * 286}
"""300 bytes as JSON."""


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurements of one variant."""

    values: Sequence[float]

    @property
    def median(self) -> float:
        """Return the median."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Return the quartiles."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def over(self, other: Sample) -> Sample:
        """Return the ratios of neighbours."""
        return Sample([mine / its for mine, its in zip(self.values, other.values, strict=True)])

    def show(self, digits: int = 0) -> str:
        """Return the median and the quartiles as text."""
        low, high = self.quartiles
        return f"{self.median:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


@contextmanager
def server(version: str = "18") -> Iterator[str]:
    """Yield the URL of a PostgreSQL that writes durably."""
    with SERVERS[version].server(durable=True) as url:
        yield url


@contextmanager
def outbox(server_url: str) -> Iterator[tuple[str, Tables]]:
    """Return the URL of a new database on the server, with the tables in it."""
    with fresh.database(server_url) as url:
        engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
        metadata = sa.MetaData()
        tables = make_tables(metadata)
        metadata.create_all(engine)
        engine.dispose()
        yield url, tables


UUID7 = """
CREATE FUNCTION pg_temp.uuidv7() RETURNS uuid LANGUAGE sql VOLATILE AS $$
    SELECT CAST(lpad(to_hex(now.us / 1000), 12, '0') || '7' || lpad(to_hex(now.us % 1000 * 4), 3, '0')
                || substr(CAST(gen_random_uuid() AS text), 20) AS uuid)
    FROM (SELECT CAST(extract(epoch FROM clock_timestamp()) * 1000000 AS bigint) AS us OFFSET 0) AS now
$$"""
"""The function ``uuidv7``, which PostgreSQL has since version 18."""
INSERT = """
WITH line AS (
    SELECT n, at, destination
    FROM generate_series(%(first)s::int, %(first)s::int + %(rows)s::int - 1) AS n
    CROSS JOIN unnest(%(destinations)s::text[]) WITH ORDINALITY AS goes (destination, at)
    ORDER BY n, at OFFSET 0
), new AS MATERIALIZED (SELECT n, at, destination, {uuid7} AS id FROM line)
INSERT INTO outbox_event (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload,
                          headers, ordering_key, idempotency_key)
SELECT id, event_id, destination, 'Order', n::text, 'order.paid', %(payload)s,
       CASE WHEN %(traced)s::int IS NULL THEN '{{}}' ELSE jsonb_build_object('traceparent',
           format('00-%%s-%%s-0%%s', md5(n::text), left(md5(n::text), 16), (n %% 100 < %(traced)s)::int)) END,
       CASE WHEN n %% 100 < %(hot)s THEN 'hot' ELSE 'Order:' || n %% nullif(%(keys)s, 0) END, event_id::text
FROM (SELECT *, first_value(id) OVER (PARTITION BY n ORDER BY at) AS event_id FROM new) AS event
ORDER BY event.n, event.at"""


def insert(
    url: str,
    events: int,
    *,
    destinations: Sequence[str] = ("runner",),
    keys: int = 0,
    hot: int = 0,
    first: int = 0,
    payload: Mapping[str, Any] = PAYLOAD,
    traced: int | None = None,
) -> None:
    """Insert due rows with ids as emit makes them, those of an event one after the other.

    With ``keys`` they are ordered, by that many keys in turns; ``hot`` per cent belong to one more key. With
    ``traced`` each has a trace context, which is sampled in that many per cent of them.
    """
    values = {"rows": events, "keys": keys, "hot": hot, "destinations": list(destinations), "first": first}
    values["traced"] = traced
    with psycopg.connect(url) as connection:
        built_in = connection.info.server_version >= 180000
        if not built_in:
            connection.execute(UUID7)
        sql = INSERT.format(uuid7="uuidv7()" if built_in else "pg_temp.uuidv7()")
        connection.execute(sql, values | {"payload": json.dumps(payload)})


def fill(url: str, rows: int, *, destination: str = "runner", keys: int = 0, hot: int = 0) -> None:
    """Call ``insert`` for one destination, and ``settle_down``."""
    insert(url, rows, destinations=[destination], keys=keys, hot=hot)
    settle_down(url)


def settle_down(url: str) -> None:
    """Do now what autovacuum and the checkpointer would do later, during a measurement."""
    run(url, "VACUUM ANALYZE outbox_event")
    run(url, "CHECKPOINT")


def ask(url: str, sql: str, values: Mapping[str, Any] | None = None) -> Any:
    """Return the first row of a query's answer."""
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(sql, values).fetchone()


def run(url: str, sql: str, values: Mapping[str, Any] | None = None) -> None:
    """Execute one statement by itself."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql, values)


def server_cpu(url: str) -> float:
    """Return the seconds of CPU of all the server's processes, ended ones included.

    Return 0 if the server does not run on this machine.
    """
    with psycopg.connect(url) as connection:
        backend = _times(connection.info.backend_pid)
    if backend is None or (postmaster := _times(backend.parent)) is None:
        return 0.0
    every = [_times(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    own = sum(times.own for times in every if times is not None and times.parent == backend.parent)
    return own + postmaster.of_ended


class _Times(NamedTuple):
    parent: int
    own: float
    of_ended: float


def _times(process: int) -> _Times | None:
    try:
        # The program's name, which comes before the figures, may contain anything.
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system, users, systems = (int(ticks) / os.sysconf("SC_CLK_TCK") for ticks in fields[11:15])
    return _Times(int(fields[1]), user + system, users + systems)


async def interleave(variants: Mapping[str, Take], rounds: int, *, warm_up: int = 1) -> dict[str, Sample]:
    """Let the variants take turns, each round starting with another one; keep what they return."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for name in _turns(list(variants), warm_up + rounds):
        taken[name].append(await variants[name]())
    return {name: Sample(values[warm_up:]) for name, values in taken.items()}


def take_turns(
    variants: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1
) -> dict[str, Sample]:
    """Run ``interleave`` for work that cannot run in an event loop."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for name in _turns(list(variants), warm_up + rounds):
        taken[name].append(variants[name]())
    return {name: Sample(values[warm_up:]) for name, values in taken.items()}


def _turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    for turn in range(rounds):
        first = turn % len(names)
        yield from (*names[first:], *names[:first])


def report(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], facts: Mapping[str, Any]
) -> None:
    """Print an aligned table, and the same facts as one line of JSON."""
    lines = [columns, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(columns))]
    print(f"\n{title}")
    for line in lines:
        first, *rest = [
            cell.ljust(width) if not at else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  ".join([first, *rest]))
    print(json.dumps({"benchmark": title, **facts}), flush=True)
