"""2,000 documents that change at random while relays are killed and the engine has every kind of trouble."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.run import line
from tests.chaos.search_schedule import Draw, archive_of, kinds_of, run_search_schedule
from tests.conftest import available
from tests.integration.search_engines import ENGINES, Subject, engine

pytestmark = pytest.mark.slow

log = logging.getLogger(__name__)

DOCUMENTS = 2000
STEPS = 1500
"""Changes of each of two writers, besides the first ones."""


@pytest.fixture(params=ENGINES)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with available(request.param, engine(request.param)) as subject:
        yield subject


def test_the_index_is_what_the_database_is_whatever_happened(
    subject: Subject, fresh_database: Callable[[str], str], tmp_path: Path
) -> None:
    plan = Draw(1, DOCUMENTS, STEPS, relays=2, kinds=tuple(kinds_of(subject)), policy={})
    with archive_of(fresh_database("postgresql-18"), tmp_path, subject, plan) as archive:
        result = run_search_schedule(archive, subject, plan)
        log.info(line(result))
        assert result.ok, "\n".join(result.words)
        assert set(plan.kinds) <= set(result.faults)
        assert result.receipts == result.events > DOCUMENTS
        assert "again in " in archive.logs(), "no trouble was felt"
        compared = archive.compare()
        assert compared.documents == compared.matched == archive.count()
        assert compared.consistency == 100.0
