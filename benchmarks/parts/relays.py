"""Several relays: as many processes drain one table together, against one by itself."""

from __future__ import annotations

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, interleave, outbox

COUNTS = (1, 2, 3, 4)
JUDGED = (2, 4)


async def measure(server_url: str, options: Options) -> Facts:
    """Events a second, and the share of claims that got nothing while there was something to get."""
    vain: dict[str, list[tuple[int, int]]] = {}
    variants: dict[str, Take] = {}
    with outbox(server_url) as (url, _):
        for order in ("unordered", "ordered"):
            for count in COUNTS[:2] if options.quick else COUNTS:
                plan = ours.Plan(ordered=order == "ordered", relays=count)
                name = _name(order, count)
                variants[name] = _taking(url, options.rows, plan, vain.setdefault(name, []))
        samples = await interleave(variants, options.rounds, warm_up=0)
    return _found(options.rows, samples, vain)


def _taking(url: str, rows: int, plan: ours.Plan, vain: list[tuple[int, int]]) -> Take:
    async def take() -> float:
        drained = await ours.drain(url, rows, plan)
        vain.append((drained.vain, drained.claims))
        return drained.pace

    return take


def _name(order: str, count: int) -> str:
    return f"{order}, {count} relay{'s' if count > 1 else ''}"


def _found(rows: int, samples: dict[str, Sample], vain: dict[str, list[tuple[int, int]]]) -> Facts:
    findings = Findings()
    lines = []
    shares = {}
    for name, sample in samples.items():
        alone = samples[_name(name.partition(",")[0], 1)]
        shares[name] = Sample([100 * empty / claims for empty, claims in vain[name]])
        findings.figure(name, sample)
        findings.figure(f"{name}, % of claims in vain", shares[name])
        lines.append([name, sample.show(), sample.over(alone).show(2), shares[name].show(1)])
    columns = ["", "events/s", "× one relay", "% of claims in vain"]
    findings.table(f"{rows:,} rows drained by several relays", columns, lines)
    for order in ("unordered", "ordered"):
        for name in (_name(order, count) for count in JUDGED):
            if name not in samples:
                continue
            findings.at_least(name, 0.9, "× one relay", samples[name].over(samples[_name(order, 1)]))
            findings.at_most(name, 5, "% of claims in vain", shares[name], digits=1)
    return findings.facts(rows=rows)
