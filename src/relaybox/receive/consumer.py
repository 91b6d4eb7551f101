"""Run the handlers of a message once, in one transaction with the inbox's mark."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeAlias, TypeVar

from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession
from sqlalchemy.orm import Session

from relaybox.core.event import Event
from relaybox.core.outcome import Reject, Retry, Unavailable, unfinished, wait
from relaybox.core.routing import Routes
from relaybox.core.settings import Route
from relaybox.core.values import parse_name
from relaybox.errors import ConfigError, shorten
from relaybox.sinks.sink import being_cancelled, describe
from relaybox.wire.tracing import processing

log = logging.getLogger("relaybox.consumer")

Handler = TypeVar("Handler", bound=Callable[..., Any])
Handlers: TypeAlias = list[Callable[[Event, Any], Any]]
"""Functions that take an event and what ``transaction`` opened."""


class Once(Protocol):
    """The part of ``Inbox`` that consumers use."""

    consumer: str | None

    def once(
        self, connection: Any, message: Any, /, *, consumer: str | None = None
    ) -> AbstractContextManager[bool]:
        """Return a block that gets True if the message is new."""

    def aonce(
        self, connection: Any, message: Any, /, *, consumer: str | None = None
    ) -> AbstractAsyncContextManager[bool]:
        """Like ``once``, for an asynchronous connection."""


@dataclass(frozen=True, slots=True)
class Done:
    """The transaction committed, now or before (``duplicate``), or no handler takes the event."""

    duplicate: bool = False


@dataclass(frozen=True, slots=True)
class Later:
    """Try again: a handler raised ``Retry`` or ``Unavailable``, or the transaction could not begin."""

    reason: str
    after: float | None = None
    """Seconds to wait, if the handler set them."""


@dataclass(frozen=True, slots=True)
class Crashed:
    """Try again: a handler raised another exception, or the commit failed. The reason is for the log only."""

    reason: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """Never succeeds: a handler raised ``Reject``, or the message holds no event."""

    reason: str


Verdict: TypeAlias = Done | Later | Crashed | Rejected


class Consumer:
    """Handlers by event type, with the inbox and the transaction that they run in.

    ``transaction`` is a SQLAlchemy ``sessionmaker`` or ``Engine``, or an async one. It can be a function
    whose context manager gives a connection and commits at its end. ``consumer`` is the name under which the
    inbox remembers: one for each set of handlers, because two sets with one name would share the work.
    """

    def __init__(self, *, inbox: Once, transaction: Any, consumer: str | None) -> None:
        self._inbox = inbox
        self._begin = opener(transaction)
        name = inbox.consumer if consumer is None else consumer
        if name is None:
            fix = "pass consumer='…', or set it for all calls with Inbox(consumer='…')"
            raise ConfigError(f"consumer is missing; {fix}")
        self._consumer = parse_name(name, "consumer")
        self._handlers: Handlers = []
        self._routes = Routes([])
        self._asynchronous = False

    def on(self, *events: str) -> Callable[[Handler], Handler]:
        """Register a function for the event types that match: ``@receiver.on("order.*")``.

        It gets the event, and what ``transaction`` opened if it has a second parameter. All functions that
        match run in the order of registration, in one transaction.
        """
        if not events or callable(events[0]):
            raise ConfigError("on: say which events it takes, as in @receiver.on('order.*')")

        def register(function: Handler) -> Handler:
            self._register(function, events)
            return function

        return register

    def _register(self, function: Callable[..., Any], events: tuple[str, ...]) -> None:
        called, asynchronous = _with_connection(function), is_asynchronous(function)
        if self._handlers and asynchronous != self._asynchronous:
            shared = "the handlers of one consumer share a transaction"
            fix = "so that all of them are async functions or none is"
            raise ConfigError(f"on: {shorten(function)}: {shared}, {fix}")
        route = Route(events, to=str(len(self._handlers)))
        self._asynchronous = asynchronous
        self._handlers.append(called)
        self._routes = Routes([*self._routes.routes, route])

    def _of(self, event: Event) -> Handlers:
        return [self._handlers[int(place)] for place in self._routes.destinations(event.type)]

    def _unwanted(self, event: Event) -> Verdict:
        if event.type:
            log.debug("%s: no handler takes %s; event %s is done", self._consumer, event.type, event.id)
            return Done()
        return Rejected("the message does not say its event type, and no handler takes every type ('*')")

    def handle(self, event: Event) -> Verdict:
        """Run the handlers of an event in this thread."""
        if not (handlers := self._of(event)):
            return self._unwanted(event)
        began = ended = False
        try:
            with (
                opened(self._begin) as connection,
                self._inbox.once(connection, event, consumer=self._consumer) as first,
            ):
                began = True
                if first:
                    with processing(event, self._consumer):
                        for handler in handlers:
                            finished(handler(event, connection))
                ended = True
        except Exception as error:
            return self._failed(event, error, began)
        return Done(duplicate=not first) if ended else Crashed(SWALLOWED)

    async def ahandle(self, event: Event) -> Verdict:
        """Run the handlers of an event: async ones in this loop, others in a thread."""
        if not self._of(event):
            return self._unwanted(event)
        return await (self._in_loop(event) if self._asynchronous else self._in_thread(event))

    async def _in_thread(self, event: Event) -> Verdict:
        return await asyncio.to_thread(self.handle, event)

    async def _in_loop(self, event: Event) -> Verdict:
        began = ended = False
        try:
            async with (
                opened(self._begin, asynchronous=True) as connection,
                self._inbox.aonce(connection, event, consumer=self._consumer) as first,
            ):
                began = True
                if first:
                    with processing(event, self._consumer):
                        for handler in self._of(event):
                            await handler(event, connection)
                ended = True
        except (Exception, asyncio.CancelledError) as error:
            if cancelled(error):
                raise
            return self._failed(event, error, began)
        return Done(duplicate=not first) if ended else Crashed(SWALLOWED)

    def _failed(self, event: Event, error: BaseException, began: bool) -> Verdict:
        match error:
            case Reject():
                return Rejected(_noted(error.reason or "the handler rejected it", error))
            case Retry() | Unavailable():
                reason = error.reason or "the handler asks to try again"
                return Later(_noted(reason, error), seconds_of(error.after))
        doing = "the handler failed" if began else "the transaction could not be begun"
        about = self._consumer, event.id, event.type, doing, describe(error)
        log.error("%s: event %s (%s): %s: %s", *about, exc_info=error)
        # If no handler ran, the failure is not about this event.
        return Crashed(describe(error)) if began else Later("the receiver's database is not ready")


SWALLOWED = "a handler failed, and the context manager of transaction swallowed its exception"
_FIX = (
    "handlers that are no async functions need a context manager (`with`): give a sessionmaker, an Engine or "
    "a function made with contextlib.contextmanager",
    "async handlers need an asynchronous context manager (`async with`): give an async_sessionmaker, an "
    "AsyncEngine or a function made with contextlib.asynccontextmanager",
)


def _noted(reason: str, error: BaseException) -> str:
    return "; ".join((reason, *getattr(error, "__notes__", ())))


def opener(transaction: Any) -> Callable[[], Any]:
    """Return what begins a transaction: ``transaction`` itself, or its ``begin``."""
    begin = getattr(transaction, "begin", transaction)
    if not callable(begin):
        fix = "give a sessionmaker, an engine, or a function that returns a context manager"
        raise ConfigError(f"transaction = {shorten(transaction)}: {fix}")
    return begin  # type: ignore[no-any-return]


def opened(begin: Callable[[], Any], *, asynchronous: bool = False) -> Any:
    """Return the block of a transaction, for `with`, or for `async with` if ``asynchronous``."""
    block = begin()
    if not hasattr(type(block), "__aenter__" if asynchronous else "__enter__"):
        raise ConfigError(f"transaction gave {shorten(block)}; {_FIX[asynchronous]}")
    if isinstance(block, Connection | Session):
        block.close()
    if isinstance(block, Connection | Session | AsyncConnection | AsyncSession):
        fix = "give the engine or the sessionmaker itself, or its begin"
        raise ConfigError(f"transaction gave {shorten(block)}, which does not commit at its end; {fix}")
    return block


def finished(result: Any) -> Any:
    """Return a plain handler's result; raise ``ConfigError`` if it would run after the commit."""
    if unfinished(result):
        fix = "write async def, or wait for it"
        raise ConfigError(f"the handler returned an awaitable, which would run after the commit; {fix}")
    return result


