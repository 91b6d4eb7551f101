"""Databases of each kind, without the tables and with them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.databases import EVERY_KIND


@pytest.fixture(params=EVERY_KIND)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, fresh_database: Callable[[str], str]) -> str:
    """Return an empty database."""
    return fresh_database(kind)


@pytest.fixture
def migrated(kind: str, migrated_database: Callable[[str], str]) -> str:
    """Return a database with the tables."""
    return migrated_database(kind)
