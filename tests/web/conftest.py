from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from tests.web.stage import Stage


@pytest.fixture(params=["postgresql-18", "sqlite"])
async def stage(request: pytest.FixtureRequest, fresh_database: Callable[[str], str]) -> AsyncIterator[Stage]:
    """The web in front of a fresh database of each kind."""
    stage = Stage(fresh_database(request.param))
    yield stage
    await stage.close()


@pytest.fixture
async def quick(fresh_database: Callable[[str], str]) -> AsyncIterator[Stage]:
    """The web in front of SQLite, for what does not depend on the database."""
    stage = Stage(fresh_database("sqlite"))
    yield stage
    await stage.close()
