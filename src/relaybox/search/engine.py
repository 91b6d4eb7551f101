"""The contract of a search engine: write changes of documents, and what rebuilding and comparing need.

``open_engine`` finds the one that a destination's URL names.

An engine does not retry; it answers, or raises ``Retry``, ``Reject`` or ``Unavailable``. What it splits,
polls or asks of another host of its cluster is its own affair.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from relaybox.core.imports import import_extra
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.schemes import SEARCH_ENGINES
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, RelayboxError
from relaybox.sinks.sink import Answer, answer_of

TROUBLE = (Reject, Retry, Unavailable)
"""What an engine raises."""


class Change(NamedTuple):
    """What becomes of one document: it is replaced by ``document``, or deleted where that is None.

    ``version`` grows with every event: a larger one is newer. ``document`` holds its id under ``id_field``.
    """

    id: str
    document: Mapping[str, Any] | None
    version: int


class Item(NamedTuple):
    """A change as it is sent; ``at`` is its place in the write."""

    at: int
    id: str
    deletes: bool
    sent: bytes


def encode_changes(
    changes: Sequence[Change], encode: Callable[[Change], bytes], answers: dict[int, Answer]
) -> list[Item]:
    """Encode each change; one that ``encode`` refuses with ``Reject`` is answered at once."""
    items = []
    for at, change in enumerate(changes):
        try:
            items.append(Item(at, change.id, change.document is None, encode(change)))
        except Reject as error:
            answers[at] = answer_of(error)
    return items


def parts_of(items: Sequence[Item], largest: int) -> Iterator[Sequence[Item]]:
    """Split the items into requests of at most ``largest`` bytes; a single item may be larger."""
    begin = size = 0
    for at, item in enumerate(items):
        if at > begin and size + len(item.sent) > largest:
            yield items[begin:at]
            begin, size = at, 0
        size += len(item.sent)
    if items:
        yield items[begin:]


def halves(items: Sequence[Item]) -> list[Sequence[Item]]:
    """Return two halves, without the empty ones."""
    middle = len(items) // 2
    return [half for half in (items[:middle], items[middle:]) if half]


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


def open_engine(destination: Destination) -> Engine:
    """Open the engine that a destination's URL names; nothing is connected to before it is asked."""
    if destination.scheme not in SEARCH_ENGINES:
        fix = f"name one whose sink is {', '.join(f'{known}://' for known in SEARCH_ENGINES)}"
        raise ConfigError(
            f"destination {destination.name!r} is no search index ({destination.scheme}:); {fix}"
        )
    engine: Engine = import_extra(*SEARCH_ENGINES[destination.scheme])(destination)
    return engine


class EngineFailed(RelayboxError):
    """The search engine does not do what is asked of it. The text says why."""


@contextmanager
def translated_errors(engine: Engine, kind: type[RelayboxError] = EngineFailed) -> Iterator[None]:
    """Raise an engine's own errors as one of ``kind`` that names the engine."""
    try:
        yield
    except TROUBLE as error:
        raise kind(f"the search engine at {engine.where}: {error}") from error
