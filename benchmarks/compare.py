"""Compare the drain and the latency of two checkouts: ``python -m benchmarks.compare OTHER``.

This checkout and the one in the directory OTHER take turns on one server, each with its own code in separate
processes. So other work on the machine disturbs both equally. A ratio compares neighbours in time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import ours
from benchmarks.findings import percentile
from benchmarks.harness import Sample, outbox, report, server, take_turns

HERE = Path(__file__).resolve()
MEASURED = (("drain", "unordered"), ("drain", "ordered"), ("waits", "200"), ("waits", "1000"))
SECONDS = 5
LIMIT = 600


def take(server_url: str, what: str, how: str, rows: int) -> dict[str, float]:
    """Measure one thing with the code of this process; return figures by name."""
    with outbox(server_url) as (url, _):
        if what == "drain":
            drained = asyncio.run(ours.drain(url, rows, ours.Plan(ordered=how == "ordered")))
            figures = {"events/s": drained.pace, "relay, µs": drained.cpu, "server, µs": drained.server}
        else:
            waited = asyncio.run(ours.sessions().waits(url, float(how), SECONDS))
            figures = {f"p{share:.0%}"[:-1]: 1e3 * percentile(waited, share) for share in (0.5, 0.99)}
    return {f"{what}, {how}: {name}": value for name, value in figures.items()}


def take_in(checkout: Path, server_url: str, what: str, how: str, rows: int) -> dict[str, float]:
    """Measure one thing with the code of a checkout."""
    # Leave out this file's directory and use the other's benchmarks, which fit its relay.
    env = {**os.environ, "PYTHONPATH": f"{checkout}:{checkout / 'src'}"}
    command = [sys.executable, "-P", str(HERE), str(checkout), "--rows", str(rows)]
    command += ["--take", server_url, what, how]
    done = subprocess.run(command, env=env, cwd=checkout, check=True, stdout=subprocess.PIPE, timeout=LIMIT)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def compare(checkouts: Sequence[Path], rows: int, rounds: int) -> None:
    """Let the checkouts take turns, and print the medians and the ratios."""
    found: dict[Path, dict[str, list[float]]] = {checkout: defaultdict(list) for checkout in checkouts}

    def turn(checkout: Path, url: str, what: str, how: str) -> Callable[[], float]:
        def measure() -> float:
            for name, value in take_in(checkout, url, what, how, rows).items():
                found[checkout][name].append(value)
            return 0.0

        return measure

    with server() as url:
        for what, how in MEASURED:
            turns = {str(checkout): turn(checkout, url, what, how) for checkout in checkouts}
            take_turns(turns, rounds, warm_up=0)
    mine, other = ({name: Sample(values) for name, values in found[one].items()} for one in checkouts)
    lines = [
        [name, other[name].show(1), mine[name].show(1), mine[name].over(other[name]).show(2)] for name in mine
    ]
    facts = {name: mine[name].over(other[name]).median for name in mine}
    columns = ["", "the other", "this", "this / the other"]
    report(f"two checkouts in turns, {rounds} rounds", columns, lines, facts)


def main() -> None:
    """Compare, or take one turn of a comparison."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare", description=__doc__)
    parser.add_argument("other", type=Path, help="the directory of the other checkout")
    parser.add_argument("--rows", type=int, default=20_000, help="drained at a time (20,000)")
    parser.add_argument("--rounds", type=int, default=5, help="of each checkout (5)")
    parser.add_argument("--take", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.take is None:
        compare([HERE.parents[1], given.other.resolve()], given.rows, given.rounds)
    else:
        print(json.dumps(take(*given.take, given.rows)))


if __name__ == "__main__":
    main()
