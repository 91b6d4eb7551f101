"""From a destination to its search engine, and to the sink around it."""

from __future__ import annotations

from relaybox.core.imports import import_extra
from relaybox.core.schemes import SEARCH_ENGINES
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError
from relaybox.search.engine import Engine
from relaybox.search.sink import SearchSink


def open_sink(destination: Destination) -> SearchSink:
    """Open the sink of a search destination."""
    return SearchSink(destination, open_engine(destination))


def open_engine(destination: Destination) -> Engine:
    """Open the engine that a destination's URL names; nothing is connected to before it is asked."""
    if destination.scheme not in SEARCH_ENGINES:
        fix = f"name one whose sink is {', '.join(f'{known}://' for known in SEARCH_ENGINES)}"
        raise ConfigError(
            f"destination {destination.name!r} is no search index ({destination.scheme}:); {fix}"
        )
    engine: Engine = import_extra(*SEARCH_ENGINES[destination.scheme])(destination)
    return engine
