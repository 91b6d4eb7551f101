"""Draw the pictures of ``docs/performance.md``, each as PNG and as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.findings import Facts

OURS, THEIRS, LIMIT = "#1b6ca8", "#d08a2e", "#8a8f98"
COLOURS = ("#1b6ca8", "#63a4d4", "#d08a2e", "#a0522d", "#5b8c5a", "#8a6fae", "#8a8f98")
WINDOWS = 40


def draw(parts: Mapping[str, Facts], directory: Path) -> dict[str, list[str]]:
    """Draw what the parts offer; return the names of the files without their endings, by part."""
    drawn = {}
    for part, drawing in (("drain", _drain), ("latency", _latency), ("growth", _growth)):
        if part in parts:
            with _picture(directory / f"performance-{part}") as axes:
                drawing(parts[part], axes)
            drawn[part] = [f"performance-{part}"]
    return drawn


@contextmanager
def _picture(path: Path) -> Iterator[Any]:
    # Only the group bench has it, and importing it takes a while.
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "relaybox", "svg.fonttype": "none", "font.size": 10})
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 5.6), layout="constrained", facecolor="white")
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path.with_suffix(".png"), dpi=120)
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    pyplot.close(figure)


def _drain(facts: Facts, axes: Any) -> None:
    figures = {name: value for name, value in facts["figures"].items() if "against" not in name}
    names = sorted(figures, key=lambda name: figures[name]["median"])
    middles = [figures[name]["median"] for name in names]
    spread = [
        [figures[name]["median"] - figures[name]["low"] for name in names],
        [figures[name]["high"] - figures[name]["median"] for name in names],
    ]
    axes.barh(names, middles, xerr=spread, color=[_colour(name) for name in names], ecolor="#444444")
    for at, middle in enumerate(middles):
        axes.text(middle, at, f"  {middle:,.0f}", va="bottom", fontsize=8)
    axes.set_xlabel("events a second; rows a second with 5 destinations; «tried only» on fewer rows")
    axes.margins(x=0.1)
    axes.set_title(f"Drain of {facts['rows']:,} rows: medians and quartiles")
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def _colour(name: str) -> str:
    if name.startswith("relaybox"):
        return OURS
    return LIMIT if name.startswith("bare loop") else THEIRS


def _latency(facts: Facts, axes: Any) -> None:
    """Draw, for each rate, a group of bars from p50 to p99."""
    from matplotlib.ticker import LogLocator

    figures = {tuple(name.rsplit(", ", 2)): value["median"] for name, value in facts["figures"].items()}
    rates = list(dict.fromkeys(rate for _, rate, _ in figures))
    names = list(dict.fromkeys(name for name, _, _ in figures))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        at = [place for place, rate in enumerate(rates) if (name, rate, "p50") in figures]
        low = [figures[name, rates[place], "p50"] for place in at]
        high = [figures[name, rates[place], "p99"] for place in at]
        where = [place + (number - len(names) / 2 + 0.5) * width for place in at]
        colour = COLOURS[number % len(COLOURS)]
        tall = [top - bottom for bottom, top in zip(low, high, strict=True)]
        axes.bar(where, tall, width * 0.85, bottom=low, color=colour, label=name)
    axes.set_yscale("log", subs=())
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    shown = [value for (*_, title), value in figures.items() if title != "longest"]
    axes.set_ylim(max(min(shown), 0.05) / 1.5, max(shown) * 2.5)
    axes.set_xticks(range(len(rates)), rates)
    axes.set_ylabel("ms, from p50 (foot) to p99 (head)")
    axes.set_title("From the commit to the handler")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(frameon=False, ncols=2)


def _growth(facts: Facts, axes: Any) -> None:
    counts, rates = _windows(facts["points"])
    axes.plot(counts, rates, color=OURS)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.set_xlabel("events delivered and kept")
    axes.set_ylabel("events a second")
    axes.set_title("The rate while the table grows")
    axes.grid(alpha=0.3)


def _windows(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    step = max(1, len(points) // WINDOWS)
    counts, rates = [], []
    for (begin, less), (end, more) in pairwise([*points[:-1:step], points[-1]]):
        if end > begin and more > less:
            counts.append((less + more) / 2)
            rates.append((more - less) / (end - begin))
    return counts, rates