def cancelled(error: BaseException) -> bool:
    """True if the caller was cancelled, not only a handler or a client."""
    return isinstance(error, asyncio.CancelledError) and being_cancelled()


def is_asynchronous(function: Callable[..., Any]) -> bool:
    """True if a handler is an async function; raise ``ConfigError`` for a generator."""
    kinds = (function, getattr(function, "__call__", None))  # noqa: B004
    if any(inspect.isgeneratorfunction(kind) or inspect.isasyncgenfunction(kind) for kind in kinds):
        raise ConfigError(f"on: {shorten(function)} yields, so that a call would run none of it")
    return any(inspect.iscoroutinefunction(kind) for kind in kinds)


def _with_connection(function: Callable[..., Any]) -> Callable[[Event, Any], Any]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        raise ConfigError(f"on: {shorten(function)} is not a function that takes an Event") from None
    for given, called in (((None, None), function), ((None,), lambda event, _: function(event))):
        with suppress(TypeError):
            signature.bind(*given)
            return called
    fix = "it must take an Event, and may take the connection as a second parameter"
    raise ConfigError(f"on: {shorten(function)}{signature}: {fix}")


def seconds_of(after: float | timedelta | None) -> float | None:
    """Return the handler's delay in seconds."""
    seconds = after.total_seconds() if isinstance(after, timedelta) else after
    return None if seconds is None else wait(seconds)
