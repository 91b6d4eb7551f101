"""Documents change while relays are killed and the engine has trouble; only a broken relay is accused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.run import line
from tests.chaos.schedule import Result
from tests.chaos.search_schedule import FELT, Draw, archive_of, draw, kinds_of, run_search_schedule
from tests.conftest import available
from tests.integration.search_engines import ENGINES, Subject, engine
from tests.servers.meilisearch import Server

DOCUMENTS, STEPS = 2000, 1500  # Changes of each of two writers, besides the first ones
Run = Callable[[str, str, dict[str, Any]], Result]
FAILING, STILL = "failing tasks", "a queue that stands still"
LATE = {"base": "2s", "cap": "2s"}  # Backoff after which the others have long arrived
seeds = count()  # Each schedule has an index of its own


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    with available("meilisearch", meilisearch()) as subject:
        yield subject


@contextmanager
def meilisearch() -> Iterator[Subject]:
    with engine("meilisearch") as subject:
        server = subject.server
        assert isinstance(server, Server)
        failing = {FAILING: lambda: server.fault(tasks=({"code": "internal", "count": 10_000},))}
        yield replace(subject, harms={**subject.harms, **failing})


@pytest.fixture
def run(subject: Subject, migrated_database: Callable[[str], str], tmp_path: Path) -> Run:
    def run(defect: str, kind: str, policy: dict[str, Any]) -> Result:
        plan = Draw(next(seeds), documents=40, steps=150, relays=2, kinds=(kind,), policy=policy)
        with archive_of(migrated_database("postgresql-18"), tmp_path, subject, plan) as archive:
            return run_search_schedule(archive, subject, plan, defect)

    return run


@pytest.mark.parametrize("kind", [FAILING, STILL])
def test_a_relay_that_is_well_is_not_accused(run: Run, kind: str) -> None:
    result = run("", kind, {"backoff": LATE})
    assert result.ok, result.words
    assert result.faults[kind] > 0


@pytest.mark.parametrize(
    ("defect", "kind", "found"),
    [
        ("takes accepted for done", FAILING, {"missing", "stale", "orphaned"}),
        ("keeps the first", STILL, {"missing", "stale", "orphaned"}),
        ("ignores deletes", STILL, {"orphaned"}),
    ],
)
def test_a_broken_relay_is_found_out(run: Run, defect: str, kind: str, found: set[str]) -> None:
    result = run(defect, kind, {})
    assert not result.ok
    assert {finding for finding, number in result.findings.items() if number} <= found


def test_without_order_an_old_document_overwrites_a_newer_one(run: Run) -> None:
    result = run("", FAILING, {"ordered": False, "backoff": LATE})
    assert result.findings["stale"] > 0


def test_the_same_seed_does_the_same_harm(subject: Subject) -> None:
    draws = [draw(seed, subject, 2000) for seed in range(200)]
    assert draws == [draw(seed, subject, 2000) for seed in range(200)]
    assert {kind for one in draws for kind in one.kinds} > set(subject.harms) - {"full at 247"}
    assert all(one.documents + 2 * one.steps == 2000 for one in draws)
    assert all(one.policy.get("ordered", True) for one in draws), "it has no versions"


@pytest.fixture(params=ENGINES)
def each(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with available(request.param, engine(request.param)) as subject:
        yield subject


def test_the_index_is_what_the_database_is_whatever_happened(
    each: Subject, migrated_database: Callable[[str], str], tmp_path: Path
) -> None:
    plan = Draw(1, DOCUMENTS, STEPS, relays=2, kinds=tuple(kinds_of(each)), policy={})
    with archive_of(migrated_database("postgresql-18"), tmp_path, each, plan) as archive:
        result = run_search_schedule(archive, each, plan)
        assert result.ok, (line(result), *result.words)
        assert set(plan.kinds) <= set(result.faults)
        assert result.receipts == result.events > DOCUMENTS
        assert FELT in archive.logs(), ("no trouble was felt", line(result), archive.troubles())
        compared = archive.compare()
        assert compared.documents == compared.matched == archive.count()
        assert compared.consistency == 100.0
