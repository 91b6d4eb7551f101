"""An outbox to operate, and a directory with a configuration in which to run commands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.databases import EVERY_KIND
from tests.integration.operated import CONFIGURATION, Operated


@pytest.fixture(params=EVERY_KIND)
async def outbox(
    request: pytest.FixtureRequest, migrated_database: Callable[[str], str]
) -> AsyncIterator[Operated]:
    operated = Operated(migrated_database(request.param))
    yield operated
    await operated.close()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a directory that has a configuration."""
    (tmp_path / "relaybox.toml").write_text(CONFIGURATION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DATABASE_URL", raising=False)


@pytest.fixture
def url(
    request: pytest.FixtureRequest,
    here: None,
    monkeypatch: pytest.MonkeyPatch,
    migrated_database: Callable[[str], str],
) -> str:
    """Return the database that the commands use: SQLite, unless a test names another kind."""
    url = migrated_database(getattr(request, "param", "sqlite"))
    monkeypatch.setenv("RELAYBOX_DATABASE", url)
    return url
