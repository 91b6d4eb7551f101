"""Relays are killed while handlers run once: there are more deliveries than events, and each effect once."""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sqlalchemy as sa

from tests.chaos.mortal_relay import Death
from tests.chaos.once_relay import Plan
from tests.integration.shop import Shop, until

ROOT = Path(__file__).parents[2]
EVENTS = 60
OPTIONS: dict[str, Any] = {
    "lease": "1s",
    "timeout": "1s",
    "concurrency": 4,
    "batch_size": 10,
    "poll_interval": "20ms",
    "backoff": {"base": "10ms", "cap": "50ms"},
    "max_attempts": 100,
}
SEED = 7


@contextmanager
def relay(plan: Plan, told: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of ``once_relay.py``, killed at the end whatever happened; its words go to a file."""
    command = [sys.executable, "-m", "tests.chaos.once_relay", msgspec.json.encode(plan).decode()]
    with told.open("ab") as file, subprocess.Popen(command, cwd=ROOT, stdout=file) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "asynchronous"),
    [("postgresql-18", True), ("postgresql-18", False), ("mariadb", True), ("sqlite", False)],
)
async def test_effects_are_there_exactly_once_while_deliveries_are_more(
    kind: str, asynchronous: bool, fresh_database: Callable[[str], str], tmp_path: Path
) -> None:
    url, told, chance = fresh_database(kind), tmp_path / "told", random.Random(SEED)
    plan = Plan(url, OPTIONS, asynchronous)
    shop = Shop(url)
    shop.outbox = plan.outbox()
    with shop.engine.begin() as connection:
        connection.execute(sa.text("CREATE TABLE effect (n INTEGER)"))
    shop.emit(EVENTS, keys=EVENTS)

    deaths: list[Death] = ["after acknowledgement", "after claim"]
    for death in deaths:
        with relay(msgspec.structs.replace(plan, death=death), told) as process:
            assert process.wait(60) == -signal.SIGKILL
    before = told.stat().st_size
    with relay(plan, told):
        await until(lambda: told.stat().st_size > before, "a delivery")
        await asyncio.sleep(chance.uniform(0, 0.05))
    with relay(plan, told):
        await until(lambda: shop.states() == {"delivered": EVENTS}, "all delivered", 60.0)

    with shop.engine.connect() as connection:
        effects = Counter(connection.scalars(sa.text("SELECT n FROM effect")))
    deliveries = [int(line) for line in told.read_text().splitlines()]
    shop.engine.dispose()
    assert effects == Counter(range(EVENTS))
    assert len(deliveries) > EVENTS
    assert set(deliveries) == set(range(EVENTS))
