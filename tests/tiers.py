"""The tier of each test: which command runs it.

``fast``   `make test`: what a contributor waits for.
``full``   `make test-all` adds it: every server, version, API and page.
``chaos``  `make test-chaos`: kills, starves or times, alone on the machine.

A mark of that name on a test or a module decides, else the directory, by ``DIRECTORIES``. A test that needs a
server of ``FULL_FIXTURES`` or runs on PostgreSQL 15 is ``full``, everything else ``fast``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TIERS = ("fast", "full", "chaos")
DIRECTORIES = {"browser": "full", "chaos": "chaos", "deploy": "full", "docs": "full", "examples": "full"}
FULL_FIXTURES = frozenset(
    {"chromium_path", "kafka_url", "opensearch_url", "pgbouncer_url", "postgres15_url", "rabbitmq_url"}
)


def assign(items: list[pytest.Item]) -> None:
    """Mark each test with its tier; raise if a test has two."""
    for item in items:
        given = sorted({mark.name for mark in item.iter_markers() if mark.name in TIERS})
        if len(given) > 1:
            raise pytest.UsageError(
                f"{item.nodeid} is in several tiers, {' and '.join(given)}: leave one mark"
            )
        if not given:
            item.add_marker(_default(item))


def _default(item: pytest.Item) -> str:
    directory = item.path.relative_to(Path(__file__).parent).parts[0]
    fixtures = getattr(item, "fixturenames", ())
    heavy = "postgresql-15" in item.nodeid or not FULL_FIXTURES.isdisjoint(fixtures)
    return DIRECTORIES.get(directory) or ("full" if heavy else "fast")
