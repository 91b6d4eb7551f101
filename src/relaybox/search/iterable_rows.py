"""Documents of anything that can be iterated, read page by page and never all at once.

Nothing keeps them as they were read: what the application changes meanwhile may be overwritten. The key of a
page is how many documents were read, so that to go on means to pass over as many, in the same order.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Generator, Iterator, Mapping, Sequence, Sized
from contextlib import asynccontextmanager, suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa

from relaybox.core.imports import told_where
from relaybox.errors import ConfigError
from relaybox.search.rows import AT_ONCE, Also, Calls, Item, Repairs, as_id, as_key
from relaybox.search.source import Source, resolve
from relaybox.search.transactions import Transactions
from relaybox.sinks.threads import Threads

if TYPE_CHECKING:
    from relaybox.outbox import Outbox


@asynccontextmanager
async def open_iterable(outbox: Outbox, source: Source, documents: Any) -> AsyncIterator[IterableRows]:
    """The documents of an iterable; ``documents`` is what its first pass goes through."""
    threads = Threads("documents")
    rows = IterableRows(Transactions(outbox), source, documents, threads)
    try:
        yield rows
    finally:
        await rows.close()
        threads.close()


class IterableRows:
    """``Rows`` (see there) of an iterable."""

    guarded = False

    def __init__(self, transactions: Transactions, source: Source, documents: Any, threads: Threads) -> None:
        self.aggregate_type, self.event_type = source.types(None)
        self._transactions = transactions
        self._source = source
        self._documents = documents
        self._passes = 0
        self._threads = threads
        self._pass: _Pass | None = None
        self._page: tuple[int, Sequence[Item]] = (0, ())

    async def count(self) -> int | None:
        """How many documents there are, where they can say so."""
        return len(self._documents) if isinstance(self._documents, Sized) else None

    async def read(self, size: int, after: Any = None) -> AsyncIterator[Sequence[Item]]:
        """Pages in the order of the iterable."""
        documents = await self._begin(after or 0)
        try:
            while page := await documents.next(size):
                yield page
        finally:
            await documents.close()

    async def emit_after(
        self, after: Any, size: int, calls: Calls, also: Also | None = None
    ) -> Sequence[Item]:
        """Emit the next page; one that was rolled back is kept for the next try."""
        start = after or 0
        if self._page[0] != start or not self._page[1]:
            self._page = (start, await self._next(start, size))
        page = self._page[1]
        if page:
            await self._transactions.run("write", lambda c: self._transactions.emit(c, page, calls, also))
        return page

    async def emit_ids(self, ids: Sequence[str], calls: Repairs) -> int:
        """Look for these among all the documents, and emit."""
        items = list((await self._found(ids)).values())
        there = {item.id for item in items}
        made = calls(items, [id_ for id_ in ids if id_ not in there])
        await self._transactions.run(
            "write", lambda c: self._transactions.emit(c, items, lambda _: made, None)
        )
        return len(made)

    async def existing(self, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """The payloads that there are of these: all documents are read for it."""
        return {id_: item.payload for id_, item in (await self._found(ids)).items()}

    async def close(self) -> None:
        """Let go of the iterable and the connections."""
        if self._pass is not None:
            await self._pass.close()
        await self._transactions.close()

    async def _found(self, ids: Sequence[str]) -> dict[str, Item]:
        wanted = set(ids)
        found: dict[str, Item] = {}
        async for page in self.read(AT_ONCE):
            found |= {item.id: item for item in page if item.id in wanted}
        return found

    async def _next(self, start: int, size: int) -> Sequence[Item]:
        if self._pass is None or self._pass.position != start:
            if self._pass is not None:
                await self._pass.close()
            self._pass = await self._begin(start)
        return await self._pass.next(size)

    async def _begin(self, start: int) -> _Pass:
        begun = _Pass(self._source, await self._again(), self._threads)
        await begun.skip(start)
        return begun

    async def _again(self) -> Any:
        """The documents from their beginning."""
        self._passes += 1
        if self._passes == 1:
            return self._documents
        if callable(self._source.documents):
            return await resolve(self._source)
        if isinstance(self._documents, Iterator | AsyncIterator):
            fix = "give the function that makes it, or a list"
            raise ConfigError(f"{self._source.told}: an iterator can be read only once; {fix}")
        return self._documents


class _Pass:
    """One pass through the documents; synchronous ones are read in a thread."""

    def __init__(self, source: Source, documents: Any, threads: Threads) -> None:
        self.position = 0
        self._source = source
        self._threads = threads
        if isinstance(documents, AsyncIterable):
            self._async: Any = aiter(documents)
            self._sync: Any = None
        else:
            self._async, self._sync = None, documents

    async def next(self, size: int) -> Sequence[Item]:
        """The next documents."""
        things = await self._things(size)
        items = [self._item(thing, self.position + number) for number, thing in enumerate(things, 1)]
        self.position += len(things)
        return items

    async def skip(self, count: int) -> None:
        """Pass over as many."""
        while self.position < count:
            passed = len(await self._things(min(AT_ONCE, count - self.position)))
            if not passed:
                return
            self.position += passed

    async def close(self) -> None:
        """Let a generator end; one that is still running ends by itself."""
        with suppress(Exception):
            if self._async is not None and hasattr(self._async, "aclose"):
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
            told = f"it cannot be read on after {self.position:,} documents: {told_where(error)}"
            raise ConfigError(f"{self._source.told}: {told}") from error
        return things

    def _read(self, size: int) -> list[Any]:
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
            raise ConfigError(f"{self._source.told}: document {number:,} has no {name!r}; {fix}")
        return Item(
            as_id(id_, as_key(id_, self._source)), self._source.payload(thing, id_, lambda one: one), number
        )
