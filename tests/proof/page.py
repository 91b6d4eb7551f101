"""``docs/proof.md``, made of all runs that are kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tests.commit import ROOT
from tests.proof.core import CORE, digest
from tests.proof.parts import CHAOS, PARTS, SIMULATION, Run, kept, total

NAME = "docs/proof.md"
FILE = ROOT / NAME
PROMISES = (
    "not atomic", "lost", "phantom", "disorder", "stuck", "failed", "duplicate", "altered", "unsigned",
    "untrue", "late", "unexplained", "missing", "stale", "orphaned", "miscounted",
)  # fmt: skip

HEAD = """# Proof

Figures of `make proof`, which runs the relay's own code against faults: in a simulation with a virtual clock,
and as real processes on real databases with real crashes. [How it works](explanation/proof.md) says what each
part does and what it cannot show; [what it found](explanation/found.md) lists the defects that it brought to
light, each with the test that keeps it away.

This page is written by `make proof` from `proof.jsonl`. Do not edit it. A run that broke a promise, or was of
another core, stands in the list of runs and is left out of every other figure.
"""


def write(file: Path = FILE) -> None:
    file.write_text(render(kept(), digest()))


def is_current(file: Path = FILE) -> bool:
    """True if the page is what would be written now."""
    return file.exists() and file.read_text() == render(kept(), digest())


def render(every: Sequence[Run], core: str) -> str:
    """Return the page: what runs of this core came to, summed, and the list of all runs."""
    runs = [run for run in every if run.core == core and not run.figures.get("broken")]
    made = [section(runs) for section in (_schedules, _faults, _recovery, _bugs, _fidelity, _inputs)]
    sections = [HEAD, _core(runs, core), *made, _list(every, core)]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def _core(runs: Sequence[Run], core: str) -> str:
    files = ", ".join(f"`{name}`" if name.endswith(".py") else f"`{name}/`" for name in CORE)
    done = {run.part for run in runs}
    rows = [[part, "those of this core" if part in done else "none of this core"] for part in PARTS]
    text = f"""
The *core* is what decides whether a promise is kept: of `src/relaybox`, {files}.

`{core}` is the hash of their code, without comments and docstrings, when this page was written.
`python -m tests.proof --check` compares it with the files as they are now.
"""
    return f"## The core\n{text}\n{table(['part', 'figures'], rows)}"


def _schedules(runs: Sequence[Run]) -> str:
    rows = []
    for part in (SIMULATION, *CHAOS):
        of = [run for run in runs if run.part == part]
        if of:
            again, bound = total(of, "again"), total(of, "bound")
            excused = f"{again:,} of {bound:,}" if bound else _figure(of, "again")
            figures = [_figure(of, name) for name in ("schedules", "events", "faults", *PROMISES)]
            rows.append([part, *figures, excused])
    if not rows:
        return ""
    names = ["", "schedules", "events", "faults", *PROMISES, "came again"]
    text = """
