"""Chromium, from Debian's package: no server, but had and missed as one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers import base


@contextmanager
def program() -> Iterator[str]:
    """Yield the path of RELAYBOX_TEST_CHROMIUM, or of the chromium on PATH."""
    yield os.environ.get("RELAYBOX_TEST_CHROMIUM") or program_path()


def program_path() -> str:
    # Without a font every letter is an empty box.
    return base.program("chromium", "chromium", "fonts-dejavu-core")
