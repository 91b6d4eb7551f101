"""``python -m tests.chaos.run --database postgresql-18 --seed 1 --count 10``: schedules, and a line for each.

With ``--broker redis`` (nats, rabbitmq, kafka) events go to that broker, and the faults are the broker's.
With ``--search`` they go to search engines, to another one for each seed.
Exits with 1 when a promise was broken; the seed and the commit that are printed then draw the same faults.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import msgspec

from tests.chaos.broker_schedule import run_broker_schedule
from tests.chaos.brokers.base import BROKERS, SINKS, running
from tests.chaos.cluster import prepared
from tests.chaos.cluster import running as running_database
from tests.chaos.schedule import Result, run_schedule
from tests.chaos.search_schedule import archive_of, draw, run_search_schedule
from tests.commit import commit
from tests.integration.search_engines import ENGINES, engine

DATABASES = ("postgresql-18", "postgresql-15", "mariadb", "sqlite", "small-disk")


def main() -> int:
    options = _options()
    end = time.monotonic() + options.minutes * 60
    results: list[Result] = []
    with ExitStack() as stack:
        run = _runner(stack, options)
        for seed in range(options.seed, options.seed + options.count):
            if time.monotonic() > end:
                break
            result = run(seed)
            results.append(result)
            print(line(result), flush=True)
            if options.json:
                with options.json.open("ab") as lines:
                    lines.write(
                        msgspec.json.encode({"commit": commit(), **msgspec.to_builtins(result)}) + b"\n"
                    )
            if not result.ok:
                tell(result)
    print(total(results))
    return 0 if results and all(result.ok for result in results) else 1


def _runner(stack: ExitStack, options: argparse.Namespace) -> Callable[[int], Result]:
    """Runs the schedule of a seed; what it needs is there until the stack is closed."""
    if options.search:
        return _search_runner(stack, options.events)
    if options.broker is None:
        ground = stack.enter_context(prepared(options.database))
        return lambda seed: run_schedule(ground, seed, options.events)
    plain = stack.enter_context(prepared("postgresql-18", plain=True, warm=SINKS))
    broker = stack.enter_context(running(options.broker))
    return lambda seed: run_broker_schedule(plain, broker, seed, options.events)


def _search_runner(stack: ExitStack, events: int) -> Callable[[int], Result]:
    server = stack.enter_context(running_database("postgresql-18"))
    start = cache(lambda name: stack.enter_context(engine(name)))

    def run(seed: int) -> Result:
        subject = start(ENGINES[seed % len(ENGINES)])
        plan = draw(seed, subject, events)
        with (
            server.database() as url,
            tempfile.TemporaryDirectory(prefix="relaybox-chaos-") as home,
            archive_of(url, Path(home), subject, plan) as archive,
        ):
            return run_search_schedule(archive, subject, plan)

    return run


def line(result: Result) -> str:
    faults = ", ".join(f"{count} × {kind}" for kind, count in sorted(result.faults.items())) or "no fault"
    broken = ", ".join(f"{count} {kind}" for kind, count in result.findings.items() if count) or "ok"
    return (
        f"{result.database} seed {result.seed}: {broken}; {result.events} events, {result.receipts} receipts,"
        f"{_again(result)} {result.seconds:.1f} s, drained in"
        f" {result.drained:.1f} s; {faults}{_of_broker(result)}"
    )


def _again(result: Result) -> str:
    """Return how often something was delivered again; a search index does not record that."""
    return "" if result.database in ENGINES else f" {result.duplicates} again (≤ {result.bound}),"


def _of_broker(result: Result) -> str:
    if result.database not in BROKERS:
        return ""
    return f"; why: {result.explained}, others held up {result.delay:.1f} s"


def tell(result: Result) -> None:
    print(f"seed {result.seed} at {commit()}:")
    for text in result.words[:20]:
        print(f"    {text}")
    option = "broker" if result.database in BROKERS else "database"
    what = "--search" if result.database in ENGINES else f"--{option} {result.database}"
    again = f"{what} --seed {result.seed}"
    print(f"    again: python -m tests.chaos.run {again}", flush=True)


def total(results: list[Result]) -> str:
    findings: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    for result in results:
        findings.update(result.findings)
        faults.update(result.faults)
    again = {
        "received again": sum(result.duplicates for result in results),
        "bound": sum(result.bound for result in results),
    }
    figures = {
        "schedules": len(results),
        "events": sum(result.events for result in results),
        "receipts": sum(result.receipts for result in results),
        **(again if any(map(_again, results)) else {}),
        "faults": faults.total(),
        **findings,
        "broken schedules": sum(not result.ok for result in results),
    }
    return "\n".join(f"{name:<17} {number:>9,}" for name, number in figures.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.run", description=__doc__)
    parser.add_argument("--database", choices=DATABASES, default="postgresql-18")
    parser.add_argument("--broker", choices=BROKERS)
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--events", type=int, default=2000)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="a file to which each result is added as a line")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
