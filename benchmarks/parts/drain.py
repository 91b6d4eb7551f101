"""Measure drains: ours in every shape, the fastest peers and the bare loops, all in turns.

Every peer is first tuned and tried on a few rows. The fastest of each kind then take part. A peer is compared
with ours of the same kind: one that deletes delivered rows, with ours at a retention of 0. The time of
several relays counts from their first claim, because they wait for each other before it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks import limits, ours
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, interleave, outbox
from benchmarks.limiting import Busy
from benchmarks.peers import PEERS, Peer
from tests.servers import fresh

KEPT, DELETED, ORDERED = "unordered, kept", "unordered, retention 0", "ordered, 1,000 keys"
HOT, FIVE, THREE = "ordered, half on one key", "unordered, 5 destinations", "unordered, kept, 3 relays"
PLANS = {
    KEPT: ours.Plan(),
    DELETED: ours.Plan(keep=False),
    ORDERED: ours.Plan(ordered=True),
    HOT: ours.Plan(ordered=True, hot=50),
    FIVE: ours.Plan(destinations=5),
    THREE: ours.Plan(relays=3),
}
TRIED = 2_000
BEST = 2
FAST = 0.5
"""Share of the fastest peer's rate below which a peer cannot become the fastest."""


@dataclass
class Tried:
    """The rates of the peers on a few rows."""

    rates: dict[str, float] = field(default_factory=dict)
    lines: list[list[str]] = field(default_factory=list)


async def measure(server_url: str, options: Options) -> Facts:
    """Measure events per second; with 5 destinations, rows per second."""
    rows = options.rows
    with outbox(server_url) as (url, _), ExitStack() as stack:
        taken: dict[str, list[ours.Drained]] = {name: [] for name in PLANS}
        variants = {f"relaybox, {name}": _ours(url, rows, plan, taken[name]) for name, plan in PLANS.items()}
        for keep, kind in ((True, KEPT), (False, DELETED)):
            for driver in ("asyncpg", "psycopg"):
                loop = functools.partial(limits.two_connections, url, rows, keep=keep, driver=driver)
                variants[f"bare loop with {driver}, {kind}"] = loop
        chosen: dict[str, list[str]] = {}
        findings, tried = Findings(), Tried()
        for kind in (KEPT, DELETED, ORDERED):
            # Each has a database of its own, because two use the same name for their table.
            urls = [stack.enter_context(fresh.database(server_url)) for _ in PEERS]
            chosen[kind] = []
            for name, peer, peer_url in await _choose(urls, kind, options, tried):
                chosen[kind].append(name)
                variants[name] = functools.partial(peer.drain, peer_url, rows, _keys(kind))
        # The trials have warmed the machine up, and every turn is a new process.
        samples = await interleave(variants, options.rounds, warm_up=0)
    columns = ["", "version", "configuration", "events/s"]
    findings.table(f"peers tried on {_tried(options):,} rows", columns, tried.lines)
    for name in tried.rates.keys() - samples.keys():
        findings.figure(f"{name}, tried only", Sample([tried.rates[name]]))
    _show(findings, rows, samples)
    busy = {name: Busy.median([one.busy for one in drained]) for name, drained in taken.items()}
    _show_busy(findings, busy)
    _judge(findings, samples, chosen, busy)
    return findings.facts(rows=rows)


def _ours(url: str, rows: int, plan: ours.Plan, taken: list[ours.Drained]) -> Take:
    async def take() -> float:
        drained = await ours.drain(url, rows, plan)
        taken.append(drained)
        return drained.rate if plan.relays == 1 else drained.pace

    return take


def _keys(kind: str) -> int:
    return ours.KEYS if kind == ORDERED else 0


def _tried(options: Options) -> int:
    return min(options.rows, options.size(TRIED, 200))


async def _choose(
    urls: Sequence[str], kind: str, options: Options, tried: Tried
) -> list[tuple[str, Peer, str]]:
    """Return the fastest peers of the kind, with their names in the table and their databases."""
    rates: list[tuple[float, tuple[str, Peer, str]]] = []
    for peer, url in zip(PEERS, urls, strict=True):
        if not (peer.ordered if kind == ORDERED else peer.keeps == (kind == KEPT)):
            continue
        # Tune for each kind separately.
        own = copy.copy(peer)
        if not options.quick:
            await own.tune(url, keys=_keys(kind))
        rate = await own.drain(url, _tried(options), _keys(kind))
        name = f"{own.name}, {_kind(own, kind)}"
        tried.rates[name] = rate
        tried.lines.append([name, own.version(), own.configuration(), f"{rate:,.0f}"])
        rates.append((rate, (name, own, url)))
    rates.sort(key=lambda item: item[0], reverse=True)
    return [item for rate, item in rates[:BEST] if rate >= FAST * rates[0][0]]


def _kind(peer: Peer, kind: str) -> str:
    return kind if kind != ORDERED else f"{kind}, {'kept' if peer.keeps else 'deleted'}"


def _show(findings: Findings, rows: int, samples: dict[str, Sample]) -> None:
    lines = []
    for name, sample in samples.items():
        findings.figure(name, sample)
        lines.append([name, sample.show(), samples[f"relaybox, {KEPT}"].over(sample).show(2)])
    columns = ["", "events/s", f"relaybox, {KEPT} / this"]
    findings.table(f"drain of {rows:,} rows into a no-op handler", columns, lines)


def _show_busy(findings: Findings, busy: dict[str, Busy]) -> None:
    lines = [[name, f"{one.relay:.0f}", f"{one.server:.0f}"] for name, one in busy.items()]
    findings.table("how busy they are, % of a core", ["", "relay", "PostgreSQL"], lines)


def _judge(
    findings: Findings, samples: dict[str, Sample], chosen: dict[str, list[str]], busy: dict[str, Busy]
) -> None:
    def of(name: str) -> Sample:
        return samples[f"relaybox, {name}"]

    def fastest(names: list[str]) -> str:
        return max(names, key=lambda name: samples[name].median)

    for kind, least in ((KEPT, 1.5), (DELETED, 2), (ORDERED, 2)):
        peer = fastest(chosen[kind])
        ratio, limit = of(kind).over(samples[peer]), busy[kind].limit()
        findings.at_least(f"drain, {kind}", least, f"× the fastest peer ({peer})", ratio, limit=limit)
    loop = fastest([name for name in samples if name.startswith("bare loop") and name.endswith(KEPT)])
    for bar, least, what, kind, other in (
        (f"drain, {KEPT}", 0.8, f"× the {loop}", KEPT, samples[loop]),
        (f"drain, {ORDERED}", 0.7, "× our unordered rate", ORDERED, of(KEPT)),
        ("hot key with half of the events", 0.5, "× our ordered rate", HOT, of(ORDERED)),
        ("5 destinations for each event", 0.8, "× the rows/s of one destination", FIVE, of(KEPT)),
    ):
        findings.at_least(bar, least, what, of(kind).over(other), limit=busy[kind].limit())
    every = fastest([name for names in chosen.values() for name in names])
    findings.figure("kept, against the fastest peer of any kind", of(KEPT).over(samples[every]))
