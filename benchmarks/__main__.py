"""Run ``make bench``: measure, print the tables and write ``docs/performance.md``.

``python -m benchmarks drain latency --rounds 3`` measures some parts and writes only if asked to.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import time
from collections.abc import Sequence

from uvloop import new_event_loop

from benchmarks import page
from benchmarks.findings import Facts, Options
from benchmarks.harness import ask, server
from benchmarks.process import begin

PARTS = (
    "drain", "relays", "latency", "steady", "emit", "http", "memory", "growth", "idle", "claim", "store",
    "inbox", "django", "instrumentation", "operate", "bounds", "neighbours", "kills",
)  # fmt: skip


def measure(names: Sequence[str], options: Options, version: str) -> tuple[dict[str, Facts], str]:
    """Return the findings of the parts, each on a server of its own, and the exact version of the servers."""
    found, release = {}, version
    for name in names:
        part = importlib.import_module(f"benchmarks.parts.{name}")
        # Some parts are measured in this process.
        began = begin()
        with server(version) as url, asyncio.Runner(loop_factory=new_event_loop) as runner:
            [release] = ask(url, "SHOW server_version")
            facts = runner.run(part.measure(url, options))
        found[name] = facts | {"took": round(time.monotonic() - began, 1)}
        print(f"\n{name}: {found[name]['took']:.0f} s", flush=True)
    return found, release


def main() -> None:
    """Run the named parts, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--rows", type=int, help="drained at a time (50,000; 2,000 where quick)")
    parser.add_argument("--rounds", type=int, help="of each variant (3; 1 where quick)")
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say little")
    parser.add_argument("--postgres", choices=["18", "15"], default="18")
    parser.add_argument("--write", action="store_true", help="write the page also where only some parts ran")
    given = parser.parse_args()
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    rows, rounds = (2_000, 1) if given.quick else (50_000, 3)
    options = Options(given.rows or rows, given.rounds or rounds, given.quick)
    found, release = measure(given.parts or PARTS, options, given.postgres)
    page.show_bars(found)
    if given.write or not (given.parts or given.quick):
        page.write(page.record(found, options, release))


if __name__ == "__main__":
    main()
