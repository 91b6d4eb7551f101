"""Many processes claim the rows of many keys at once, and die, stall and retry while they do.

The database keeps the history (``history.py``), and ``checker.py`` finds what was done out of turn.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.chaos import checker, crew
from tests.chaos.checker import Answer, Disorder, prove
from tests.chaos.crew import Plan, make_outbox
from tests.commit import ROOT
from tests.databases import SERVERS, engine


class Trial:
    """Runs a plan and judges what happened; ``done`` says what did how often."""

    def __init__(self, url: str, logs: Path, **options: Any) -> None:
        self._plan = Plan(url, str(logs), seed=20_000, **options)
        self.done: Counter[str] = Counter()
        outbox = make_outbox(url)
        with engine(url).begin() as connection:
            crew.prepare(connection, outbox, self._plan)
            checker.install(connection)
        plan = logs / "plan.json"
        plan.write_bytes(msgspec.json.encode(self._plan))
        subprocess.run([sys.executable, "-m", "tests.chaos.crew", plan], cwd=ROOT, check=True)

    def judge(self, *expect: str) -> None:
        with engine(self._plan.url).connect() as connection:
            changes = checker.changes(connection)
            rows = checker.rows(connection, make_outbox(self._plan.url).tables.event)
        answers = list(self._answers())
        self.done["rows"] = len(rows)
        self.done["failed"] = sum(row.status == "failed" for row in rows)
        owners = {(change.owner or "").partition(".")[0] for change in changes if change.is_claim}
        self.done["claimants"] = len(owners)
        prove(rows, changes, answers, expect)

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


@pytest.fixture(params=SERVERS)
def trial(
    request: pytest.FixtureRequest, migrated_database: Callable[[str], str], tmp_path: Path
) -> Callable[..., Trial]:
    return lambda **options: Trial(migrated_database(request.param), tmp_path, **options)


def test_each_row_is_claimed_once_at_a_time_and_each_key_in_order(trial: Callable[..., Trial]) -> None:
    run = trial(bulk=15_000, emitted=5_000)
    run.judge("delivered")
    assert run.done["rows"] == 20_000
    assert run.done["claimants"] == 8
    assert all(run.done[misfortune] for misfortune in ("crashes", "zombies", "retries", "leases lost"))


def test_a_key_goes_on_in_order_past_events_that_failed_where_it_skips_them(
    trial: Callable[..., Trial],
) -> None:
    run = trial(bulk=1_400, emitted=600, keys=20, fail=0.02, on_failed="skip")
    run.judge("delivered", "failed")
    assert run.done["failed"]


def test_plain_skip_locked_fails_the_same_test(trial: Callable[..., Trial]) -> None:
    run = trial(bulk=1_400, emitted=600, keys=20, ordered=False)
    with pytest.raises(Disorder) as broken:
        run.judge("delivered")
    assert "out of turn" in {violation.rule for violation in broken.value.violations}
