"""Databases that explain what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from relaybox.database.migrations import migrate
from tests.conftest import available
from tests.integration.plans.explaining import Backlog, Database, Mariadb, Postgres, Sqlite
from tests.servers import postgres15, postgres18

CLASSES: dict[str, type[Database]] = {"postgresql": Postgres, "mariadb": Mariadb, "sqlite": Sqlite}


OWN = ("autovacuum=off",)


@pytest.fixture(scope="session")
def postgres18_url() -> Iterator[str]:
    """Run a server for these tests alone: they count pages and log, which other tests would add to."""
    with available("PostgreSQL 18", postgres18.server(own=OWN)) as url:
        yield url


@pytest.fixture(scope="session")
def postgres15_url() -> Iterator[str]:
    """Run a server for these tests alone."""
    with available("PostgreSQL 15", postgres15.server(own=OWN)) as url:
        yield url


@pytest.fixture
def opened(
    fresh_database: Callable[[str], str], migrated_database: Callable[[str], str]
) -> Iterator[Callable[..., Any]]:
    """Opens a database of some kind with a backlog; it is closed after the test."""
    with ExitStack() as stack:

        def open_(kind: str, backlog: Backlog = (), *, analysed: bool = False, **options: Any) -> Database:
            if kind == "mariadb":
                # One from the pool would have to be emptied, and has statistics of what was in it.
                migrate(url := fresh_database(kind))
            else:
                url = migrated_database(kind)
            database = stack.enter_context(closing(CLASSES[kind.partition("-")[0]](url, **options)))
            database.fill(backlog)
            if analysed:
                database.analyse()
            return database

        yield open_
