"""SQLite: a file in a temporary directory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory


@contextmanager
def server() -> Iterator[str]:
    """Yield the URL of a database file that does not exist yet."""
    with TemporaryDirectory(prefix="relaybox-") as directory:
        yield f"sqlite:///{directory}/relaybox.db"
