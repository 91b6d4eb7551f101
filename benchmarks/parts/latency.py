"""Latency: from the commit in one process to the handler in another, ours and the peers in turns.

Ours is emitted through a SQLAlchemy session, whose commit wakes the relay; each peer as it documents it.
Every peer has one turn, and the best by their medians go on. The rate is the one that was asked for.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeAlias

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options, percentile
from benchmarks.harness import Sample, fill, outbox, run
from benchmarks.peers import PEERS
from tests.servers import fresh

RATES = (200, 1_000, 3_000)
JUDGED = (200, 1_000)
BEST = 2
HISTORY = 20_000
USED, FRESH = "relaybox", "relaybox, fresh table"
DELIVERED = """
UPDATE outbox_event SET status = 'delivered', delivered_at = clock_timestamp(), next_attempt_at = NULL"""

Waits: TypeAlias = Callable[[int], Awaitable[list[float]]]


async def measure(server_url: str, options: Options) -> Facts:
    """Milliseconds, by rate."""
    findings = Findings()
    seconds = options.size(5, 2)
    for rate in RATES[:1] if options.quick else RATES:
        with ExitStack() as stack:
            variants = _variants(server_url, seconds, options, stack)
            found, failed = await _take(variants, rate, options.rounds if rate in JUDGED else 1)
        _show(findings, rate, found, failed)
        if rate in JUDGED:
            _judge(findings, rate, found)
    return findings.facts(seconds=seconds)


def _variants(server_url: str, seconds: float, options: Options, stack: ExitStack) -> dict[str, Waits]:
    url, _ = stack.enter_context(outbox(server_url))
    fill(url, min(options.rows, HISTORY))
    run(url, DELIVERED)
    run(url, "VACUUM ANALYZE outbox_event")

    async def on_used(rate: int) -> list[float]:
        return await ours.sessions().waits(url, rate, seconds)

    async def on_fresh(rate: int) -> list[float]:
        with outbox(server_url) as (new, _):
            return await ours.sessions().waits(new, rate, seconds)

    variants: dict[str, Waits] = {USED: on_used, FRESH: on_fresh}
    for peer in PEERS:
        if peer.name not in variants:
            peer_url = stack.enter_context(fresh.database(server_url))
            variants[peer.name] = lambda rate, peer=peer, url=peer_url: peer.waits(url, rate, seconds)
    return variants


async def _take(
    variants: dict[str, Waits], rate: int, rounds: int
) -> tuple[dict[str, dict[str, Sample]], dict[str, str]]:
    """Percentiles by variant, and who did not keep up with the rate."""
    taken: dict[str, list[list[float]]] = {}
    failed: dict[str, str] = {}
    names = list(variants)
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            try:
                waits = await variants[name](rate)
            except (TimeoutError, RuntimeError) as error:
                if name in (USED, FRESH):
                    raise
                late = isinstance(error, TimeoutError)
                failed[name] = "did not keep up" if late else str(error).strip().splitlines()[-1][:80]
                taken.pop(name, None)
                continue
            taken.setdefault(name, []).append(waits)
        if not turn:
            peers = [name for name in taken if name not in (USED, FRESH)]
            best = sorted(peers, key=lambda name: percentile(taken[name][0], 0.5))[:BEST]
            names = [USED, FRESH, *best]
        names = [name for name in names if name not in failed]
    percentiles = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
    return {
        name: {
            title: Sample([1e3 * percentile(waits, share) for waits in every])
            for title, share in percentiles.items()
        }
        for name, every in taken.items()
    }, failed


def _show(findings: Findings, rate: int, found: dict[str, dict[str, Sample]], failed: dict[str, str]) -> None:
    lines = []
    for name, samples in found.items():
        for title, sample in samples.items():
            findings.figure(f"{name}, {rate}/s, {title}", sample)
        shown = [sample.show(1) for sample in samples.values()]
        lines.append([name, *shown, str(len(samples["p50"].values))])
    lines += [[name, why, "", "", "1"] for name, why in failed.items()]
    findings.table(f"commit to handler at {rate:,}/s, ms", ["", "p50", "p99", "longest", "rounds"], lines)


def _judge(findings: Findings, rate: int, found: dict[str, dict[str, Sample]]) -> None:
    peers = [name for name in found if name not in (USED, FRESH)]
    if not peers:
        raise RuntimeError(f"no peer kept up with {rate} events a second: there is nothing to compare with")
    for title, most in (("p50", 0.6), ("p99", 1.0)):
        best = min(peers, key=lambda name: found[name][title].median)
        for name in (USED, FRESH):
            # Of peers that had one turn only, that one stands against all of ours.
            its = found[best][title].median
            ratio = Sample([value / max(its, 1e-3) for value in found[name][title].values])
            bar = f"latency {title} at {rate:,}/s" + (", fresh table" if name == FRESH else "")
            findings.at_most(bar, most, f"× the best peer's ({best})", ratio)
