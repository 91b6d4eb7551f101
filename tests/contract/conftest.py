"""Says at the end on which stores the contract ran."""

from __future__ import annotations

from collections import Counter

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {
        outcome: Counter(
            report.nodeid.split("::")[1].removeprefix("Test")
            for report in terminalreporter.getreports(outcome)
            if report.nodeid.startswith("tests/contract/test_stores.py")
        )
        for outcome in ("passed", "failed", "error", "skipped")
    }
    for store in dict.fromkeys(name for names in counts.values() for name in names):
        seen = ", ".join(f"{names[store]} {outcome}" for outcome, names in counts.items() if names[store])
        terminalreporter.write_line(f"store contract on {store}: {seen}")
