from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from relaybox.indexing.operation import is_dead
from relaybox.journal import STALLED, Operation, OperationState

THEN = datetime(2001, 2, 3, tzinfo=UTC)
OPERATION = Operation(
    id=UUID(int=1),
    action="reindex",
    actor="ann",
    details={"process": "another-host:1:a"},
    state="running",
    total=None,
    capped=False,
    done=0,
    skipped=0,
    started_at=THEN,
    updated_at=THEN,
    finished_at=None,
    error=None,
    seen_at=THEN,
)


@pytest.mark.parametrize(
    ("state", "silent", "dead"),
    [
        ("running", 5.0, False),
        ("stalled", STALLED + 1, True),
        ("cancelled", 5.0, False),
        ("cancelled", STALLED + 1, True),
    ],
)
def test_who_is_dead_is_judged_by_the_databases_clock(
    state: OperationState, silent: float, dead: bool
) -> None:
    seen = THEN + timedelta(seconds=silent)
    assert is_dead(replace(OPERATION, state=state, seen_at=seen)) is dead
