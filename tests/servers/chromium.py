"""Chromium, from Debian's package: no server, but had and missed as one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from tests.servers import base


@contextmanager
def program() -> Iterator[str]:
    """Yield the path of RELAYBOX_TEST_CHROMIUM, or of the chromium on PATH."""
    yield os.environ.get("RELAYBOX_TEST_CHROMIUM") or program_path()


def program_path() -> str:
    if not shutil.which("chromium"):
        # Without a font every letter is an empty box.
        base.apt_install("chromium", "fonts-dejavu-core")
    program = shutil.which("chromium")
    if not program:
        raise base.Unavailable("chromium is not on PATH")
    return program
