"""Every mistake in an ``OUTBOX``, where reading it stops at the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from relaybox.config import Destination, Settings
from relaybox.contrib.django.conf import KEYS, OutboxSettings, implicit, parse
from relaybox.contrib.django.handlers import by_path, registered
from relaybox.errors import ConfigError

SEVERAL = {"DESTINATIONS": "E003", "ROUTES": "E004", "HANDLERS": "E005"}
"""Settings that hold several things, each of which may be wrong by itself."""


class Mistake(NamedTuple):
    """The end of a check's id, and what is wrong."""

    code: str
    text: str


def mistakes(given: Any) -> Iterator[Mistake]:
    """All of them, as far as each can be told without the others."""
    if not isinstance(given, Mapping):
        yield from _of("E001", given)
        return
    for key, value in given.items():
        if key not in KEYS:
            yield from _of("E001", {key: value})
        elif key in SEVERAL and isinstance(value, Mapping):
            for name, one in value.items():
                yield from _of(SEVERAL[key], {key: {name: one}})
        else:
            yield from _of(SEVERAL.get(key, "E002"), {key: value})
    yield from _handlers(given.get("HANDLERS"))
    yield from _routes(given)


def _of(code: str, given: Any) -> Iterator[Mistake]:
    try:
        parse(given)
    except ConfigError as error:
        yield Mistake(code, str(error))


def _handlers(given: Any) -> Iterator[Mistake]:
    """Functions that cannot be had."""
    for events, paths in given.items() if isinstance(given, Mapping) else ():
        for path in [paths] if isinstance(paths, str) else paths if isinstance(paths, list | tuple) else ():
            try:
                list(by_path(OutboxSettings(HANDLERS={events: path}).HANDLERS))
            except ConfigError as error:
                yield Mistake("E005", str(error))


def _routes(given: Mapping[str, Any]) -> Iterator[Mistake]:
    """Routes to nowhere. One to a destination that is wrong itself does lead somewhere."""
    destinations, handlers = given.get("DESTINATIONS"), given.get("HANDLERS")
    try:
        routes = parse({"ROUTES": given.get("ROUTES", ())}).ROUTES
        functions = parse({"HANDLERS": handlers}).HANDLERS.values()
    except ConfigError:
        return
    names = [*(destinations if isinstance(destinations, Mapping) else ()), *registered]
    names += [path for paths in functions for path in paths] + [one.name for one in implicit((), ())]
    known = [Destination(name, "memory:") for name in dict.fromkeys(names) if isinstance(name, str) and name]
    for route in routes:
        try:
            Settings(destinations=known, routes=[route])
        except ConfigError as error:
            yield Mistake("E004", str(error))
