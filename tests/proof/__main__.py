"""``python -m tests.proof --minutes 30 [--only PART ...]``: run the parts, tell figures, write the page.

``--only`` without a part writes the page from the runs that are kept. ``--check`` runs nothing: it says which
figures a release lacks, because they are missing or of another core, and exits with 1 if it lacks any.

Simulation gets a sixth of the time, the parts that are tests take what they take, and the schedules of real
processes share the rest: PostgreSQL has four parts of it, MariaDB and SQLite two each, every broker one, and
the search engines together one.
The exit status is 1 if a promise was broken (its seeds are printed), or if there was no time for a part.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from tests.proof import page
from tests.proof.check import LEAST, lacking
from tests.proof.core import digest
from tests.proof.parts import CHAOS, PARTS, SIMULATION, TESTS, CoreChanged, keep, kept, run

SHARES = dict.fromkeys(CHAOS, 1) | {CHAOS[0]: 4, CHAOS[1]: 2, CHAOS[2]: 2}
"""Of the time that is left when each begins: how much it has, beside those that follow."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="make proof", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument(
        "--schedules", type=int, default=LEAST[SIMULATION], help="simulate so many at most (%(default)s)"
    )
    parser.add_argument(
        "--only", nargs="*", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument("--check", action="store_true", help="run nothing; say what a release lacks")
    options = parser.parse_args()
    return _check(options.only) if options.check else _run(options)


def _check(parts: Sequence[str]) -> int:
    core = digest()
    lines = list(lacking(kept(), core, parts))
    if not page.is_current():
        lines.append(f"{page.NAME}: it is not what `python -m tests.proof --only` writes now")
    print(*(lines or [f"the figures are those of the present core, {core}"]), sep="\n")
    return 1 if lines else 0


def _run(options: argparse.Namespace) -> int:
    end, broken = time.monotonic() + 60 * options.minutes, []
    for part in sorted(options.only, key=_turn):
        left = end - time.monotonic()
        if part not in TESTS and left < 10:
            print(f"no time is left for {part}: give it more MINUTES, or ONLY some parts")
            broken.append(part)
            continue
        print(f"\n=== {part} ===", flush=True)
        try:
            done, ok = run(part, _time(part, left, options.minutes * 60, options.only), options.schedules)
        except CoreChanged as error:
            print(error)
            return 1
        if ok or part not in TESTS:
            keep(done)
        if not ok:
            broken.append(part)
    page.write()
    print(f"\nwrote {page.NAME}" + (f"; not well: {', '.join(broken)}" if broken else ""))
    return 1 if broken else 0


def _turn(part: str) -> int:
    """Return the part's turn: the tests go first, as their time is fixed."""
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