A *schedule* draws its faults from its seed. *Not atomic* counts events without the business row of their
transaction and the other way round, *failed* events that failed though none may in these schedules. *Lost*,
*phantom*, *disorder*, *stuck*, *altered*, *unsigned* and *untrue* are what the
[checker](../src/relaybox/testing/checker.py) calls so; *duplicate* is a delivery beyond the first that no
fault excuses. *Late* is what reached a destination that was well long after it was emitted while a broker
beside it was not, and *unexplained* what waited for a broker for a reason that nobody could tell. *Missing*,
*stale* and *orphaned* are documents of a search index that are not as they are in the database, and
*miscounted* those that the comparison left out. *Came again* are the deliveries beyond the first that faults
excuse: in the simulation each by a fault that befell it in flight, with real processes all of them together
by what was in flight at the faults, whose number stands behind *of*; with a broker, each by what befell its
own attempts.
"""
    return f"## Schedules\n{text}\n{table(names, rows)}"


def _figure(runs: Sequence[Run], name: str) -> str:
    """Return a figure summed over the runs, or a dash if it is not counted."""
    return f"{total(runs, name):,}" if any(name in run.figures for run in runs) else "–"


def _faults(runs: Sequence[Run]) -> str:
    sections = []
    for part in (SIMULATION, *CHAOS):
        kinds: Counter[str] = Counter()
        for run in runs:
            kinds.update(run.figures.get("kinds", {}) if run.part == part else {})
        if kinds:
            counted = ", ".join(f"{kind} {count:,}" for kind, count in kinds.most_common())
            sections.append(f"- **{part}**: {counted}")
    return "## Faults\n\n" + "\n".join(sections) + "\n" if sections else ""


def _recovery(runs: Sequence[Run]) -> str:
    moments = sorted(moment for run in runs for moment in run.figures.get("recoveries", ()))
    lines = []
    if moments:
        middle, most = moments[len(moments) // 2], moments[-1]
        lines.append(
            f"After {len(moments)} kills of a database among these faults, the first delivery came"
            f" {middle:.2f} s (median) and {most:.2f} s (at most) after the server took connections again."
        )
    run = _last(runs, "recovery")
    if run is not None:
        rows = [
            [str(what), f"{seconds:.2f} s", str(bound)] for what, seconds, bound in run.figures["recovery"]
        ]
        lines.append(table(["by itself, measured at " + run.commit, "seconds", "bound"], rows))
    return "## Recovery\n\n" + "\n\n".join(lines) if lines else ""


def _bugs(runs: Sequence[Run]) -> str:
    run = _last(runs, "planted-bugs")
    if run is None:
        return ""
    caught = sorted(run.figures["bug"])
    rows = [[str(bug), str(seed), f"{check}"] for bug, seed, check in caught]
    text = (
        f"{len(caught)} bugs were planted, one at a time, and each was caught by the simulation"
        f" under its seed, which finds nothing without it (at {run.commit})."
    )
    return f"## Planted bugs\n\n{text}\n\n{table(['bug', 'seed', 'caught as'], rows)}"


def _fidelity(runs: Sequence[Run]) -> str:
    run = _last(runs, "fidelity")
    if run is None:
        return ""
    rows = [[str(name), f"{compared:,}"] for name, _, compared, *_ in run.figures["fidelity"]]
    text = (
        f"The fake database against real ones, operation by operation (at {run.commit}): all answers agree."
    )
    return f"## Fidelity\n\n{text}\n\n{table(['database', 'operations'], rows)}"


def _inputs(runs: Sequence[Run]) -> str:
    run = _last(runs, "bad-input")
    if run is None:
        return ""
    rows = [[str(area), f"{count:,}"] for area, count, _ in run.figures["inputs"]]
    rows.append(["in all", f"{sum(count for _, count, _ in run.figures['inputs']):,}"])
    text = f"Generated inputs, each delivered unaltered or refused with a typed error (at {run.commit})."
    return f"## Bad input\n\n{text}\n\n{table(['area', 'inputs'], rows)}"


def _list(runs: Iterable[Run], core: str) -> str:
    rows = [
        [
            run.date, f"`{run.commit}`", "this" if run.core == core else run.core or "not recorded", run.part,
            _size(run), run.figures.get("broken", 0), f"{run.seconds / 60:.1f} min", _rate(run),
        ]
        for run in runs
    ]  # fmt: skip
    names = ["date", "commit", "core", "part", "size", "broken", "took", "rate"]
    return "## Runs\n\n" + table(names, rows)


def _size(run: Run) -> str:
    if "schedules" in run.figures:
        last = run.figures["first"] + run.figures["schedules"] - 1
        return f"seeds {run.figures['first']:,} to {last:,}"
    return f"{run.figures['tests']} tests"


def _rate(run: Run) -> str:
    return f"{run.figures['rate']} schedules a second of one core" if "rate" in run.figures else ""


def _last(runs: Iterable[Run], part: str) -> Run | None:
    return next((run for run in reversed(list(runs)) if run.part == part), None)


def table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table with aligned columns."""
    lines = [list(names), *[list(map(str, row)) for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(names))]
    texts = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in lines
    ]
    texts.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(texts) + "\n"
