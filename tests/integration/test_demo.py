"""The demonstration: what it counts, on histories that went wrong, and that it comes to a good end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from relaybox.demo.verdict import Verdict, compare, milliseconds
from relaybox.demo.workspace import Change, Journal, Reader, Receipt
from tests.waiting import wait_for

SECONDS = 5
"""How long orders are placed in the demo that is run here."""
LIMIT = 240.0
COMMAND = f"""
from relaybox.cli import main
import relaybox.demo
relaybox.demo.BUDGET = {LIMIT - 60}
main()
"""
"""With more patience: what a killed relay leaves parked is made due by a sweep every half a minute."""

COMMITTED = [
    Change(f"{order}-{number}", order, number, "order.paid") for order in (1, 2) for number in (1, 2, 3)
]
TIMES = {change.ref: float(position) for position, change in enumerate(COMMITTED)}


def receipts(*refs: str) -> list[Receipt]:
    """Return receipts as they arrived: each a second after its commit."""
    changes = {change.ref: change for change in COMMITTED}
    return [Receipt(changes[ref], TIMES[ref] + 1) for ref in refs]


ALL = ("1-1", "2-1", "1-2", "1-3", "2-2", "2-3")


def faults(verdict: Verdict) -> dict[str, int]:
    """Return the counts that are not as they should be."""
    counts = ("lost", "phantom", "out_of_order", "duplicates")
    return {name: getattr(verdict, name) for name in counts if getattr(verdict, name)}


@pytest.mark.parametrize(
    ("arrived", "found", "good"),
    [
        (ALL, {}, True),
        (ALL[:-1], {"lost": 1}, False),
        (("1-1", "1-3", "2-1", "2-2", "2-3"), {"lost": 1}, False),
        ((), {"lost": 6}, False),
        (("1-2", "1-1", "1-3", "2-1", "2-2", "2-3"), {"out_of_order": 1}, False),
        (("1-3", "1-1", "1-2", "2-1", "2-2", "2-3"), {"out_of_order": 1}, False),
        (("1-2", "1-3", "1-1", "2-1", "2-2", "2-3"), {"out_of_order": 2}, False),
        (("1-1", "1-2", "1-1", "1-3", "1-1", "2-1", "2-2", "2-3"), {"duplicates": 2}, True),
        (("1-2", "1-1", "1-2", "2-1", "2-2", "2-3"), {"lost": 1, "out_of_order": 1, "duplicates": 1}, False),
    ],
)
def test_losses_reorderings_and_duplicates_are_found_where_they_are(
    arrived: tuple[str, ...], found: dict[str, int], good: bool
) -> None:
    verdict = compare(COMMITTED, receipts(*arrived), TIMES)
    assert (verdict.committed, verdict.delivered) == (6, len(set(arrived)))
    assert (faults(verdict), verdict.good) == (found, good)


@pytest.mark.parametrize(
    "phantom",
    [
        Change("rolled back", 1, 4, "order.paid"),
        Change("1-1", 2, 1, "order.paid"),
        Change("1-1", 1, 2, "order.paid"),
        Change("1-1", 1, 1, "order.shipped"),
    ],
)
def test_whatever_was_not_committed_exactly_so_is_a_phantom(phantom: Change) -> None:
    verdict = compare(COMMITTED, [*receipts(*ALL), Receipt(phantom, 9.0)], TIMES)
    assert (faults(verdict), verdict.good) == ({"phantom": 1}, False)


def test_the_first_arrival_is_timed_and_outages_are_distinguished() -> None:
    changes = COMMITTED[:3]
    arrived = [Receipt(changes[0], 0.5), Receipt(changes[1], 1.25), Receipt(changes[2], 7.0)]
    verdict = compare(changes, [*arrived, Receipt(changes[0], 9.0)], TIMES, [(3.0, 5.0)])
    assert (verdict.calm, verdict.disturbed) == ((0.5, 0.25), (5.0,))
    assert compare(changes[:1], [Receipt(changes[0], -1.0)], TIMES).calm == (0.0,)


def test_verdicts_add_up_to_the_line_of_json() -> None:
    one = compare(COMMITTED, receipts(*ALL, "1-1"), TIMES)
    other = compare(COMMITTED, receipts(*ALL[:-1]), TIMES)
    assert (one + other).summary() == {
        "committed": 12,
        "delivered": 11,
        "lost": 1,
        "phantom": 0,
        "out_of_order": 0,
        "duplicates": 1,
        "p50_ms": 1000.0,
        "p99_ms": 1000.0,
    }
    assert Verdict().summary()["p50_ms"] is None


def test_percentiles_are_of_those_that_were_measured() -> None:
    latencies = [number / 1000 for number in range(100, 0, -1)]
    assert (milliseconds(latencies, 0.5), milliseconds(latencies, 0.99)) == (50.0, 99.0)
    assert milliseconds([0.0123], 0.99) == 12.3


def test_a_journal_is_read_while_it_grows_and_never_a_half_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    reader, journal = Reader(path, Receipt), Journal(path)
    journal.write(Receipt(COMMITTED[0], 1.0))
    with path.open("ab") as file:
        file.write(b'{"change":')
    assert reader.read() == [Receipt(COMMITTED[0], 1.0)]
    assert reader.read() == []
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - len(b'{"change":'))
    journal.write(Receipt(COMMITTED[1], 2.0))
    assert reader.read() == [Receipt(COMMITTED[1], 2.0)]
    assert [receipt.at for receipt in reader.records] == [1.0, 2.0]


@pytest.fixture
def demo(tmp_path: Path) -> Callable[[], subprocess.Popen[str]]:
    """Starts the demo with its temporary directories in the test's own."""

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", COMMAND, "demo", "--seconds", str(SECONDS)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )

    # The server runs as another user, who must get there.
    for directory in (tmp_path, *tmp_path.parents[:3]):
        if directory.stat().st_uid == os.getuid():
            directory.chmod(directory.stat().st_mode | 0o011)
    return start


