"""What a release lacks: figures of the present core for each part, in the numbers that are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tests.proof.parts import DATABASES, PARTS, SIMULATION, Run, total

LEAST = {SIMULATION: 100_000} | dict(zip(DATABASES, (300, 80, 80), strict=True))
"""Schedules without a broken promise. Of every other part one run is enough."""


def lacking(
    runs: Sequence[Run], core: str, parts: Sequence[str] = PARTS, least: Mapping[str, int] = LEAST
) -> Iterator[str]:
    """Yield a line for each part without the figures it needs, and for each run that broke a promise."""
    for part in parts:
        of = [run for run in runs if run.part == part]
        present = [run for run in of if run.core == core]
        kept = [run for run in present if not run.figures.get("broken")]
        for run in present:
            if run not in kept:
                yield f"{part}: {run.figures['broken']} schedules broke a promise on {run.date}"
        if not kept:
            last = f"the last are of {_named(of[-1])}, from {of[-1].date}" if of else "there are none at all"
            yield f"{part}: no figures of the present core; {last}"
        elif (schedules := total(kept, "schedules")) < least.get(part, 0):
            yield f"{part}: {schedules:,} schedules of the present core; {least[part]:,} are asked for"


def _named(run: Run) -> str:
    return f"core {run.core}" if run.core else "a core that was not recorded"
