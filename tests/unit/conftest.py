"""Fixtures that several modules use."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.upkeep import Clock, FakeUpkeep


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def upkeep() -> Any:
    return FakeUpkeep()
