"""The relay: how fast it drains, how soon after the commit a handler runs, and how much memory it takes.

Requirements: an unordered drain is no slower than txoutbox in its best configuration, the 99th percentile of
the latency at 200 events a second is at most 50 ms, HTTP reaches 0.6 of a bare aiohttp loop that posts the
same bodies, and with a backlog of a million rows the process stays below 200 MB.
``python -m benchmarks.relay``
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import aiohttp
import psycopg

from benchmarks.harness import PAYLOAD, Take, fill, interleave, outbox, report, run, server
from benchmarks.peers import best_txoutbox
from benchmarks.receiver import receiver
from relaybox import Destination, Event, Outbox, Route
from relaybox.envelope import packer
from relaybox.store import Want
from relaybox.stores.postgres import open_store
from tests.servers import fresh

KEYS = 1000
POSTS_AT_ONCE = 50


def no_op(url: str, *, ordered: bool) -> Outbox:
    """An outbox whose only destination is a function that does nothing."""
    outbox = Outbox(url)

    @outbox.handler("order.*", name="runner", ordered=ordered)
    async def handler(event: Event) -> None:
        pass

    return outbox


def draining(url: str, rows: int, *, ordered: bool) -> Take:
    """Events a second of a relay that drains ``rows`` into a handler."""

    async def take() -> float:
        run(url, "TRUNCATE outbox_event")
        fill(url, rows, keys=KEYS if ordered else 0)
        relay = no_op(url, ordered=ordered).relay()
        begin = time.perf_counter()
        await relay.drain()
        return rows / (time.perf_counter() - begin)

    return take


async def drain(server_url: str, rows: int, rounds: int) -> None:
    """Ours against txoutbox, ordered and not."""
    lines, facts = [], {}
    for ordered in (False, True):
        name = "ordered" if ordered else "unordered"
        keys = KEYS if ordered else 0
        with outbox(server_url) as (url, _), fresh.database(server_url) as peer_url:
            peer = await best_txoutbox(peer_url, ordered=ordered, keys=keys)

            async def drain_peer(peer: Any = peer, url: str = peer_url, keys: int = keys) -> float:
                return await peer.drain(url, rows, keys)

            ours = draining(url, rows, ordered=ordered)
            samples = await interleave({"relaybox": ours, "txoutbox": drain_peer}, rounds)
        ratio = samples["relaybox"].over(samples["txoutbox"])
        lines.append([name, samples["relaybox"].show(), samples["txoutbox"].show(), ratio.show(2), str(peer)])
        facts[name] = ratio.median
    title = f"drain of {rows:,} rows into a no-op handler, events/s"
    report(title, ["", "relaybox", "txoutbox", "ratio", "its configuration"], lines, facts)


def emit(url: str, rate: float, count: int, commits: Any) -> None:
    """In a process of its own: one transaction an event, at a steady rate; sends when each was committed."""
    outbox = no_op(url, ordered=False)
    times = []
    with psycopg.connect(url) as connection:
        begin = time.monotonic()
        for n in range(count):
            time.sleep(max(0.0, begin + n / rate - time.monotonic()))
            with outbox.transaction(connection):
                outbox.emit(connection, "Order", n % KEYS, "order.paid", {"n": n, **PAYLOAD})
            times.append(time.monotonic())
    commits.send(times)


async def latency(server_url: str, rates: list[int], seconds: float) -> None:
    """From the commit in one process to the handler in another."""
    lines, facts = [], {}
    for rate in rates:
        count = int(rate * seconds)
        with outbox(server_url) as (url, _):
            waits = sorted(await _waits(url, rate, count))
        cuts = statistics.quantiles(waits, n=1000)
        p50, p99 = cuts[499] * 1000, cuts[989] * 1000
        lines.append([f"{rate}/s", f"{p50:.1f}", f"{p99:.1f}", f"{waits[-1] * 1000:.1f}", f"{count:,}"])
        facts[f"{rate}/s"] = {"p50_ms": round(p50, 2), "p99_ms": round(p99, 2)}
    report("commit to handler, ms", ["", "p50", "p99", "longest", "events"], lines, facts)


async def _waits(url: str, rate: float, count: int) -> list[float]:
    arrived: dict[int, float] = {}
    complete = asyncio.Event()
    outbox = Outbox(url)

    @outbox.handler("order.*", name="runner")
    async def handler(event: Event) -> None:
        arrived.setdefault(event.payload["n"], time.monotonic())
        if len(arrived) == count:
            complete.set()

    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    emitter = context.Process(target=emit, args=(url, rate, count, its), daemon=True)
    async with outbox.relay():
        emitter.start()
        async with asyncio.timeout(60 + 2 * count / rate):
            await complete.wait()
            commits = await asyncio.to_thread(mine.recv)
    emitter.join()
    # The handler may run before the emitter has noted that the commit is done.
    return [max(0.0, arrived[n] - commit) for n, commit in enumerate(commits)]


async def http(server_url: str, rows: int, rounds: int) -> None:
    """Ours against a loop that posts the same bodies and does nothing else."""
    with receiver() as target, outbox(server_url) as (url, tables):
        fill(url, rows)
        store = open_store(url, tables)
        deliveries = (await store.claim(Want("runner", "bench", rows, 60))).deliveries
        await store.close()
        bodies = [packer("json")(delivery).body for delivery in deliveries]
        destination = Destination(
            "runner", target, secret="whsec_c2VjcmV0c2VjcmV0c2VjcmV0c2Vj", allow=["127.0.0.0/8"]
        )

        async def relayed() -> float:
            run(url, "TRUNCATE outbox_event")
            fill(url, rows)
            relay = Outbox(url, destinations=[destination], routes=[Route("order.*", to="runner")]).relay()
            begin = time.perf_counter()
            await relay.drain()
            return rows / (time.perf_counter() - begin)

        async def bare() -> float:
            return await post(target, bodies)

        samples = await interleave({"relaybox": relayed, "bare loop": bare}, rounds)
    ratio = samples["relaybox"].over(samples["bare loop"])
    lines = [["signed POST", *(sample.show() for sample in samples.values()), ratio.show(2)]]
    title = f"HTTP drain of {rows:,} rows, {POSTS_AT_ONCE} at once, requests/s"
    report(title, ["", *samples, "ratio"], lines, {"ratio": ratio.median})


async def post(url: str, bodies: list[bytes]) -> float:
    """Requests a second of a bare aiohttp loop."""
    left = list(bodies)
    connector = aiohttp.TCPConnector(limit=POSTS_AT_ONCE)
    headers = {"content-type": "application/json"}

    async def work() -> None:
        while left:
            async with session.post(url, data=left.pop(), headers=headers) as response:
                await response.read()

    async with aiohttp.ClientSession(connector=connector) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(POSTS_AT_ONCE)))
        return len(bodies) / (time.perf_counter() - begin)


def drain_for(url: str, seconds: float, answer: Any) -> None:
    """In a process of its own: drain for so long; sends how many events and how much memory it took."""
    seen = 0
    outbox = Outbox(url)

    @outbox.handler("order.*", name="runner", ordered=True)
    async def handler(event: Event) -> None:
        nonlocal seen
        seen += 1

    async def relay() -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await outbox.relay().drain()

    asyncio.run(relay())
    answer.send((seen, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def memory(server_url: str, backlog: int, seconds: float) -> None:
    """The most that a relay's process held in memory while it worked on a long backlog."""
    with outbox(server_url) as (url, _):
        fill(url, backlog, keys=KEYS)
        context = multiprocessing.get_context("spawn")
        mine, its = context.Pipe()
        process = context.Process(target=drain_for, args=(url, seconds, its))
        process.start()
        seen, megabytes = mine.recv()
        process.join()
    lines = [[f"{backlog:,} rows", f"{megabytes:.0f}", f"{seen:,}"]]
    title = "resident memory with a backlog, MB"
    report(title, ["backlog", "peak", "delivered meanwhile"], lines, {"peak_mb": round(megabytes)})


def main() -> None:
    """Run what was asked for, else everything."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", help="drain, latency, http, memory")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--backlog", type=int, default=1_000_000)
    given = parser.parse_args()
    parts: dict[str, Callable[[str], None]] = {
        "drain": lambda url: asyncio.run(drain(url, given.rows, given.rounds)),
        "latency": lambda url: asyncio.run(latency(url, [200, 1000], given.seconds)),
        "http": lambda url: asyncio.run(http(url, given.rows // 5, given.rounds)),
        "memory": lambda url: memory(url, given.backlog, given.seconds),
    }
    with server() as url:
        for name in given.parts or parts:
            parts[name](url)


if __name__ == "__main__":
    main()
