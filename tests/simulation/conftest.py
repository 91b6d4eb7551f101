"""Says at the end how much of the fake database was compared with real ones."""

from __future__ import annotations

from typing import Any


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """One line a database."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    calls = [report for report in reports if getattr(report, "when", "") == "call"]
    properties = [pair for report in calls for pair in report.user_properties]
    for kind, histories, compared, met in (value for name, value in properties if name == "fidelity"):
        often = ", ".join(f"{count} {name}" for name, count in sorted(met.items()))
        line = f"{compared:,} operations of {histories} histories compared ({often})"
        terminalreporter.write_line(f"fake database beside {kind}: {line}")
