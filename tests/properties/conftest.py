"""Counts the inputs of a run, whichever of its processes fed them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import pytest

from tests.properties import volume
from tests.properties.volume import Batch

Feed: TypeAlias = Callable[..., None]
Database: TypeAlias = Callable[[str], str]


@pytest.fixture
def feed(record_property: Callable[[str, object], None]) -> Feed:
    """Feeds an area its share of the inputs, and sees to it that they were as many as asked for."""

    def run(area: str, batch: Batch, *, size: int = 50) -> None:
        fed = volume.feed(area, batch, size)
        assert fed >= volume.share(area)
        record_property("inputs", [area, fed, volume.seed()])

    return run


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line for each area, and their sum."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    properties = [pair for report in reports for pair in getattr(report, "user_properties", ())]
    inputs = [value for name, value in properties if name == "inputs"]
    fed = {area: (count, seed) for area, count, seed in inputs}
    if not fed:
        return
    terminalreporter.section("generated inputs")
    for area, (count, _) in fed.items():
        terminalreporter.write_line(f"{count:>8,}  {area}")
    seeds = {seed for _, seed in fed.values()} - {None}
    drawn = f", RELAYBOX_SEED={seeds.pop()}" if seeds else ", always the same"
    terminalreporter.write_line(f"{sum(count for count, _ in fed.values()):>8,}  in all{drawn}")
