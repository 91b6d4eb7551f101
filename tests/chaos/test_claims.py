"""Many processes claim the rows of many keys at once, and die, stall and retry while they do.

The database keeps the history (``history.py``), and ``checker.py`` finds what was done out of turn.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.chaos import crew, history
from tests.chaos.checker import Disorder, prove
from tests.chaos.crew import Plan, make_outbox
from tests.chaos.history import Answer, Change, Row
from tests.commit import ROOT
from tests.databases import SERVERS, engine

pytestmark = pytest.mark.slow


class Trial:
    """Runs a plan on a new database and judges what happened; ``summary`` says it in a line."""

    def __init__(self, url: str, logs: Path, **options: Any) -> None:
        self._plan = Plan(url, str(logs), seed=20_000, **options)
        self._seconds = 0.0
        self.done: Counter[str] = Counter()

    def run(self) -> None:
        """Fill the database, let the processes loose, wait for their end."""
        outbox = make_outbox(self._plan.url)
        with engine(self._plan.url).begin() as connection:
            crew.prepare(connection, outbox, self._plan)
            history.install(connection)
        plan = Path(self._plan.logs) / "plan.json"
        plan.write_bytes(msgspec.json.encode(self._plan))
        start = time.monotonic()
        subprocess.run([sys.executable, "-m", "tests.chaos.crew", plan], cwd=ROOT, check=True)
        self._seconds = time.monotonic() - start

    def judge(self, *expect: str) -> None:
        with engine(self._plan.url).connect() as connection:
            changes = history.changes(connection)
            rows = history.rows(connection, make_outbox(self._plan.url).tables.event)
        answers = list(self._answers())
        self._count(rows, changes)
        try:
            prove(rows, changes, answers, expect)
        except Disorder as disorder:
            self.done["violations"] = len(disorder.violations)
            raise

    def summary(self, name: str) -> str:
        counts = ", ".join(f"{count:,} {what}" for what, count in self.done.items())
        return f"{name}: {counts}, {self._seconds:.1f} s"

    def _answers(self) -> Iterator[Answer]:
        for file in sorted(Path(self._plan.logs).glob("*.jsonl")):
            for line in file.read_bytes().splitlines():
                said: dict[str, Any] = msgspec.json.decode(line)
                if said["what"] == "settles":
                    self.done["retries"] += said["retries"]
                    self.done["leases lost"] += len(said["lost"])
                    yield Answer(file.stem, said["token"], said["settled"], said["lost"])
                else:
                    self.done[said["what"]] += 1

    def _count(self, rows: list[Row], changes: list[Change]) -> None:
        claims = [change for change in changes if change.is_claim]
        counts = {
            "rows": len(rows),
            "failed": sum(row.status == "failed" for row in rows),
            "claims": len({change.token for change in claims}),
            "claimants": len({(change.owner or "").partition(".")[0] for change in claims}),
        }
        self.done = Counter({**counts, **self.done, "violations": 0})


@pytest.fixture
def trial(migrated_database: Callable[[str], str], tmp_path: Path) -> Callable[..., Trial]:
    return lambda kind, **options: Trial(migrated_database(kind), tmp_path, **options)


@pytest.mark.parametrize("kind", SERVERS)
def test_each_row_is_claimed_once_at_a_time_and_each_key_in_order(
    kind: str, trial: Callable[..., Trial], say: Callable[[str], None]
) -> None:
    run = trial(kind, bulk=15_000, emitted=5_000)
    run.run()
    try:
        run.judge("delivered")
    finally:
        say(run.summary(kind))
    assert run.done["rows"] == 20_000
    assert run.done["claimants"] == 8
    assert all(run.done[misfortune] for misfortune in ("crashes", "zombies", "retries", "leases lost"))


@pytest.mark.parametrize("kind", SERVERS)
def test_a_key_goes_on_in_order_past_events_that_failed_where_it_skips_them(
    kind: str, trial: Callable[..., Trial], say: Callable[[str], None]
) -> None:
    run = trial(kind, bulk=1_400, emitted=600, keys=20, fail=0.02, on_failed="skip")
    run.run()
    try:
        run.judge("delivered", "failed")
    finally:
        say(run.summary(f"{kind}, skipping"))
    assert run.done["failed"]


@pytest.mark.parametrize("kind", SERVERS)
def test_plain_skip_locked_fails_the_same_test(
    kind: str, trial: Callable[..., Trial], say: Callable[[str], None]
) -> None:
    run = trial(kind, bulk=1_400, emitted=600, keys=20, ordered=False)
    run.run()
    with pytest.raises(Disorder) as broken:
        run.judge("delivered")
    say(run.summary(f"{kind}, plain SKIP LOCKED"))
    assert "out of turn" in {violation.rule for violation in broken.value.violations}


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Writes a line that is seen whatever is captured."""

    def write(line: str) -> None:
        with capsys.disabled():
            sys.stdout.write(f"\n{line}\n")

    return write
