"""The outbox in tests, on Django's own connection: pytest's fixture ``outbox``, and ``OutboxTestMixin``."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.db import Error, transaction
from django.test.testcases import DatabaseOperationForbidden

from relaybox.contrib.django import drain as draining
from relaybox.contrib.django.conf import get_configuration, get_settings
from relaybox.contrib.django.databases import connection_of, execute, raise_ours
from relaybox.contrib.django.emit import default_alias
from relaybox.contrib.django.outbox import get_outbox, is_busy
from relaybox.core.event_loop import in_loop
from relaybox.core.settings import Destination
from relaybox.database.connect import Execute
from relaybox.errors import ConfigError
from relaybox.sinks.open import Handlers
from relaybox.sinks.sink import Sink
from relaybox.testing.emitted import EmittedEvent, Reader
from relaybox.testing.probe import Drained, OutboxProbe, Tally, no_backoff

SECONDS = 600.0
"""A test that delivers for longer is taken to hang."""

NOTHING_DUE = "nothing was due"
BUSY = "nothing is delivered inside an open atomic(); leave it first"


class DjangoProbe(OutboxProbe):
    """The project's outbox in a test; ``using`` defaults to the routers' choice, else to an allowed alias."""

    def __init__(self, using: str | None = None, real: Collection[str] | None = ()) -> None:
        aliases = [using or default_alias(), *get_settings().DATABASES]
        self._readers = _readers(aliases, strict=using is not None)
        self._using = next(iter(self._readers))
        super().__init__(
            get_outbox(self._using),
            real,
            reader=self._readers[self._using],
            # Not the outbox's: a test may have overridden them.
            settings=lambda: get_configuration().settings,
        )

    def using(self, alias: str) -> Self:
        """Return a probe for another database; answers set for destinations hold in both."""
        if alias not in self._readers:
            self._readers[alias] = _Reader(alias)
        other = copy.copy(self)
        other._using, other._reader, other._outbox = alias, self._readers[alias], get_outbox(alias)
        return other

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Make eager tasks, drains and relays of this process send as this test says, inside the block."""
        before, draining.sink_of = draining.sink_of, self._open_sink
        try:
            with ExitStack() as stack:
                for alias in self._readers:
                    stack.enter_context(super(DjangoProbe, self.using(alias)).installed())
                yield
        finally:
            draining.sink_of = before

    async def adrain(self, *, ignore_backoff: bool = False) -> Drained:
        """Deliver what is due, from asynchronous code; see ``drain``."""
        return await sync_to_async(self.drain, thread_sensitive=True)(ignore_backoff=ignore_backoff)

    def drain(self, *, ignore_backoff: bool = False) -> Drained:
        """Deliver what is due and return the counts, without asserting anything.

        Handlers run in this thread, on its connection and in its transaction. With ``ignore_backoff``, rows
        that wait for their next attempt or behind an open circuit are due now.
        """
        if in_loop():
            raise ConfigError("drain() inside a running event loop: write `await outbox.adrain()`")
        if is_busy(connection_of(self._using)):
            return Drained(note=BUSY)
        if ignore_backoff:
            self._reader.execute(*no_backoff(self._outbox.tables))
        tally = Tally(NOTHING_DUE)
        draining.drain(self._using, seconds=SECONDS, observers=[tally])
        return tally.drained

    async def aclear(self) -> None:
        """Delete all rows, from asynchronous code; see ``clear``."""
        await sync_to_async(self.clear, thread_sensitive=True)()

    def _open_sink(self, using: str, destination: Destination, handlers: Handlers) -> Sink:
        return self._stages.open_sink(destination, handlers, partial(draining.own_sink, using))

    def _hints(self, events: Sequence[EmittedEvent], session: Any) -> Iterator[str]:
        if not events:
            yield f"nothing was emitted on {self._using!r} since the test began"
        yield from self._stages.hints()


class OutboxTestMixin:
    """A mixin that sets ``self.outbox`` in ``setUp``; an override must call ``super().setUp()`` first."""

    outbox: DjangoProbe
    enterContext: Any

    def setUp(self) -> None:
        """Start to read events and to capture sends."""
        super().setUp()  # type: ignore[misc]
        self.outbox = DjangoProbe()
        self.enterContext(self.outbox.installed())


class _Reader(Reader):
    """A reader on Django's connection."""

    def __init__(self, using: str) -> None:
        super().__init__(get_outbox(using), partial(_opened, using))

    async def aread(self, connection: Any = None) -> list[EmittedEvent]:
        """Read in the thread of asynchronous code's synchronous calls."""
        return await sync_to_async(self.read, thread_sensitive=True)(connection)


def _readers(aliases: Sequence[str], strict: bool) -> dict[str, Reader]:
    """Return readers of the databases that the test may use; ``strict`` requires the first."""
    readers: dict[str, Reader] = {}
    refused: list[DatabaseOperationForbidden] = []
    for alias in dict.fromkeys(aliases):
        try:
            readers[alias] = _Reader(alias)
        except DatabaseOperationForbidden as error:
            refused.append(error)
            if strict and not readers:
                break
    if not readers and refused:
        raise refused[0]
    return readers


@contextmanager
def _opened(using: str) -> Iterator[Execute]:
    """Yield this thread's connection, in a savepoint: an error leaves the test's transaction usable."""
    try:
        with transaction.atomic(using=using):
            yield partial(execute, connection_of(using))
    except SynchronousOnlyOperation as error:
        raise ConfigError(
            "asynchronous code cannot call this: await the method with an `a` before its name"
        ) from error
    except Error as error:
        raise_ours(error)
