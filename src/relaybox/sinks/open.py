"""Open the sink of a destination; its module and its client library are imported only then."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from relaybox.core.imports import import_extra, load
from relaybox.core.schemes import SEARCH_ENGINES, SINKS
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.sinks.sink import Sink

Handlers = Mapping[str, Callable[..., Any]]
OpenSink = Callable[[Destination, Handlers], Sink]


def open_sink(destination: Destination, handlers: Handlers) -> Sink:
    """Open the sink that a destination's URL names."""
    scheme = destination.url.partition(":")[0].lower()
    if scheme == "handler":
        from relaybox.sinks.handler import HandlerSink

        return HandlerSink(destination, handler_of(destination, handlers))
    if scheme in SEARCH_ENGINES:
        search: Sink = import_module("relaybox.search.sink").open_sink(destination)
        return search
    if scheme not in SINKS:
        raise ConfigError(
            f"destination {destination.name!r}: no relay of this release can send to {scheme}://"
        )
    sink: Sink = import_extra(*SINKS[scheme])(destination)
    return sink


def handler_of(destination: Destination, handlers: Handlers) -> Callable[..., Any]:
    """Return the handler registered under the destination's name, else import ``handler:module:name``."""
    if destination.name in handlers:
        return handlers[destination.name]
    setting = f"destination {destination.name!r}: sink = {destination.sink!r}"
    fix = "write handler:package.module:function, or register it with @outbox.handler and give --app"
    found = load(destination.sink.partition(":")[2], setting, fix)
    if not callable(found):
        raise ConfigError(f"{setting}: it is not a function; {fix}")
    return found  # type: ignore[no-any-return]
