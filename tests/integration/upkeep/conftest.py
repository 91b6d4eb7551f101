"""The databases on which upkeep is tested."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import sqlalchemy as sa

from relaybox.migrations import migrate
from relaybox.schema import make_tables
from tests.integration.upkeep.bench import Bench


@pytest.fixture(scope="module", params=["postgresql-18", "postgresql-15", "mariadb", "sqlite"])
def database(request: pytest.FixtureRequest, module_database: Callable[[str], str]) -> Iterator[Bench]:
    url = module_database(request.param)
    migrate(url)
    bench = Bench(sa.make_url(url), make_tables(sa.MetaData()))
    yield bench
    bench.engine.dispose()


@pytest.fixture
async def bench(database: Bench) -> AsyncIterator[Bench]:
    database.clear()
    yield database
    for store in database.stores:
        await store.close()
    database.stores.clear()
