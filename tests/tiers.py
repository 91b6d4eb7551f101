"""The tier of each test: which command runs it.

``fast``   `make test`: what a contributor waits for.
``full``   `make test-all` adds it: every server, version, API and page.
``chaos``  `make test-chaos`: kills, starves or times, alone on the machine.

A mark of that name decides: on the test, else on its class or module. Without one the directory decides, by
``DIRECTORIES``. A test that needs one of ``FULL_FIXTURES`` or is a case of one of ``FULL_CASES`` is ``full``
by itself, everything else ``fast``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TIERS = ("fast", "full", "chaos")
DIRECTORIES = {"browser": "full", "chaos": "chaos", "deploy": "full", "docs": "full", "examples": "full"}
FULL_FIXTURES = frozenset(
    {"chromium_path", "kafka_url", "opensearch_url", "pgbouncer_url", "postgres15_url", "rabbitmq_url"}
)
FULL_CASES = ("kafka", "opensearch", "postgresql-15", "rabbitmq")


def assign(items: list[pytest.Item]) -> None:
    """Leave each test with the mark of its tier and no other; raise if two marks contradict each other."""
    tiers = [_tier(item) for item in items]
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if mark.name not in TIERS]
    for item, tier in zip(items, tiers, strict=True):
        item.add_marker(tier)


def _tier(item: pytest.Item) -> str:
    given = _given(item)
    if len(given) > 1:
        raise pytest.UsageError(f"{item.nodeid} is in several tiers, {' and '.join(given)}: leave one mark")
    return given[0] if given else _default(item)


def _given(item: pytest.Item) -> list[str]:
    """Return the tiers of the closest node that is marked with one."""
    for node in reversed(item.listchain()):
        if found := sorted({mark.name for mark in node.own_markers} & {*TIERS}):
            return found
    return []


def _default(item: pytest.Item) -> str:
    directory = item.path.relative_to(Path(__file__).parent).parts[0]
    fixtures = getattr(item, "fixturenames", ())
    case = item.nodeid.partition("[")[2]
    heavy = any(word in case for word in FULL_CASES) or not FULL_FIXTURES.isdisjoint(fixtures)
    return DIRECTORIES.get(directory) or ("full" if heavy else "fast")
