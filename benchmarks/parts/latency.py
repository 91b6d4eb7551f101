"""Measure the latency from the commit in one process to the handler in another, ours and the peers in turns.

Ours is emitted through a SQLAlchemy session, which wakes the relay at its commit, and each peer as it
documents. Each peer is tuned for every judged rate. Every peer has one turn. The best by their medians and by
their slowest hundredth take part in every round, and ours is compared with them. A peer that falls behind at
a rate is not measured at a higher one. The stated rate is the requested one.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeAlias

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options, percentile
from benchmarks.harness import Sample, fill, outbox, run
from benchmarks.peers import PROMPT, Peer
from tests.servers import fresh

RATES = (200, 1_000, 3_000)
JUDGED = (200, 1_000)
BEST = 2
HISTORY = 20_000
USED, FRESH = "relaybox", "relaybox, fresh table"
PERCENTILES = {"p50": 0.5, "p99": 0.99, "longest": 1.0}
BARS = {"p50": 0.6, "p99": 1.0}
BEHIND = 100.0
"""Milliseconds of the median wait at which a peer does not keep up."""
FINEST = 0.01
"""Milliseconds; a shorter wait counts as this long, so that there is a ratio."""
DELIVERED = """
UPDATE outbox_event SET status = 'delivered', delivered_at = clock_timestamp(), next_attempt_at = NULL"""

Waits: TypeAlias = Callable[[], Awaitable[list[float]]]


@dataclass
class Taken:
    """The result of one rate: milliseconds of each percentile by variant, and the peers that fell behind."""

    samples: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    async def take(self, name: str, waits: Waits) -> None:
        """Let one variant have its turn; a peer that fails gets no other."""
        try:
            waited = await waits()
        except (TimeoutError, RuntimeError) as error:
            if name in (USED, FRESH):
                raise
            self.samples.pop(name, None)
            self.failed[name] = why(error)
            return
        of = self.samples.setdefault(name, {title: [] for title in PERCENTILES})
        for title, share in PERCENTILES.items():
            of[title].append(max(FINEST, 1e3 * percentile(waited, share)))

    def kept_up(self, name: str) -> bool:
        """True if a higher rate is worth a try."""
        return name in self.samples and self.samples[name]["p50"][0] < BEHIND

    def best(self) -> list[str]:
        """Return the peers that may be the best in the end."""
        peers = [name for name in self.samples if name not in (USED, FRESH)]
        first = [sorted(peers, key=lambda name: self.samples[name][title][0])[:BEST] for title in BARS]
        return [name for name in peers if any(name in names for names in first)]


def why(error: Exception) -> str:
    """Return a few words on what a peer did not do."""
    late = isinstance(error, TimeoutError)
    return "did not keep up" if late else str(error).strip().splitlines()[-1][:80]


async def measure(server_url: str, options: Options) -> Facts:
    """Measure the milliseconds by rate."""
    findings = Findings()
    seconds = options.size(5, 2)
    peers = [copy.copy(peer) for peer in PROMPT]
    for rate in RATES[:1] if options.quick else RATES:
        taken = Taken()
        if rate in JUDGED and not options.quick:
            await _tune(peers, server_url, rate, taken)
        with ExitStack() as stack:
            variants = _ours(server_url, rate, seconds, options, stack)
            for peer in peers:
                if peer.name not in taken.failed:
                    url = stack.enter_context(fresh.database(server_url))
                    variants[peer.name] = functools.partial(peer.waits, url, rate, seconds)
            await _rounds(variants, options.rounds if rate in JUDGED else 1, taken)
        _show(findings, rate, taken, {peer.name: peer.configuration() for peer in peers})
        if rate in JUDGED:
            _judge(findings, rate, taken)
        peers = [peer for peer in peers if taken.kept_up(peer.name)]
    return findings.facts(seconds=seconds)


async def _tune(peers: Sequence[Peer], server_url: str, rate: int, taken: Taken) -> None:
    for peer in peers:
        try:
            await peer.tune_waits(functools.partial(fresh.database, server_url), rate)
        except (TimeoutError, RuntimeError) as error:
            taken.failed[peer.name] = why(error)


def _ours(server_url: str, rate: int, seconds: float, options: Options, stack: ExitStack) -> dict[str, Waits]:
    url, _ = stack.enter_context(outbox(server_url))
    fill(url, min(options.rows, HISTORY))
    run(url, DELIVERED)
    run(url, "VACUUM ANALYZE outbox_event")

    async def on_fresh() -> list[float]:
        with outbox(server_url) as (new, _):
            return await ours.sessions().waits(new, rate, seconds)

    return {USED: functools.partial(ours.sessions().waits, url, rate, seconds), FRESH: on_fresh}


async def _rounds(variants: dict[str, Waits], rounds: int, taken: Taken) -> None:
    names = list(variants)
    for turn in range(rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            await taken.take(name, variants[name])
        names = [USED, FRESH, *taken.best()]


def _show(findings: Findings, rate: int, taken: Taken, configurations: dict[str, str]) -> None:
    lines = []
    for name, by in taken.samples.items():
        samples = {title: Sample(values) for title, values in by.items()}
        for title, sample in samples.items():
            findings.figure(f"{name}, {rate}/s, {title}", sample)
        shown = [sample.show(1) for sample in samples.values()]
        lines.append([name, *shown, str(len(by["p50"])), configurations.get(name, "the defaults")])
    lines += [[name, reason, "", "", "", configurations[name]] for name, reason in taken.failed.items()]
    columns = ["", "p50", "p99", "longest", "rounds", "configuration"]
    findings.table(f"commit to handler at {rate:,}/s, ms", columns, lines)


def _judge(findings: Findings, rate: int, taken: Taken) -> None:
    every = len(taken.samples[USED]["p50"])
    # Only variants that took part in every round.
    peers = [name for name in taken.best() if len(taken.samples[name]["p50"]) == every]
    if not peers:
        raise RuntimeError(f"no peer kept up with {rate} events a second: there is nothing to compare with")
    for title, most in BARS.items():
        samples = {name: Sample(by[title]) for name, by in taken.samples.items()}
        best = min(peers, key=lambda name: samples[name].median)
        for name in (USED, FRESH):
            bar = f"latency {title} at {rate:,}/s" + (", fresh table" if name == FRESH else "")
            findings.at_most(bar, most, f"× the best peer's ({best})", samples[name].over(samples[best]))
