from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import pytest

from tests.web.stage import Stage


@pytest.fixture(params=["postgresql-18", "sqlite"])
async def stage(
    request: pytest.FixtureRequest, migrated_database: Callable[[str], str]
) -> AsyncIterator[Stage]:
    """Serve a fresh database of each kind."""
    async with Stage(migrated_database(request.param)) as stage:
        yield stage


@pytest.fixture
async def quick(migrated_database: Callable[[str], str]) -> AsyncIterator[Stage]:
    """Serve SQLite, for tests that do not depend on the database."""
    async with Stage(migrated_database("sqlite")) as stage:
        yield stage
