"""What a part of the benchmarks finds: tables as they are printed, figures, and which bars were reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benchmarks import limiting
from benchmarks.harness import Sample, report

Facts: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure; ``quick`` is to see that it works, its figures say little."""

    rows: int = 50_000
    rounds: int = 3
    quick: bool = False

    def size(self, full: int, quick: int) -> int:
        """A number of rows or seconds that does not follow from ``rows``."""
        return quick if self.quick else full


@dataclass
class Findings:
    """Collected while a part runs."""

    figures: Facts = field(default_factory=dict)
    tables: list[Facts] = field(default_factory=list)
    bars: list[Facts] = field(default_factory=list)

    def figure(self, name: str, sample: Sample) -> None:
        """The median and the quartiles of something."""
        low, high = sample.quartiles
        self.figures[name] = {"median": sample.median, "low": low, "high": high}

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print it, and keep it for the page."""
        report(title, columns, rows, {})
        self.tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})

    def at_least(
        self, bar: str, least: float, of: str, sample: Sample, *, digits: int = 2, limit: str = ""
    ) -> None:
        """A bar that the median has to reach; ``limit`` is what keeps it from being more, where known."""
        self.judge(bar, f"≥ {least:g} {of}".strip(), sample.show(digits), sample.median >= least, limit)

    def at_most(
        self, bar: str, most: float, of: str, sample: Sample, *, digits: int = 2, limit: str = ""
    ) -> None:
        """A bar that the median must not exceed."""
        self.judge(bar, f"≤ {most:g} {of}".strip(), sample.show(digits), sample.median <= most, limit)

    def below(self, bar: str, most: float, of: str, value: float, *, digits: int = 0) -> None:
        """A bar that one figure has to stay below."""
        self.judge(bar, f"< {most:g} {of}".strip(), f"{value:,.{digits}f}", value < most)

    def judge(self, bar: str, wanted: str, measured: str, reached: bool, limit: str = "") -> None:
        """A bar of any kind."""
        judged = {"bar": bar, "wanted": wanted, "measured": measured, "reached": reached}
        self.bars.append(judged | {"limit": limit or limiting.text(bar)})

    def facts(self, **more: Any) -> Facts:
        """All of it, as JSON takes it."""
        return {"figures": self.figures, "tables": self.tables, "bars": self.bars, **more}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]
