"""What is raised where an index cannot be compared or rebuilt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.errors import RelayboxError
from relaybox.search.engine import Engine

TROUBLE = (Reject, Retry, Unavailable)
"""What an engine raises."""


class EngineFailed(RelayboxError):
    """The search engine does not do what is asked of it. The text says why."""


class ReindexFailed(RelayboxError):
    """The index was not rebuilt; the old one goes on serving. The text says why."""


@contextmanager
def told_of(engine: Engine) -> Iterator[None]:
    """Raise an engine's own errors as one that names it."""
    try:
        yield
    except TROUBLE as error:
        raise EngineFailed(f"the search engine at {engine.where}: {error}") from error
