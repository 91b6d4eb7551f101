"""Where the schedules of a module run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from tests.chaos.cluster import Ground, prepared
from tests.conftest import available


@pytest.fixture(scope="module")
def ground() -> Iterator[Callable[..., Ground]]:
    """Prepares a database of a kind, the first time that a test of the module asks for it."""
    with ExitStack() as stack:

        @cache
        def make(kind: str, warm: tuple[str, ...] = ()) -> Ground:
            return stack.enter_context(available(kind, prepared(kind, plain=True, warm=warm)))

        yield make
