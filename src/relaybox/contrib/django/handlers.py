"""Functions as destinations: registered by decorator, found in each app's ``outbox_handlers.py``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from relaybox.config import Destination
from relaybox.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


class Handler(NamedTuple):
    """A function and what it was registered with."""

    function: Callable[..., Any]
    events: tuple[str, ...]
    name: str
    options: dict[str, Any]


registered: dict[str, Handler] = {}
"""By the names of their destinations."""


def outbox_handler(*events: str, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
    """Make a function a destination of its own: ``@outbox_handler("file.stored")``.

    ``events`` are the patterns it takes, ``options`` those of ``relaybox.Destination``; the name defaults to
    ``module.function``. The function gets a ``relaybox.Event`` and may be synchronous or asynchronous. It is
    found in ``outbox_handlers.py`` of an installed app, or wherever ``AppConfig.ready`` imports it.
    """
    if not events or callable(events[0]):
        raise ConfigError("outbox_handler: say which events it takes, as in @outbox_handler('order.*')")

    def register(function: Function) -> Function:
        add(function, events, name, options)
        return function

    return register


def add(
    function: Callable[..., Any], events: tuple[str, ...], name: str | None, options: dict[str, Any]
) -> None:
    """Register a function. The same one again, as when its module is reloaded, takes the place of the old."""
    from relaybox.contrib.django.configuration import forget

    called = name or f"{function.__module__}.{function.__qualname__}"
    before = registered.get(called)
    if before is not None and not _same(before.function, function):
        where = f"{before.function.__module__}.{before.function.__qualname__}"
        raise ConfigError(f"outbox_handler: {called!r} is the name of {where} already; give name=")
    # Refused here, where the traceback shows the decorator.
    if Destination(called, "handler:", **options).once and _is_async(function):
        fix = "Django's transactions are synchronous; make it a plain function"
        raise ConfigError(f"outbox_handler: {called!r}: once=True: it is an async function: {fix}")
    registered[called] = Handler(function, events, called, options)
    forget()


def _same(one: Callable[..., Any], other: Callable[..., Any]) -> bool:
    return (one.__module__, one.__qualname__) == (other.__module__, other.__qualname__)


def _is_async(function: Callable[..., Any]) -> bool:
    kinds = (function, getattr(function, "__call__", None))  # noqa: B004
    return any(inspect.iscoroutinefunction(kind) for kind in kinds)


def autodiscover() -> None:
    """Import ``outbox_handlers`` of every installed app that has one."""
    from django.utils.module_loading import autodiscover_modules

    autodiscover_modules("outbox_handlers")


def with_connections(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function for a relay of its own, where no request ends: it leaves no old connection behind."""
    from asgiref.sync import sync_to_async
    from django.db import close_old_connections

    if _is_async(function):

        @functools.wraps(function)
        async def asynchronous(event: Any) -> None:
            try:
                await function(event)
            finally:
                await sync_to_async(close_old_connections)()

        return asynchronous

    @functools.wraps(function)
    def synchronous(event: Any) -> Any:
        close_old_connections()
        try:
            return function(event)
        finally:
            close_old_connections()

    return synchronous
