"""A process that is stopped in the midst of a transaction of the store does not keep its locks for long."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox.schema import make_tables
from relaybox.stores import mysql, postgres
from relaybox.stores.statements import Query

STORES = {
    "postgresql-18": (postgres, "SHOW idle_in_transaction_session_timeout", "5s"),
    "postgresql-15": (postgres, "SHOW idle_in_transaction_session_timeout", "5s"),
    "mariadb": (mysql, "SELECT @@idle_transaction_timeout", 5),
}


@pytest.mark.parametrize("kind", STORES)
async def test_the_database_ends_a_transaction_that_is_left_alone(
    kind: str, fresh_database: Callable[[str], str]
) -> None:
    module, query, limit = STORES[kind]
    store = module.open_store(fresh_database(kind), make_tables(sa.MetaData()))

    def look() -> Generator[Any, Any, Any]:
        [[[value]]] = yield [Query(query, ())]
        return value

    assert await store.driver.run(look) == limit
    await store.close()
