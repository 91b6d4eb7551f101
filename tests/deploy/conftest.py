"""Prometheus's own tool, for the tests of what is written for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import available
from tests.servers import prometheus


@pytest.fixture(scope="session")
def promtool() -> Iterator[str]:
    """The path of promtool."""
    with available("Prometheus", prometheus.promtool()) as path:
        yield path
