"""Databases that explain what they do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from relaybox.migrations import migrate
from tests.integration.plans.explaining import Backlog, Database, Mariadb, Postgres, Sqlite

CLASSES: dict[str, type[Database]] = {"postgresql": Postgres, "mariadb": Mariadb, "sqlite": Sqlite}


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
