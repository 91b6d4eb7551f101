"""HTTP: a relay that drains into a receiver, against a bare loop of the same client.

Both post the same bodies, 100 at once, each in a process of its own and on the same kind of loop, in turns.
The bare loop has no database, no signature, no limits: what the relay takes beyond it is all that it does for
an event. «CPU» is what the process took, and is what to judge by where the machine is busy with other things.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import multiprocessing
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, Protocol, TypeAlias

import aiohttp

from benchmarks.harness import Sample, Take, fill, interleave, outbox, report, run
from benchmarks.receiver import counting_receiver
from relaybox import Destination, Outbox, Route
from relaybox.envelope import packer
from relaybox.schema import Tables
from relaybox.store import Want
from relaybox.stores.postgres import open_store

AT_ONCE = 100
MOST_ROWS = 20_000
SECRET = "whsec_c2VjcmV0c2VjcmV0c2VjcmV0c2Vj"


Work: TypeAlias = Callable[..., Coroutine[Any, Any, "Cost"]]


class Options(Protocol):
    """What the caller says about the run."""

    rows: int
    rounds: int


class Cost(NamedTuple):
    """What a run took, in seconds."""

    seconds: float
    cpu: float


async def relayed(url: str, target: str) -> Cost:
    """A relay that drains what there is."""
    destination = Destination("runner", target, secret=SECRET, allow=["127.0.0.0/8"], concurrency=AT_ONCE)
    relay = Outbox(url, destinations=[destination], routes=[Route("order.*", to="runner")]).relay()
    begin, used = time.perf_counter(), time.process_time()
    await relay.drain()
    return Cost(time.perf_counter() - begin, time.process_time() - used)


async def bare(bodies: list[bytes], target: str) -> Cost:
    """The client by itself."""
    headers = {"content-type": "application/json"}

    async def work() -> None:
        while bodies:
            async with session.post(target, data=bodies.pop(), headers=headers) as response:
                await response.read()
                if response.status != 200:
                    raise AssertionError(f"answered {response.status}")

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=AT_ONCE)) as session:
        begin, used = time.perf_counter(), time.process_time()
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        return Cost(time.perf_counter() - begin, time.process_time() - used)


async def made_bodies(url: str, tables: Tables, rows: int) -> list[bytes]:
    """What a relay would send of the rows that there are."""
    store = open_store(url, tables)
    deliveries = (await store.claim(Want("runner", "bench", rows, 60))).deliveries
    await store.close()
    return [packer("json")(delivery).body for delivery in deliveries]


def _main(answer: Any, loop: str, work: Work, *arguments: Any) -> None:
    factory = importlib.import_module(loop).new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        answer.send(runner.run(work(*arguments)))


def in_process(loop: str, work: Work, *arguments: Any) -> Cost:
    """``work`` on this kind of loop in a process of its own."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe(duplex=False)
    process = context.Process(target=_main, args=(its, loop, work, *arguments))
    process.start()
    its.close()
    try:
        cost: Cost = mine.recv()
    finally:
        process.join()
    return cost


async def measure(server_url: str, options: Options) -> dict[str, Any]:
    """The relay against the bare loop, on each kind of loop that is installed."""
    rows = min(options.rows, MOST_ROWS)
    loops = [loop for loop in ("asyncio", "uvloop") if importlib.util.find_spec(loop)]
    cpu: dict[str, list[float]] = {}
    with counting_receiver() as (target, seen), outbox(server_url) as (url, tables):
        fill(url, rows)
        bodies = await made_bodies(url, tables, rows)

        def taking(name: str, loop: str, work: Work, first: Any) -> Take:
            async def take() -> float:
                if work is relayed:
                    run(url, "TRUNCATE outbox_event")
                    fill(url, rows)
                before = seen[0]
                cost = await asyncio.to_thread(in_process, loop, work, first, target)
                if seen[0] - before != rows:
                    raise AssertionError(f"{name}: {seen[0] - before} requests for {rows} rows")
                cpu.setdefault(name, []).append(1e6 * cost.cpu / rows)
                return rows / cost.seconds

            return take

        variants: dict[str, Take] = {}
        for loop in loops:
            for kind, work, first in (("relay", relayed, url), ("bare", bare, bodies)):
                name = f"{kind} on {loop}"
                variants[name] = taking(name, loop, work, first)
        rates = await interleave(variants, options.rounds)
    # The first of each only warms up.
    costs = {name: Sample(values[1:]) for name, values in cpu.items()}
    return _reported(rows, loops, rates, costs)


def _reported(
    rows: int, loops: list[str], rates: dict[str, Sample], cpu: dict[str, Sample]
) -> dict[str, Any]:
    lines, facts = [], {}
    for loop in loops:
        ours, its = f"relay on {loop}", f"bare on {loop}"
        ratio, of_cpu = rates[ours].over(rates[its]), cpu[its].over(cpu[ours])
        measured = [sample.show() for sample in (rates[ours], rates[its], cpu[ours], cpu[its])]
        lines.append([loop, *measured, ratio.show(2), of_cpu.show(2)])
        facts[loop] = {
            "relay": rates[ours].median, "bare": rates[its].median, "ratio": ratio.median,
            "relay_cpu_us": cpu[ours].median, "bare_cpu_us": cpu[its].median, "cpu_ratio": of_cpu.median,
        }  # fmt: skip
    title = f"HTTP drain of {rows:,} rows, {AT_ONCE} at once, requests/s"
    columns = ["", "relay", "bare loop", "relay's CPU µs", "its CPU µs", "ratio", "ratio of CPU"]
    report(title, columns, lines, facts)
    return {"at_once": AT_ONCE, "rows": rows, **facts}
