"""Run schedules: ``python -m tests.simulation.run --first 0 --count 2000 --processes 2``.

A schedule that breaks a promise is printed with its seed; ``--first SEED --trace`` runs it once more, step by
step the same, and tells what happens.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from relaybox.testing.checker import KINDS
from tests.commit import commit
from tests.simulation.plan import draw
from tests.simulation.schedule import run_seed

BLOCK = 50  # Seeds that a process takes at once


@dataclass
class Total:
    schedules: int = 0
    events: int = 0
    deliveries: int = 0
    duplicates: int = 0
    drained: int = 0
    steps: int = 0
    cpu: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    broken: dict[int, list[str]] = field(default_factory=dict)  # By seed: what was found

    def add(self, other: Total) -> None:
        for name in ("schedules", "events", "deliveries", "duplicates", "drained", "steps", "cpu"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.faults += other.faults
        self.found += other.found
        self.broken |= other.broken

    def __str__(self) -> str:
        rate = self.schedules / self.cpu if self.cpu else 0.0
        lines = [
            f"{self.schedules:,} schedules, {self.events:,} events, {self.deliveries:,} deliveries",
            f"{sum(self.faults.values()):,} faults, {self.duplicates:,} deliveries came again",
            f"{self.drained:,} schedules were healed and had to drain; the others end amid their troubles",
            ", ".join(f"{self.found[kind]} {kind}" for kind in KINDS),
            f"{rate:.1f} schedules a second of one core",
        ]
        return "\n".join(lines)


def run_block(seeds: Iterable[int]) -> Total:
    total, began = Total(), time.process_time()
    for seed in seeds:
        result = run_seed(seed)
        total.schedules += 1
        total.events += result.events
        total.deliveries += result.deliveries
        total.duplicates += result.duplicates
        total.drained += result.drained
        total.steps += result.steps
        total.faults += result.faults
        total.found.update(finding.kind for finding in result.findings)
        if result.findings:
            total.broken[seed] = [str(finding) for finding in result.findings[:5]]
    total.cpu = time.process_time() - began
    return total


def run(first: int, count: int, *, processes: int = 1, seconds: float | None = None) -> Iterator[Total]:
    """Yield the sum so far after each block of seeds; begin no new block when the time is over."""
    blocks = [range(at, min(at + BLOCK, first + count)) for at in range(first, first + count, BLOCK)]
    end = None if seconds is None else time.monotonic() + seconds
    total = Total()
    with ProcessPoolExecutor(processes, initializer=settle_memory) as pool:
        waiting = [pool.submit(run_block, block) for block in blocks[: 2 * processes]]
        left = iter(blocks[2 * processes :])
        while waiting:
            total.add(waiting.pop(0).result())
            yield total
            block = None if end is not None and time.monotonic() > end else next(left, None)
            if block is not None:
                waiting.append(pool.submit(run_block, block))


def settle_memory() -> None:
    """Exempt what was imported from garbage collection."""
    gc.collect()
    gc.freeze()


def trace(seed: int) -> int:
    plan = draw(seed)
    kinds = ", ".join(
        f"{destination.name} (lease {destination.lease:g} s)" for destination in plan.destinations
    )
    ends = "it is healed, and must drain" if plan.heals else "it ends amid its troubles"
    print(f"seed {seed} at {commit()}: {plan.flavour} database, {plan.relays} relays, {plan.keys} keys")
    print(f"to {kinds}; {ends}")
    print(f"faults: {', '.join(plan.faults) or 'none'}")
    result = run_seed(seed, tell=print)
    met = ", ".join(f"{count} × {what}" for what, count in sorted(result.faults.items())) or "nothing"
    print(f"met: {met}")
    print(f"{result.events} events, {result.deliveries} deliveries, {result.duplicates} of them again")
    print(*(result.findings or ["every promise was kept"]), sep="\n")
    return 1 if result.findings else 0


def catch(name: str) -> int:
    """Plant bugs, one at a time, and tell a seed under which each is found; 1: one is not."""
    from tests.simulation.bugs import BUGS, search

    missed = 0
    for bug in BUGS:
        if name in bug.name:
            seed = search(bug)
            missed += seed is None
            print(f"{bug.name}: " + ("not found" if seed is None else f"seed {seed} (stored: {bug.seed})"))
    return 1 if missed else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.run", description=__doc__)
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds (1000)")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, help="begin nothing new after so long")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--trace", action="store_true", help="tell what happens in the first schedule")
    parser.add_argument("--bug", help="plant this bug, or any whose name holds the word, and look for it")
    options = parser.parse_args()
    if options.bug:
        return catch(options.bug)
    if options.trace:
        return trace(options.first)
    total = Total()
    for total in run(options.first, options.count, processes=options.processes, seconds=options.seconds):
        sys.stderr.write(f"\r{total.schedules:,} of {options.count:,} schedules, {len(total.broken)} broken ")
        sys.stderr.flush()
    sys.stderr.write("\n")
    print(total)
    for seed, findings in total.broken.items():
        print(f"seed {seed} at {commit()}:", *findings, sep="\n  ")
    if options.json:
        options.json.write_bytes(msgspec.json.encode(total))
    return 1 if total.broken else 0


if __name__ == "__main__":
    sys.exit(main())
