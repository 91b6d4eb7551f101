"""Measure several relays: they drain one table together, against one relay alone."""

from __future__ import annotations

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, interleave, outbox
from benchmarks.limiting import Busy

COUNTS = (1, 2, 4)
VAIN = "relays that ask while the others hold all that is due"


async def measure(server_url: str, options: Options) -> Facts:
    """Measure events per second, and the share of claims that got nothing while rows were due."""
    taken: dict[str, list[ours.Drained]] = {}
    variants: dict[str, Take] = {}
    with outbox(server_url) as (url, _):
        for order in ("unordered", "ordered"):
            for count in COUNTS[:2] if options.quick else COUNTS:
                plan = ours.Plan(ordered=order == "ordered", relays=count)
                name = _name(order, count)
                variants[name] = _taking(url, options.rows, plan, taken.setdefault(name, []))
        samples = await interleave(variants, options.rounds, warm_up=0)
    return _found(options.rows, samples, taken)


def _taking(url: str, rows: int, plan: ours.Plan, taken: list[ours.Drained]) -> Take:
    async def take() -> float:
        taken.append(await ours.drain(url, rows, plan))
        return taken[-1].pace

    return take


def _name(order: str, count: int) -> str:
    return f"{order}, {count} relay{'s' if count > 1 else ''}"


def _found(rows: int, samples: dict[str, Sample], taken: dict[str, list[ours.Drained]]) -> Facts:
    findings = Findings()
    lines = []
    for name, sample in samples.items():
        first = _name(name.partition(",")[0], 1)
        ratio = sample.over(samples[first])
        vain = Sample([100 * one.vain / one.claims for one in taken[name]])
        busy = Busy.median([one.busy for one in taken[name]])
        findings.figure(name, sample)
        findings.figure(f"{name}, % of claims in vain", vain)
        shown = [sample.show(), ratio.show(2), vain.show(1), f"{busy.relay:.0f}", f"{busy.server:.0f}"]
        lines.append([name, *shown])
        if name != first:
            findings.at_least(name, 0.9, "× one relay", ratio, limit=busy.limit())
            findings.at_most(name, 5, "% of claims in vain", vain, digits=1, limit=VAIN)
    columns = ["", "events/s", "× one relay", "% of claims in vain", "relays, % of a core", "PostgreSQL"]
    findings.table(f"{rows:,} rows drained by several relays", columns, lines)
    return findings.facts(rows=rows)
