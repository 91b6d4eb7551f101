"""The contract of a search engine. It answers or raises one of ``TROUBLE``; retries are up to the relay."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

from relaybox.core.imports import import_extra
from relaybox.core.outcome import Reject, Retry, Unavailable
from relaybox.core.schemes import SEARCH_ENGINES
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, RelayboxError
from relaybox.sinks.sink import Answer, answer_of

T = TypeVar("T")

TROUBLE = (Reject, Retry, Unavailable)


class Change(NamedTuple):
    """A document to write, or to delete if ``document`` is None.

    A larger ``version`` is newer. ``document`` holds its id under ``id_field``.
    """

    id: str
    document: Mapping[str, Any] | None
    version: int


class Write(NamedTuple):
    """An encoded change; ``at`` is its place in the write."""

    at: int
    id: str
    deletes: bool
    sent: bytes


def encode_changes(
    changes: Sequence[Change], encode: Callable[[Change], bytes], answers: dict[int, Answer]
) -> list[Write]:
    """Encode each change; answer those that ``encode`` refuses with ``Reject``."""
    writes = []
    for at, change in enumerate(changes):
        try:
            writes.append(Write(at, change.id, change.document is None, encode(change)))
        except Reject as error:
            answers[at] = answer_of(error)
    return writes


def parts_of(writes: Sequence[Write], largest: int) -> Iterator[Sequence[Write]]:
    """Split the writes into requests of at most ``largest`` bytes; a single one may be larger."""
    begin = size = 0
    for at, write in enumerate(writes):
        if at > begin and size + len(write.sent) > largest:
            yield writes[begin:at]
            begin, size = at, 0
        size += len(write.sent)
    if writes:
        yield writes[begin:]


def pages(whole: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Cut a sequence into pages of at most ``size``."""
    return (whole[begin : begin + size] for begin in range(0, len(whole), size))


def halves(writes: Sequence[Write]) -> list[Sequence[Write]]:
    """Return the two halves, without an empty one."""
    middle = len(writes) // 2
    return [half for half in (writes[:middle], writes[middle:]) if half]


class Engine(Protocol):
    """A search engine, as one destination configures it."""

    most: int
    """The most changes in one request."""

    where: str
    """Host and port, for messages."""

    async def write(self, index: str, changes: Sequence[Change]) -> Sequence[Answer]:
        """Apply the changes, no two of one document; return an answer for each when it is done, not queued.

        Do not create a missing index if the engine can avoid it. An exception is the answer for all changes.
        """
        ...

    async def present(self, names: Sequence[str]) -> Mapping[str, str]:
        """Return the indexes that exist, each with an identity that a later one of its name does not have."""
        ...

    async def create(self, name: str, *, like: str | None = None) -> None:
        """Create an empty index with the settings of ``like``; return when it is usable."""
        ...

    async def replace(self, live: str, fresh: str) -> None:
        """Put ``fresh`` in the place of ``live``, for every search at once; then drop the old index."""
        ...

    async def drop(self, name: str) -> None:
        """Delete the index, if it exists."""
        ...

    async def refresh(self, index: str) -> None:
        """Make all writes visible to ``get``, ``scan`` and ``count``."""
        ...

    async def count(self, index: str) -> int:
        """Return the number of documents."""
        ...

    async def get(self, index: str, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the documents with these ids that exist, as they were written."""
        ...

    def scan(self, index: str) -> AsyncIterator[Sequence[str]]:
        """Yield the ids of all documents, page by page."""
        ...

    async def check(self) -> None:
        """Reach the engine with its key. Raise ``Unavailable`` with the reason."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...


def open_engine(destination: Destination) -> Engine:
    """Open the engine that a destination's URL names; it connects on the first request."""
    if destination.scheme not in SEARCH_ENGINES:
        fix = f"name one whose sink is {', '.join(f'{known}://' for known in SEARCH_ENGINES)}"
        raise ConfigError(
            f"destination {destination.name!r} is not a search index ({destination.scheme}:); {fix}"
        )
    engine: Engine = import_extra(*SEARCH_ENGINES[destination.scheme])(destination)
    return engine


class EngineFailed(RelayboxError):
    """The search engine failed; the text says why."""


@contextmanager
def translated_errors(engine: Engine, kind: type[RelayboxError] = EngineFailed) -> Iterator[None]:
    """Raise an engine's own errors as ``kind``, with the engine's address."""
    try:
        yield
    except TROUBLE as error:
        raise kind(f"the search engine at {engine.where}: {error}") from error
