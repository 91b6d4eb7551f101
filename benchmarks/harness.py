"""What the benchmarks share: a server with tables, variants taken in turns, a table and a line of JSON.

Variants take turns within seconds on the same data, so that a noisy machine disturbs all of them alike, and
what is compared is the ratio of neighbours. Medians and quartiles are reported.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import psycopg
import sqlalchemy as sa

from relaybox.schema import Tables, make_tables
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
        """The middle one."""
        return statistics.median(self.values)

    @property
    def quartiles(self) -> tuple[float, float]:
        """What half of them lie between."""
        if len(self.values) < 2:
            return self.values[0], self.values[0]
        low, _, high = statistics.quantiles(self.values, n=4, method="inclusive")
        return low, high

    def over(self, other: Sample) -> Sample:
        """The ratios of neighbours."""
        return Sample([mine / its for mine, its in zip(self.values, other.values, strict=True)])

    def show(self, digits: int = 0) -> str:
        """The median and the quartiles."""
        low, high = self.quartiles
        return f"{self.median:,.{digits}f} ({low:,.{digits}f}–{high:,.{digits}f})"


@contextmanager
def server(version: str = "18") -> Iterator[str]:
    """The URL of a PostgreSQL that writes durably."""
    with SERVERS[version].server(durable=True) as url:
        yield url


@contextmanager
def outbox(server_url: str) -> Iterator[tuple[str, Tables]]:
    """The URL of a new database on the server, and the tables in it."""
    with fresh.database(server_url) as url:
        engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
        metadata = sa.MetaData()
        tables = make_tables(metadata)
        metadata.create_all(engine)
        engine.dispose()
        yield url, tables


FILL = """
INSERT INTO outbox_event (id, event_id, destination, aggregate_type, aggregate_id, event_type, payload,
                          headers, ordering_key, idempotency_key)
SELECT gen_random_uuid(), gen_random_uuid(), %(destination)s, 'Order', n::text, 'order.paid', %(payload)s,
       '{}',
       CASE WHEN n %% 100 < %(hot)s THEN 'hot' ELSE 'Order:' || n %% nullif(%(keys)s, 0) END, n::text
FROM generate_series(0, %(rows)s - 1) AS n"""


def fill(url: str, rows: int, *, destination: str = "runner", keys: int = 0, hot: int = 0) -> None:
    """Insert due rows, with ``keys`` ordered by that many keys in turns; ``hot`` per cent are of one more."""
    values = {"rows": rows, "keys": keys, "hot": hot, "destination": destination}
    run(url, FILL, values | {"payload": json.dumps(PAYLOAD)})
    run(url, "VACUUM ANALYZE outbox_event")
    run(url, "CHECKPOINT")


def run(url: str, sql: str, values: Mapping[str, Any] | None = None) -> None:
    """Execute one statement by itself."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(sql, values)


async def interleave(variants: Mapping[str, Take], rounds: int, *, warm_up: int = 1) -> dict[str, Sample]:
    """Let the variants take turns, each round beginning with another one; what they return is kept."""
    taken: dict[str, list[float]] = {name: [] for name in variants}
    for name in _turns(list(variants), warm_up + rounds):
        taken[name].append(await variants[name]())
    return {name: Sample(values[warm_up:]) for name, values in taken.items()}


def take_turns(
    variants: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: int = 1
) -> dict[str, Sample]:
    """``interleave``, for what is not to run in a loop."""
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
