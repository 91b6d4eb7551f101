"""A store holds no more connections than it was allowed, however many operations begin together."""

from __future__ import annotations

import asyncio

import pytest
import sqlalchemy as sa

from relaybox.migrations import migrate
from relaybox.schema import make_tables
from relaybox.store import Claim, Want
from relaybox.stores import mysql, postgres
from tests.integration.shop import Databases

OPEN = {
    "postgresql-18": (
        "postgresql+psycopg",
        postgres,
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend'",
    ),
    "mariadb": (
        "mariadb+pymysql",
        mysql,
        "SELECT count(*) FROM information_schema.processlist WHERE db = DATABASE()",
    ),
}


@pytest.mark.parametrize("kind", OPEN)
async def test_operations_that_begin_together_share_the_connections(
    kind: str, migrated_database: Databases
) -> None:
    database = migrated_database(kind)
    migrate(database)
    driver, module, count = OPEN[kind]
    engine = sa.create_engine(sa.make_url(database).set(drivername=driver))
    store = module.open_store(database, make_tables(sa.MetaData()), connections=2)
    claims = await asyncio.gather(*(store.claim(Want("shop", f"relay-{n}")) for n in range(12)))
    assert claims == [Claim()] * 12
    with engine.connect() as connection:
        held = connection.scalar(sa.text(count)) - 1  # the one that asks
    assert 1 <= held <= 2
    await store.close()
    engine.dispose()
