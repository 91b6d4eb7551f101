"""What a test leaves behind for the garbage collector, such as an open connection.

Python says so when it collects the object, often in a test that has nothing to do with it. Here garbage is
collected after the last test of each module, so that a leak fails the module that made it, and no other.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail the module if an object that its tests left behind complains when it is collected."""
    found: list[str] = []

    def keep(unraisable: sys.UnraisableHookArgs) -> None:
        found.append(f"{unraisable.exc_value!r} ({unraisable.err_msg or 'in'} {unraisable.object!r})")

    before, sys.unraisablehook = sys.unraisablehook, keep
    try:
        yield
        gc.collect()
    finally:
        sys.unraisablehook = before
    if found:
        pytest.fail("the tests of this module left something open:\n" + "\n".join(found), pytrace=False)
