"""What ``OUTBOX`` and the registered handlers come to: destinations, routes and functions."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from relaybox.config import Destination, Route, Settings
from relaybox.contrib.django.conf import OutboxSettings, get_settings
from relaybox.contrib.django.handlers import Handler, registered
from relaybox.contrib.django.implicit import implicit
from relaybox.emit.row import RowBuilder
from relaybox.errors import ConfigError
from relaybox.load import load
from relaybox.rollout import Which, changed

FIX = "write the dotted path of a function, such as 'shop.handlers.on_paid'"


class Configuration(NamedTuple):
    """The settings of the core, but for the database, and the handlers by their destinations."""

    settings: Settings
    handlers: dict[str, Callable[..., Any]]
    builder: RowBuilder


def get_configuration() -> Configuration:
    """The configuration as it is now; raises ``ConfigError``."""
    return _make(_version)


# By its version: what another thread is still making of the former settings is not taken for the present one.
@functools.lru_cache(1)
def _make(_: int) -> Configuration:
    given = get_settings()
    handlers = [*registered.values(), *by_path(given)]
    functions = {handler.name: handler.function for handler in handlers}
    destinations = [*given.destinations, *(_destination(handler, given) for handler in handlers)]
    routes = [*given.ROUTES, *(Route(handler.events, handler.name) for handler in handlers)]
    for one in implicit(given.destinations, list(functions)):
        if all(one.name != destination.name for destination in destinations):
            options = {**given.defaults, "concurrency": one.concurrency}
            destinations.append(Destination(one.name, one.sink, **options))
        routes.append(Route(one.events, one.name))
        functions |= {one.name: one.function} if one.function else {}
    settings = Settings(
        destinations=destinations,
        routes=[_changed.get((route.events, route.to), route) for route in routes],
        unrouted=given.UNROUTED,
        notify=given.NOTIFY,
        max_payload=given.MAX_PAYLOAD,
        inbox_window=given.INBOX_WINDOW,
        idempotency_window=given.IDEMPOTENCY_WINDOW,
    )
    return Configuration(settings, functions, RowBuilder(settings))


_changed: dict[tuple[tuple[str, ...], tuple[str, ...]], Route] = {}
"""The routes that were changed in this process, by what they were made of."""
_changing = threading.Lock()
_versions = itertools.count()
_version = next(_versions)


def change(which: Which, **values: Any) -> None:
    """Another ``rollout`` or ``shadow`` of these routes, in this process; raises ``ConfigError``."""
    with _changing:
        settings = changed(get_configuration().settings, which, **values)
        _changed.update({(route.events, route.to): route for route in settings.routes})
        _make_anew()


def forget(**_: Any) -> None:
    """Read the settings and the handlers again at the next use."""
    get_settings.cache_clear()
    _make_anew()


def _make_anew() -> None:
    global _version
    _version = next(_versions)


def forget_changed(setting: str = "", **_: Any) -> None:
    """Other settings are there: what was changed in the former ones is over."""
    if setting == "OUTBOX":
        _changed.clear()
    forget()


def _destination(handler: Handler, given: OutboxSettings) -> Destination:
    return Destination(handler.name, "handler:", **{**given.defaults, **handler.options})


def by_path(given: OutboxSettings) -> Iterator[Handler]:
    """The functions of ``HANDLERS``, each once with all its events."""
    events: dict[str, list[str]] = {}
    for pattern, paths in given.HANDLERS.items():
        for path in paths:
            events.setdefault(path, []).append(pattern)
    for path, patterns in events.items():
        module, _, name = path.rpartition(".")
        setting = f"OUTBOX: HANDLERS[{patterns[0]!r}] = {path!r}"
        function = load(f"{module}:{name}", setting, FIX)
        if not callable(function) or isinstance(function, type):
            raise ConfigError(f"{setting}: it is no function; {FIX}")
        yield Handler(function, tuple(patterns), path, {})
