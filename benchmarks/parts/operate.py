"""Measure pages, API and metrics with many rows: their time seen by a client, and their round trips.

``relaybox web`` runs as a process of its own. The queries of a request are counted in this process, on the
same application, with few rows and with many.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import aiohttp
from starlette.testclient import TestClient

from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, ask, interleave, outbox
from benchmarks.many import fill_week, refill
from relaybox import Destination, Outbox
from relaybox.database.pools.postgresql import Psycopg
from relaybox.web import dashboard
from tests.trips import counted
from tests.web.stage import OPERATOR, USERS

ROWS = 5_000_000
FEW = 10_000
ROUNDS = 9
ALLOWED_MS = 300.0
SCRAPE_MS = 100.0
METRICS = "/metrics"
LINE = "relaybox web: "
HTML = {"accept": "text/html"}
JSON = {"accept": "application/json"}
PAGES = (
    "/", "/?period=24h", "/?period=7d", "/destinations", "/destinations/billing", "/events",
    "/events?status=failed", "/events?status=failed&destination=billing", "/events?destination=legacy",
    "/events?status=discarded", "/events?error=order+17", "/events/{id}", "/failures",
    "/failures?destination=billing", "/dead-letters", "/operations", "/relays", "/audit", "/system",
    "/actions/confirm?action=retry&status=failed",
)  # fmt: skip
API = (
    "/api/stats", "/api/series?hours=168", "/api/relays", "/api/events?status=failed&limit=50",
    "/api/events?aggregate_type=Order&aggregate_id=17", "/api/events/{id}", "/api/events/{id}/why",
    "/api/failures", "/api/dead-letters", "/api/operations", "/api/destinations", "/api/audit", "/readyz",
    METRICS,
)  # fmt: skip


async def measure(server_url: str, options: Options) -> Facts:
    """Measure every page and every query of the API."""
    rows = options.size(ROWS, 5_000)
    with outbox(server_url) as (url, _):
        fill_week(url)
        refill(url, options.size(FEW, 500))
        few = await asyncio.to_thread(_count_trips, url)
        refill(url, rows)
        many = await asyncio.to_thread(_count_trips, url)
        times = await _times(url)
    return _judge(rows, few, many, times)


def _judge(rows: int, few: Mapping[str, int], many: Mapping[str, int], times: Mapping[str, Sample]) -> Facts:
    findings = Findings()
    lines = [[path, times[path].show(1), str(few[path]), str(many[path])] for path in times]
    columns = ["", "ms", "round trips, few rows", "many rows"]
    findings.table(f"in front of {rows:,} rows", columns, lines)
    slowest = max((path for path in times if path != METRICS), key=lambda path: times[path].median)
    findings.at_most(f"the slowest page or call: {slowest}", ALLOWED_MS, "ms", times[slowest], digits=0)
    findings.at_most("a scrape of the metrics", SCRAPE_MS, "ms", times[METRICS], digits=0)
    growing = [path for path in times if many[path] > few[path]]
    measured = ", ".join(growing) or "none"
    findings.judge("pages and calls whose round trips grow", "none", measured, not growing)
    return findings.facts(rows=rows)


def _outbox(url: str) -> Outbox:
    names = ("runner", "billing", "search")
    return Outbox(url, destinations=[Destination(name, "http://127.0.0.1:9/") for name in names])


def _paths(url: str) -> dict[str, str]:
    [found] = ask(url, "SELECT id FROM outbox_event WHERE status = 'failed' ORDER BY id DESC LIMIT 1")
    return {path: path.replace("{id}", str(found)) for path in (*PAGES, *API)}


def _headers(path: str) -> dict[str, str]:
    return {**(HTML if path in PAGES else JSON), "authorization": f"Bearer {OPERATOR}"}


def _count_trips(url: str) -> dict[str, int]:
    counts = {}
    with (
        counted(Psycopg) as trips,
        TestClient(dashboard(_outbox(url), users=USERS)) as client,
    ):
        for path, address in _paths(url).items():
            trips.clear()
            answer = client.get(address, headers=_headers(path))
            _check(path, answer.status_code)
            counts[path] = len(trips)
    return counts


async def _times(url: str) -> dict[str, Sample]:
    async with _served(url) as address, aiohttp.ClientSession(address) as session:
        takes = {path: partial(_ask, session, path, there) for path, there in _paths(url).items()}
        return await interleave(takes, ROUNDS)


async def _ask(session: aiohttp.ClientSession, path: str, address: str) -> float:
    """Return the milliseconds from the request to the whole answer."""
    began = time.perf_counter()
    async with session.get(address, headers=_headers(path)) as answer:
        await answer.read()
    _check(path, answer.status)
    return (time.perf_counter() - began) * 1000


def _check(path: str, status: int) -> None:
    # Whether a backlog without a relay is ready does not matter here.
    if status != 200 and (path, status) != ("/readyz", 503):
        raise RuntimeError(f"{path} answered {status}")


@asynccontextmanager
async def _served(url: str) -> AsyncIterator[str]:
    """Yield the address of a ``relaybox web``."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "relaybox.toml"
        names = [one.name for one in _outbox(url).settings.destinations]
        destinations = "".join(f'[destinations.{name}]\nsink = "http://127.0.0.1:9/"\n' for name in names)
        users = f'[web.users.ann]\ntoken = "{OPERATOR}"\nrole = "operator"\n'
        file.write_text(f'[relaybox]\ndatabase = "{url}"\n{destinations}{users}')
        command = [sys.executable, "-m", "relaybox", "--config", str(file), "web", "--port", "0"]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert process.stdout is not None
            async with asyncio.timeout(30):
                said = (await process.stdout.readline()).decode()
            yield said.removeprefix(LINE).strip()
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()
