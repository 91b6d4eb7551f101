"""The page shows the figures, what limits them, who is better, and how two runs differ."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import page
from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample
from benchmarks.limiting import Busy

OPTIONS = Options(rows=10, rounds=1, quick=True)


def parts(ours: float, wait: float) -> dict[str, Facts]:
    drain = Findings()
    drain.figure("relaybox, unordered, kept", Sample([ours]))
    drain.figure("swift, unordered, kept", Sample([100.0]))
    ratio = Sample([ours / 100])
    wanted = "× the fastest peer (swift)"
    drain.at_least("drain, unordered, kept", 1.5, wanted, ratio, limit=Busy(95, 20).limit())
    latency = Findings()
    for title in ("p50", "p99", "longest"):
        latency.figure(f"relaybox, 200/s, {title}", Sample([wait]))
        latency.figure(f"swift, 200/s, {title}", Sample([2.0]))
    latency.below("1,000/s for 5 s: latency p99", 2, "ms", wait, digits=1)
    return {"drain": drain.facts(rows=10, took=1.0), "latency": latency.facts(took=1.0)}


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    for ours, wait in ((90.0, 2.0), (200.0, 1.0)):
        page.write(page.record(parts(ours, wait), OPTIONS, "18", tmp_path), tmp_path)
    return tmp_path


def line(text: str, begin: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(begin))


def test_each_bar_says_what_limits_it(docs: Path) -> None:
    text = (docs / "performance.md").read_text()
    bar = line(text, "| drain, unordered, kept")
    assert "2.00 (2.00–2.00)" in bar
    assert "Python: PostgreSQL takes 20 % of a core, the relay 95 %" in bar
    assert "what came during one round" in line(text, "| 1,000/s for 5 s")


def test_what_has_to_stay_below_a_bar_must_not_reach_it(docs: Path) -> None:
    [_, bar] = page.bars(parts(90.0, 2.0))
    assert (bar["wanted"], bar["measured"], bar["reached"]) == ("< 2 ms", "2.0", False)
    [_, bar] = page.bars(parts(90.0, 1.99))
    assert bar["reached"]


def test_where_a_peer_is_better_is_said_in_words(tmp_path: Path) -> None:
    page.write(page.record(parts(90.0, 3.0), OPTIONS, "18", tmp_path), tmp_path)
    text = (tmp_path / "performance.md").read_text()
    assert "- swift drains unordered, kept faster: 100 events/s, Relaybox 90" in text
    assert "- swift has the shorter p99 of the waits at 200/s: 2.0 ms, Relaybox 3.0 ms" in text
    assert "There is one run only" in text


def test_where_no_peer_is_better_that_is_said_and_the_last_two_runs_stand_side_by_side(docs: Path) -> None:
    text = (docs / "performance.md").read_text()
    assert "In nothing that was measured" in text
    section = text.partition("## Two runs")[2]
    bar = [cell.strip() for cell in line(section, "| drain, unordered, kept").split("|")]
    assert bar[2:6] == ["≥ 1.5 × the fastest peer", "0.90 (0.90–0.90)", "2.00 (2.00–2.00)", "in the second"]
    figure = [cell.strip() for cell in line(section, "| drain: relaybox, unordered, kept").split("|")]
    assert figure[2:5] == ["90.00", "200", "2.22"]


def test_the_profile_is_written_by_hand_and_kept(docs: Path) -> None:
    profile = docs / "performance-profile.md"
    assert profile.read_text().startswith("# Profile before and after")
    profile.write_text("mine")
    page.write(page.record(parts(90.0, 2.0), OPTIONS, "18", docs), docs)
    assert profile.read_text() == "mine"
    assert "(performance-profile.md)" in (docs / "performance.md").read_text()


def test_there_are_pictures(docs: Path) -> None:
    text = (docs / "performance.md").read_text()
    for name in ("drain.png", "drain.svg", "latency.png", "latency.svg"):
        assert f"images/performance-{name}" in text
        assert (docs / "images" / f"performance-{name}").stat().st_size > 1_000


@pytest.mark.parametrize(
    ("busy", "words"),
    [((10, 20), "one waits for the other"), ((90, 20), "Python:"), ((60, 120), "the 2 cores:")],
)
def test_the_limit_is_what_is_busy(
    busy: tuple[float, float], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert Busy(*busy).limit().startswith(words)
