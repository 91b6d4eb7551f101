"""Measure what metrics and traces cost a relay: drains with and without them, in turns.

Every event has a trace context, and one per cent of them are sampled, as with sampled requests. For
comparison every event is sampled.
"""

from __future__ import annotations

from benchmarks import ours
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, interleave, outbox

PLAIN = "without"
METRICS = "metrics"
BOTH = "metrics, traces of 1 % of the events"
EVERY = "metrics, traces of all events"
PLANS = {
    PLAIN: ours.Plan(contexts=1),
    METRICS: ours.Plan(contexts=1, metrics=True),
    BOTH: ours.Plan(contexts=1, metrics=True, traces=True),
    EVERY: ours.Plan(contexts=100, metrics=True, traces=True),
}
LEAST = 0.95


async def measure(server_url: str, options: Options) -> Facts:
    """Measure events per second, and the CPU of a relay's process per event."""
    cpu: dict[str, list[float]] = {name: [] for name in PLANS}
    with outbox(server_url) as (url, _):
        variants = {name: _drain(url, options.rows, plan, cpu[name]) for name, plan in PLANS.items()}
        samples = await interleave(variants, options.rounds)
    findings, lines = Findings(), []
    for name, sample in samples.items():
        findings.figure(name, sample)
        ratio, taken = sample.over(samples[PLAIN]), Sample(cpu[name][1:])
        lines.append([name, sample.show(), ratio.show(2), taken.show(1)])
    columns = ["", "events/s", f"/ {PLAIN}", "µs of CPU an event"]
    findings.table(f"drain of {options.rows:,} rows into a no-op handler", columns, lines)
    for name in (METRICS, BOTH):
        ratio = samples[name].over(samples[PLAIN])
        findings.at_least(f"drain with {name}", LEAST, "× the rate without", ratio)
    return findings.facts(rows=options.rows)


def _drain(url: str, rows: int, plan: ours.Plan, cpu: list[float]) -> Take:
    async def take() -> float:
        drained = await ours.drain(url, rows, plan)
        cpu.append(drained.cpu)
        return drained.rate

    return take