def left_over(directory: Path) -> list[str]:
    """Return the commands of the processes whose temporary directory this is."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"TMPDIR={directory}".encode() in (process / "environ").read_bytes().split(b"\0"):
                found.append((process / "cmdline").read_text().replace("\0", " "))
    return found


@pytest.mark.chaos
def test_nothing_is_lost_made_up_or_out_of_order(
    demo: Callable[[], subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = demo()
    output, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, output
    summary = json.loads(output.splitlines()[-1])
    assert [*summary] == [
        *("committed", "delivered", "lost", "phantom", "out_of_order", "duplicates", "p50_ms", "p99_ms")
    ]
    assert (summary["lost"], summary["phantom"], summary["out_of_order"]) == (0, 0, 0)
    assert summary["committed"] == summary["delivered"] > 0
    assert summary["committed"] % 3 == 0
    for happened in (
        r"webhook: a forged event was answered 401",
        r"flaky: a forged event was answered 401",
        r"the webhook receiver \(process \d+\) is killed",
        r"the relay \(process \d+\) gets SIGKILL",
        r"another relay \(process \d+\) takes over",
    ):
        assert re.search(happened, output), output
    assert (left_over(tmp_path), list(tmp_path.glob("relaybox-*"))) == ([], [])


@pytest.mark.chaos
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_is_ended_no_process_stays_behind(
    demo: Callable[[], subprocess.Popen[str]], tmp_path: Path, number: int
) -> None:
    process = demo()
    assert process.stdout is not None
    assert any("is killed" in line for line in process.stdout)
    assert {"postgres", "relaybox"} <= set(re.findall(r"postgres|relaybox", " ".join(left_over(tmp_path))))
    process.send_signal(number)
    process.communicate(timeout=LIMIT)
    assert process.returncode not in (0, None)
    wait_for(lambda: not left_over(tmp_path), lambda: f"the end of {left_over(tmp_path)}")
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("relaybox-*")) == []
