"""Compare two runs of the benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from benchmarks.findings import Facts
from tests.proof.page import table

FIGURES = ("drain", "relays", "latency", "emit", "http")
"""Parts with figures that are compared one by one."""


def two(runs: Sequence[Facts]) -> str:
    """Return a section about the last two of the runs."""
    if len(runs) < 2:
        return "## Two runs\n\nThere is one run only, so far."
    before, last = runs[-2:]
    names = [f"{run['date']}, `{run['commit']}`" for run in (before, last)]
    bars = table(["bar", "wanted", *names, "reached"], _bars(before["parts"], last["parts"]))
    columns = ["figure", *names, "second / first"]
    figures = table(columns, _figures(before["parts"], last["parts"]))
    text = "The last two runs: what both were held to, and the medians of both."
    return f"## Two runs\n\n{text}\n\n{bars}\n{figures}"


def _bars(before: Mapping[str, Facts], last: Mapping[str, Facts]) -> Iterator[list[str]]:
    first = {_wanted(bar): bar for part in before.values() for bar in part["bars"]}
    for second in (bar for part in last.values() for bar in part["bars"]):
        one = first.get(_wanted(second))
        if one is not None:
            reached = {(True, True): "twice", (False, False): "not reached"}
            once = "in the first" if one["reached"] else "in the second"
            shown = reached.get((one["reached"], second["reached"]), once)
            yield [*_wanted(second), one["measured"], second["measured"], shown]


def _wanted(bar: Facts) -> tuple[str, str]:
    """Return the bar's text without the peer's name, which may differ between runs."""
    return bar["bar"], re.sub(r" \(.*\)$", "", bar["wanted"])


def _figures(before: Mapping[str, Facts], last: Mapping[str, Facts]) -> Iterator[list[str]]:
    for part in FIGURES:
        if part in before and part in last:
            first = before[part]["figures"]
            for name, second in last[part]["figures"].items():
                if name in first and first[name]["median"]:
                    one, other = first[name]["median"], second["median"]
                    yield [f"{part}: {name}", _round(one), _round(other), f"{other / one:.2f}"]


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.2f}"
