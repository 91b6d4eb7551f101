"""Functions as destinations: decorated in an app's ``outbox_handlers.py``, or listed in ``OUTBOX``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from asgiref.sync import sync_to_async
from django.db import close_old_connections

from relaybox.core.imports import load
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])

PLAIN = "Django's transactions are synchronous; make it a plain function"
FIX = "write the dotted path of a function, such as 'shop.handlers.on_paid'"


class Handler(NamedTuple):
    """A handler's registration; ``function`` is None if the sink does not call one."""

    function: Callable[..., Any] | None
    events: tuple[str, ...]
    name: str
    options: dict[str, Any]
    sink: str = "handler:"


registered: dict[str, Handler] = {}
"""The decorated handlers by destination."""


def outbox_handler(*events: str, name: str | None = None, **options: Any) -> Callable[[Function], Function]:
    """Make a function a destination: ``@outbox_handler("file.stored")``.

    ``options`` are those of ``relaybox.Destination``; ``name`` defaults to ``module.function``. Put the
    function in an installed app's ``outbox_handlers.py``, or import its module in ``AppConfig.ready``. It
    gets a ``relaybox.Event`` and may be asynchronous.
    """
    if not events or callable(events[0]):
        raise ConfigError("outbox_handler: say which events it takes, as in @outbox_handler('order.*')")

    def register(function: Function) -> Function:
        from relaybox.contrib.django.conf import forget

        called = name or _path(function)
        before = registered.get(called)
        # A reloaded module registers the same function again, which replaces the old one.
        if before is not None and (where := _path(before.function)) != _path(function):
            raise ConfigError(f"outbox_handler: {called!r} is already the name of {where}; give name=")
        # Raise here, where the traceback shows the decorator.
        if Destination(called, "handler:", **options).once and _is_async(function):
            raise ConfigError(f"outbox_handler: {called!r}: once=True: it is an async function: {PLAIN}")
        registered[called] = Handler(function, events, called, options)
        forget()
        return function

    return register


def _path(function: Any) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _is_async(function: Callable[..., Any]) -> bool:
    kinds = (function, getattr(function, "__call__", None))  # noqa: B004
    return any(inspect.iscoroutinefunction(kind) for kind in kinds)


def by_path(given: Mapping[str, Sequence[str]]) -> Iterator[Handler]:
    """Yield a handler for each function in ``HANDLERS``, with all its events."""
    events: dict[str, list[str]] = {}
    for pattern, paths in given.items():
        for path in paths:
            events.setdefault(path, []).append(pattern)
    for path, patterns in events.items():
        module, _, name = path.rpartition(".")
        setting = f"OUTBOX: HANDLERS[{patterns[0]!r}] = {path!r}"
        function = load(f"{module}:{name}", setting, FIX)
        if not callable(function) or isinstance(function, type):
            raise ConfigError(f"{setting}: it is not a function; {FIX}")
        yield Handler(function, tuple(patterns), path, {})


def with_connections(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a handler for a relay's process: close old connections, as Django does around requests."""
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
