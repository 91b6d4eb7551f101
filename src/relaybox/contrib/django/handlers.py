"""Functions as destinations: by decorator in each app's ``outbox_handlers.py``, or by path in ``OUTBOX``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from relaybox.core.imports import load
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])

FIX = "write the dotted path of a function, such as 'shop.handlers.on_paid'"


class Handler(NamedTuple):
    """A function and what it was registered with."""

    function: Callable[..., Any]
    events: tuple[str, ...]
    name: str
    options: dict[str, Any]


registered: dict[str, Handler] = {}
"""The handlers that a decorator registered, by the names of their destinations."""


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
    """Register a function. The same function again, as after a reload of its module, replaces the former."""
    from relaybox.contrib.django.conf import forget

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


def by_path(given: Mapping[str, Sequence[str]]) -> Iterator[Handler]:
    """Yield the functions of ``HANDLERS``, each once with all its events."""
    events: dict[str, list[str]] = {}
    for pattern, paths in given.items():
        for path in paths:
            events.setdefault(path, []).append(pattern)
    for path, patterns in events.items():
        module, _, name = path.rpartition(".")
        setting = f"OUTBOX: HANDLERS[{patterns[0]!r}] = {path!r}"
        function = load(f"{module}:{name}", setting, FIX)
        if not callable(function) or isinstance(function, type):
            raise ConfigError(f"{setting}: it is no function; {FIX}")
        yield Handler(function, tuple(patterns), path, {})


def autodiscover() -> None:
    """Import ``outbox_handlers`` of every installed app that has one."""
    from django.utils.module_loading import autodiscover_modules

    autodiscover_modules("outbox_handlers")


def with_connections(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function for a relay's own process: it closes old connections, as requests do."""
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
