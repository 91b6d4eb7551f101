"""What a test leaves behind for the garbage collector, such as an open connection.

Python says so when it collects the object, often in a test that has nothing to do with it. Here garbage is
collected after the last test of each module, so that a leak fails the module that made it, and no other.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_leaks_of_the_run() -> Iterator[None]:
    """Collect what the fixtures of the whole run left behind."""
    yield
    gc.collect()


@pytest.fixture(scope="module", autouse=True)
def no_leaks_of_the_module() -> Iterator[None]:
    """Collect what the module's tests left behind; pytest fails the last one if an object complains."""
    yield
    # What Python keeps of the last failure holds all that the test had open.
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        setattr(sys, name, None)
    gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Forget the values of the test's fixtures; otherwise pytest keeps them until the module has ended."""
    if isinstance(item, pytest.Function):
        item.funcargs.clear()
