"""A place for the temporary files of an example."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.examples.running import temporary_directory


@pytest.fixture
def directory() -> Iterator[Path]:
    """Yield a directory that only the example writes to."""
    with temporary_directory() as path:
        yield path
