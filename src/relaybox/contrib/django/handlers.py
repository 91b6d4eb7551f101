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

PLAIN = "Django's transactions are synchronous; make it a plain function"
FIX = "write the dotted path of a function, such as 'shop.handlers.on_paid'"


class Handler(NamedTuple):
    """A function, if the sink calls one, and what it was registered with."""

    function: Callable[..., Any] | None
    events: tuple[str, ...]
    name: str
    options: dict[str, Any]
    sink: str = "handler:"


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
        from relaybox.contrib.django.conf import forget

        called = name or _path(function)
        before = registered.get(called)
        # The same function again, as after a reload of its module, replaces the former.
        if before is not None and (where := _path(before.function)) != _path(function):
            raise ConfigError(f"outbox_handler: {called!r} is the name of {where} already; give name=")
        # Refused here, where the traceback shows the decorator.
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
