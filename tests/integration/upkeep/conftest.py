"""The databases on which upkeep is tested."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from relaybox.database.migrations import migrate
from tests.databases import EVERY_KIND
from tests.integration.upkeep.bench import Bench


@pytest.fixture(scope="module", params=EVERY_KIND)
def database(request: pytest.FixtureRequest, module_database: Callable[[str], str]) -> Iterator[Bench]:
    url = module_database(request.param)
    migrate(url)
    bench = Bench(url)
    yield bench
    bench.engine.dispose()


@pytest.fixture
async def bench(database: Bench) -> AsyncIterator[Bench]:
    database.clear()
    yield database
    for store in database.stores:
        await store.close()
    database.stores.clear()
