"""The findings of a part of the benchmarks: printed tables, figures, and which bars were reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from benchmarks import limiting
from benchmarks.harness import Sample, report

Facts: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Options:
    """How much to measure. ``quick`` only checks that it works; its figures mean little."""

    rows: int = 50_000
    rounds: int = 3
    quick: bool = False

    def size(self, full: int, quick: int) -> int:
        """Return a number of rows or seconds that does not depend on ``rows``."""
        return quick if self.quick else full


@dataclass
class Findings:
    """The findings that are collected while a part runs."""

    figures: Facts = field(default_factory=dict)
    tables: list[Facts] = field(default_factory=list)
    bars: list[Facts] = field(default_factory=list)

    def figure(self, name: str, sample: Sample) -> None:
        """Keep the median and the quartiles of a measurement."""
        low, high = sample.quartiles
        self.figures[name] = {"median": sample.median, "low": low, "high": high}

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print the table, and keep it for the page."""
        report(title, columns, rows, {})
        self.tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})

    def at_least(
        self, bar: str, least: float, of: str, sample: Sample, *, digits: int = 2, limit: str = ""
    ) -> None:
        """Require at least this median; ``limit`` names what limits it, if known."""
        self.judge(bar, f"≥ {least:g} {of}".strip(), sample.show(digits), sample.median >= least, limit)

    def at_most(
        self, bar: str, most: float, of: str, sample: Sample, *, digits: int = 2, limit: str = ""
    ) -> None:
        """Require at most this median."""
        self.judge(bar, f"≤ {most:g} {of}".strip(), sample.show(digits), sample.median <= most, limit)

    def below(self, bar: str, most: float, of: str, value: float, *, digits: int = 0) -> None:
        """Require that one figure stays below a limit."""
        self.judge(bar, f"< {most:g} {of}".strip(), f"{value:,.{digits}f}", value < most)

    def judge(self, bar: str, wanted: str, measured: str, reached: bool, limit: str = "") -> None:
        """Keep a bar of any kind."""
        judged = {"bar": bar, "wanted": wanted, "measured": measured, "reached": reached}
        self.bars.append(judged | {"limit": limit or limiting.text(bar)})

    def facts(self, **more: Any) -> Facts:
        """Return everything, ready for JSON."""
        return {"figures": self.figures, "tables": self.tables, "bars": self.bars, **more}


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that is at least as large as this share of the values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, round(share * len(ordered) + 0.5) - 1))]
