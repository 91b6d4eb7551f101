"""Read documents from an iterable, page by page.

Nothing locks them: changes that the application makes meanwhile may be overwritten. The key of a page is the
number of documents read so far. To resume, that many are skipped, so the order must be the same.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterator, Mapping, Sequence, Sized
from contextlib import aclosing, asynccontextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from relaybox.core.imports import error_with_line
from relaybox.errors import ConfigError
from relaybox.search.source import AT_ONCE, Also, Calls, Item, Repairs, Source, resolve
from relaybox.search.transactions import Transactions
from relaybox.sinks.threads import Threads

if TYPE_CHECKING:
    from relaybox.outbox import Outbox


@asynccontextmanager
async def open_iterable(outbox: Outbox, source: Source, documents: Any) -> AsyncIterator[IterableRows]:
    """Open the documents of an iterable; the first pass reads ``documents``."""
    async with (
        aclosing(Transactions(outbox)) as transactions,
        aclosing(IterableRows(transactions, source, documents)) as rows,
    ):
        yield rows


class IterableRows:
    """``Rows`` of an iterable."""

    guarded = False

    def __init__(self, transactions: Transactions, source: Source, documents: Any) -> None:
        self.aggregate_type, self.event_type = source.types(None)
        self._transactions = transactions
        self._source = source
        self._documents = documents
        self._passes = 0
        self._threads = Threads("documents")
        self._pass: _Pass | None = None
        self._page: tuple[int, Sequence[Item]] = (0, ())

    async def count(self) -> int | None:
        """Return the number of documents if they have a length."""
        return len(self._documents) if isinstance(self._documents, Sized) else None

    async def read(self, size: int, after: Any = None) -> AsyncIterator[Sequence[Item]]:
        """Yield pages in the order of the iterable."""
        documents = await self._begin(after or 0)
        try:
            while page := await documents.next(size):
                yield page
        finally:
            await documents.close()

    async def emit_after(self, after: Any, size: int, calls: Calls, also: Also) -> Sequence[Item]:
        """Emit the next page; a page that was rolled back is kept for the next try."""
        start = after or 0
        if self._page[0] != start or not self._page[1]:
            if self._pass is None or self._pass.position != start:
                await self._end_pass()
                self._pass = await self._begin(start)
            self._page = (start, await self._pass.next(size))
        page, transactions = self._page[1], self._transactions
        if page:
            await transactions.run("write", lambda c: transactions.emit_page(c, page, calls, also))
        return page

    async def emit_ids(self, ids: Sequence[str], calls: Repairs) -> int:
        """Find the documents with these ids among all, and emit."""
        found = await self._found(ids)
        made = calls(list(found.values()), [id_ for id_ in ids if id_ not in found])
        return await self._transactions.run("write", lambda c: self._transactions.emit(c, made))

    async def existing(self, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the payloads of those that exist; this reads all documents."""
        return {id_: item.payload for id_, item in (await self._found(ids)).items()}

    async def aclose(self) -> None:
        """Close the iterable and the threads."""
        await self._end_pass()
        self._threads.close()

    async def _end_pass(self) -> None:
        if self._pass is not None:
            await self._pass.close()

    async def _found(self, ids: Sequence[str]) -> dict[str, Item]:
        wanted = set(ids)
        found: dict[str, Item] = {}
        async for page in self.read(AT_ONCE):
            found |= {item.id: item for item in page if item.id in wanted}
        return found

    async def _begin(self, start: int) -> _Pass:
        documents = self._documents
        self._passes += 1
        if self._passes > 1 and callable(self._source.documents):
            documents = await resolve(self._source)
        elif self._passes > 1 and isinstance(documents, Iterator | AsyncIterator):
            fix = "pass a list, or the function that returns the iterator"
            raise ConfigError(f"{self._source.label}: an iterator can be read only once; {fix}")
        begun = _Pass(self._source, documents, self._threads)
        await begun.skip(start)
        return begun


class _Pass:
    """One pass through the documents; a thread reads synchronous ones."""

    def __init__(self, source: Source, documents: Any, threads: Threads) -> None:
        self.position = 0
        self._source = source
        self._threads = threads
        self._async: Any = aiter(documents) if isinstance(documents, AsyncIterable) else None
        self._sync: Any = documents

    async def next(self, size: int) -> Sequence[Item]:
        things = await self._things(size)
        items = [self._item(thing, self.position + number) for number, thing in enumerate(things, 1)]
        self.position += len(things)
        return items

    async def skip(self, count: int) -> None:
        while self.position < count and (things := await self._things(min(AT_ONCE, count - self.position))):
            self.position += len(things)

    async def close(self) -> None:
        """Close a generator; one that is still running ends by itself."""
        with suppress(Exception):
            if hasattr(self._async, "aclose"):
                await self._async.aclose()
            elif isinstance(self._sync, Generator):
                await self._threads.call(self._sync.close)

    async def _things(self, size: int) -> list[Any]:
        try:
            if self._async is None:
                return await self._threads.call(self._read, size)  # type: ignore[no-any-return]
            things: list[Any] = []
            while len(things) < size:
                things.append(await anext(self._async))
        except StopAsyncIteration:
            return things
        except Exception as error:
            problem = f"it cannot be read on after {self.position:,} documents: {error_with_line(error)}"
            raise ConfigError(f"{self._source.label}: {problem}") from error
        return things

    def _read(self, size: int) -> list[Any]:
        """Read on, in the thread. An ``__iter__`` that is a generator is closed there too."""
        if not isinstance(self._sync, Iterator):
            self._sync = iter(self._sync)
        return list(islice(self._sync, size))

    def _item(self, thing: Any, number: int) -> Item:
        name = self._source.id
        if isinstance(thing, sa.Row):
            thing = thing._mapping
        id_ = thing.get(name) if isinstance(thing, Mapping) else getattr(thing, name, None)
        if id_ is None:
            fix = "name the field of the documents' ids with Source(id=…)"
            raise ConfigError(f"{self._source.label}: document {number:,} has no {name!r}; {fix}")
        return self._source.item(thing, id_, lambda one: one, key=number)
