"""Measure HTTP: a relay that drains into a receiver, against a bare loop of the same client.

Both post the same bodies, 100 at once, each in a process of its own and on the same kind of loop, in turns.
The bare loop has no database, signature or limits. It uses ``ClientSession.post``, as in the client's
documentation, while the relay uses the client's connections and parser below that. If the relay is faster,
the difference is the session's work for a request, and the loop does not limit the relay. «CPU» is the CPU of
the process. Judge by it if the machine is busy with other work.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, NamedTuple

import aiohttp

from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, fill, interleave, outbox, run
from benchmarks.process import PATIENCE, SLOWEST, Loop, Work, apart, begin
from benchmarks.receiver import counting_receiver
from relaybox import Destination, Outbox, Route
from relaybox.database.schema import Tables
from relaybox.stores.open import open_postgresql as open_store
from relaybox.stores.store import Want
from relaybox.wire.envelope import packer

AT_ONCE = 100
MOST_ROWS = 10_000
LOOPS: tuple[Loop, ...] = ("uvloop", "asyncio")
BAR = 0.8
SECRET = "whsec_c2VjcmV0c2VjcmV0c2VjcmV0c2Vj"


class Cost(NamedTuple):
    """The cost of a run, in seconds."""

    seconds: float
    cpu: float


async def relayed(url: str, target: str) -> Cost:
    """Drain with a relay."""
    destination = Destination("runner", target, secret=SECRET, allow=["127.0.0.0/8"], concurrency=AT_ONCE)
    relay = Outbox(url, destinations=[destination], routes=[Route("order.*", to="runner")]).relay()
    began, used = begin(), time.process_time()
    await relay.drain()
    return Cost(time.monotonic() - began, time.process_time() - used)


async def bare(bodies: list[bytes], target: str) -> Cost:
    """Post with the client alone."""
    headers = {"content-type": "application/json"}

    async def work() -> None:
        while bodies:
            async with session.post(target, data=bodies.pop(), headers=headers) as response:
                await response.read()
                if response.status != 200:
                    raise AssertionError(f"answered {response.status}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:
        began, used = begin(), time.process_time()
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        return Cost(time.monotonic() - began, time.process_time() - used)


async def made_bodies(url: str, tables: Tables, rows: int) -> list[bytes]:
    """Return what a relay would send of these rows."""
    store = open_store(url, tables)
    deliveries = (await store.claim(Want("runner", "bench", rows, 60))).deliveries
    await store.close()
    return [packer("json")(delivery).body for delivery in deliveries]


async def measure(server_url: str, options: Options) -> Facts:
    """Measure the relay against the bare loop, on each kind of loop."""
    rows = min(options.rows, MOST_ROWS)
    cpu: dict[str, list[float]] = {}
    with counting_receiver() as (target, seen), outbox(server_url) as (url, tables):
        fill(url, rows)
        bodies = await made_bodies(url, tables, rows)

        def taking(name: str, loop: Loop, work: Work, first: Any) -> Take:
            async def take() -> float:
                if work is relayed:
                    run(url, "TRUNCATE outbox_event")
                    fill(url, rows)
                before = seen[0]
                cost = await apart(work, first, target, seconds=PATIENCE + rows / SLOWEST, loop=loop)
                if seen[0] - before != rows:
                    raise RuntimeError(f"{name}: {seen[0] - before} requests for {rows} rows")
                cpu.setdefault(name, []).append(1e6 * cost.cpu / rows)
                return rows / cost.seconds

            return take

        variants: dict[str, Take] = {}
        for loop in LOOPS:
            for kind, work, first in (("relay", relayed, url), ("bare loop", bare, bodies)):
                name = f"{kind} on {loop}"
                variants[name] = taking(name, loop, work, first)
        rates = await interleave(variants, options.rounds, warm_up=0)
    return _found(rows, rates, {name: Sample(values) for name, values in cpu.items()})


def _found(rows: int, rates: dict[str, Sample], cpu: dict[str, Sample]) -> Facts:
    findings = Findings()
    lines = []
    for loop in LOOPS:
        ours, its = f"relay on {loop}", f"bare loop on {loop}"
        ratio, of_cpu = rates[ours].over(rates[its]), cpu[its].over(cpu[ours])
        measured = [sample.show() for sample in (rates[ours], rates[its], cpu[ours], cpu[its])]
        lines.append([loop, *measured, ratio.show(2), of_cpu.show(2)])
        for name in (ours, its):
            findings.figure(name, rates[name])
            findings.figure(f"{name}, CPU µs a request", cpu[name])
        if loop == LOOPS[0]:
            busy = [rates[name].median * cpu[name].median / 1e4 for name in (ours, its)]
            limit = (
                "Python: the relay's process takes {:.0f} % of a core, the bare loop's {:.0f} %; "
                "the relay works below ClientSession, the loop through it"
            )
            wanted = "× a bare loop of aiohttp's ClientSession"
            findings.at_least(f"HTTP, {AT_ONCE} in flight", BAR, wanted, ratio, limit=limit.format(*busy))
    columns = [
        "loop",
        "relay",
        "bare ClientSession.post",
        "relay's CPU µs",
        "its CPU µs",
        "ratio",
        "ratio of CPU",
    ]
    findings.table(f"HTTP drain of {rows:,} rows, {AT_ONCE} at once, requests/s", columns, lines)
    return findings.facts(rows=rows, at_once=AT_ONCE)
