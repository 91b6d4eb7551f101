"""The fake database answers as PostgreSQL, MariaDB and SQLite do.

RELAYBOX_FIDELITY sets how many histories are drawn for each database: few, and always the same, unless it is
set. RELAYBOX_SHRINK=1 looks for the shortest history that fails, which takes minutes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.simulation.database import Database, Row, Transaction
from tests.simulation.fidelity import Machine
from tests.simulation.statements import Item, Rows
from tests.simulation.twins import Disagreement, Pairing, Real
from tests.simulation.upkeep_statements import UpkeepServer

EXAMPLES = int(os.environ.get("RELAYBOX_FIDELITY", "0"))
HISTORIES = {"postgresql-18": 15, "mariadb": 12, "sqlite": 12}
COMMON = settings(
    stateful_step_count=40,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    report_multiple_bugs=False,
    phases=[Phase.generate, Phase.shrink] if "RELAYBOX_SHRINK" in os.environ else [Phase.generate],
    suppress_health_check=list(HealthCheck),
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def open_real(module_database: Callable[[str], str]) -> Callable[[str], Real]:
    databases: dict[str, str] = {}
    return lambda kind: Real(databases.get(kind) or databases.setdefault(kind, module_database(kind)))


@pytest.fixture
def pair(open_real: Callable[[str], Real]) -> Iterator[Callable[..., Pairing]]:
    pairings: list[Pairing] = []

    def make(kind: str, server: type[UpkeepServer] = UpkeepServer) -> Pairing:
        pairings.append(Pairing(open_real(kind), server))
        return pairings[-1]

    yield make
    for pairing in pairings:
        pairing.close()


@pytest.mark.parametrize("kind", HISTORIES)
def test_the_fake_answers_as_the_real_one(
    kind: str, pair: Callable[..., Pairing], record_property: Callable[[str, object], None]
) -> None:
    pairing = pair(kind)
    histories = EXAMPLES or HISTORIES[kind]
    run_state_machine_as_test(lambda: Machine(pairing), settings=settings(COMMON, max_examples=histories))
    record_property("fidelity", [kind, histories, pairing.compared.total(), dict(pairing.met)])
    assert pairing.compared.total() > 20 * histories
    assert {"claimed", "parked", "held", "lost"} <= (+pairing.met).keys()


class SettlesAnyLease(UpkeepServer):
    def holds(self, row: Row, item: Item) -> bool:
        return row.token is not None and row.status == "pending"


class ParksNothing(UpkeepServer):
    def do_park(self, transaction: Transaction, ids: Any) -> Rows:
        return []


class CountsEveryDeath(UpkeepServer):
    def do_lease(self, transaction: Transaction, ids: Any, token: str, owner: str, seconds: float) -> Rows:
        super().do_lease(transaction, ids, token, owner, seconds)
        for id_ in ids:
            row = self.database.change(transaction, id_)
            row.attempts += row.crashes == 2
        return []


class LocksNothing(UpkeepServer):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        database.lockable = lambda transaction, key: True  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("sqlite", SettlesAnyLease),
        ("sqlite", CountsEveryDeath),
        # These are found within a minute.
        *[("sqlite", ParksNothing), ("postgresql-18", LocksNothing)][: 2 * bool(EXAMPLES)],
    ],
)
def test_a_wrong_fake_is_found(kind: str, wrong: type[UpkeepServer], pair: Callable[..., Pairing]) -> None:
    pairing = pair(kind, wrong)
    with pytest.raises(Disagreement):
        run_state_machine_as_test(lambda: Machine(pairing), settings=settings(COMMON, max_examples=200))
