"""The contract of a search engine: write changes of documents, and what rebuilding and comparing need.

An engine does not retry; it answers, or raises ``Retry``, ``Reject`` or ``Unavailable``. What it splits,
polls or asks of another host of its cluster is its own affair.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from relaybox.sinks.sink import Answer


class Change(NamedTuple):
    """What becomes of one document: it is replaced by ``document``, or deleted where that is None.

    ``version`` grows with every event: a larger one is newer. ``document`` holds its id under ``id_field``.
    """

    id: str
    document: Mapping[str, Any] | None
    version: int


class Engine(Protocol):
    """A search engine, as one destination names it."""

    most: int
    """Changes that one request may hold."""

    where: str
    """Host and port, for messages."""

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Do them all, no two of them of one document: an answer for each, when it is done, not only queued.

        Never creates an index that does not exist if the engine can be told so. What is raised holds for all.
        """
        ...

    async def present(self, names: Sequence[str]) -> Mapping[str, str]:
        """Those of the indexes that exist, each with what tells it apart from a later one of its name."""
        ...

    async def create(self, name: str, *, like: str | None = None) -> None:
        """Make an empty index, with the settings of ``like``; done when it is usable."""
        ...

    async def replace(self, live: str, fresh: str) -> None:
        """``fresh`` takes the place of ``live`` at once, for every search; the old one is dropped then."""
        ...

    async def drop(self, name: str) -> None:
        """Delete the index, if it exists."""
        ...

    async def refresh(self, index: str) -> None:
        """Make visible to ``get``, ``scan`` and ``count`` whatever was written."""
        ...

    async def count(self, index: str) -> int:
        """How many documents it has."""
        ...

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """The documents that exist of these, as they were written."""
        ...

    def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        """The ids of all documents, page by page."""
        ...

    async def check(self) -> None:
        """Reach the engine with its key; raises ``Unavailable`` with the reason."""
        ...

    async def close(self) -> None:
        """Give up the connections."""
        ...
