"""``python -m tests.proof --minutes 30 [--only PART ...]``: run the parts, tell figures, write the page.

Simulation gets a sixth of the time, the parts that are tests take what they take, and the schedules of real
processes share the rest: PostgreSQL has four parts of it, MariaDB and SQLite two each, every broker one, and
the search engines together one.
The exit status is 1 where a promise was broken, whose seeds are told, or where there was no time for a part.
"""

from __future__ import annotations

import argparse
import sys
import time

from tests.proof import page
from tests.proof.parts import CHAOS, PARTS, SIMULATION, TESTS, keep, run

SHARES = dict.fromkeys(CHAOS, 1) | {CHAOS[0]: 4, CHAOS[1]: 2, CHAOS[2]: 2}
"""Of the time that is left when each begins: how much it has, beside those that follow."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make proof", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--only", nargs="*", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    options = parser.parse_args()
    end, broken = time.monotonic() + 60 * options.minutes, []
    for part in sorted(options.only, key=_turn):
        left = end - time.monotonic()
        if part not in TESTS and left < 10:
            print(f"no time is left for {part}: give it more MINUTES, or ONLY some parts")
            broken.append(part)
            continue
        print(f"\n=== {part} ===", flush=True)
        done, ok = run(part, _time(part, left, options.minutes * 60, options.only))
        if ok or part not in TESTS:
            keep(done)
        if not ok:
            broken.append(part)
    page.write()
    print(
        f"\nwrote {page.FILE.relative_to(page.ROOT)}" + (f"; not well: {', '.join(broken)}" if broken else "")
    )
    return 1 if broken else 0


def _turn(part: str) -> int:
    """The tests go first: they take what they take."""
    return (*TESTS, SIMULATION, *CHAOS).index(part)


def _time(part: str, left: float, whole: float, parts: list[str]) -> float:
    if part == SIMULATION:
        return min(left, whole / 6 if len(parts) > 1 else left)
    if part not in CHAOS:
        return left
    ahead = [name for name in CHAOS[CHAOS.index(part) :] if name in parts]
    return left * SHARES[part] / sum(SHARES[name] for name in ahead)


if __name__ == "__main__":
    sys.exit(main())
