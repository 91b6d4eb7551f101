"""Gradual rollout: whether an aggregate's events are sent, routes that change at run time, and shadows.

A delivery in shadow is stored, claimed and settled like any other, but not sent. The mark is a header of the
row. Retries, moves and copies keep it; a replay loses it and is sent.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

import msgspec

from relaybox.core.routing import Routes, bucket, limit
from relaybox.core.settings import Route, Settings, read_routes
from relaybox.core.text import id_field
from relaybox.core.values import wrong
from relaybox.errors import ConfigError, did_you_mean

EVERY = 1.0
"""Seconds between two checks of a file."""
SETTLED = 0.1
"""Seconds since the last change before a file is read; a younger one may be half written."""

Which: TypeAlias = Route | str
"""A route, one of its patterns, or the name of a destination."""

log = logging.getLogger(__name__)


def is_sent(routes: Routes, which: Which, aggregate_id: Any) -> bool:
    """True if the events of an aggregate that ``which`` takes are sent; raise ``ConfigError`` if unknown.

    An event type must be sent to all its destinations. For a route, a pattern with ``*`` or a destination,
    every route it names must take the aggregate, and none may be a shadow.
    """
    at = bucket(id_field("aggregate_id", aggregate_id))
    found = _named(routes.routes, which)
    # A pattern without a star is an event type: ask all routes that take it, not only this one.
    exact = "*" not in str(which) and (not found or which in routes.patterns)
    if exact and isinstance(which, str) and (shares := routes.shares(which)):
        return all(at < share.sent for share in shares)
    if not found:
        raise _unknown(routes.routes, which)
    return all(at < limit(route) and not route.shadow for route in found)


def changed(settings: Settings, which: Which, **values: Any) -> Settings:
    """Return settings with a new ``rollout`` or ``shadow`` of these routes; raise ``ConfigError``."""
    found = set(map(_ends, _named(settings.routes, which)))
    if not found:
        raise _unknown(settings.routes, which)
    routes = (replace(route, **values) if _ends(route) in found else route for route in settings.routes)
    return replace(settings, routes=tuple(routes))


def _ends(route: Route) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return route.events, route.to


def _named(routes: Sequence[Route], which: Which) -> list[Route]:
    if isinstance(which, Route):
        return [route for route in routes if _ends(route) == _ends(which)]
    if not isinstance(which, str):
        raise wrong("route", which, "give a Route, one of its patterns, or a destination's name")
    patterns = [route for route in routes if which in route.events]
    return patterns or [route for route in routes if which in route.to]


def _unknown(routes: Sequence[Route], which: Which) -> ConfigError:
    if isinstance(which, Route):
        seen, *known = (f"{', '.join(route.events)} to {', '.join(route.to)}" for route in (which, *routes))
        return ConfigError(
            f"route = {seen}: the outbox has no such route; known: {'; '.join(known) or 'none'}"
        )
    names = {name for route in routes for name in (*route.events, *route.to)}
    return ConfigError(
        f"route = {which!r}: no route has this pattern or destination{did_you_mean(which, names)}"
    )


class RouteFile:
    """Watches a routes file, and passes the routes with a new rollout or shadow to ``take``.

    Other changes take effect at the next start. A missing or malformed file changes nothing. ``take`` gets
    the routes by their index in the file as it was first read.
    """

    def __init__(
        self,
        path: Path,
        routes: Iterable[Route],
        take: Callable[[Mapping[int, Route]], None],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path.absolute()
        self._routes = list(routes)
        self._take = take
        self._clock = clock
        self._due = -1.0
        self._seen: tuple[int, ...] | None = None
        self._problem = ""
        self._lock = threading.Lock()

    def look(self) -> None:
        """Reload the file if it is time and it changed; never raise because of the file."""
        now = self._clock()
        if now < self._due or not self._lock.acquire(blocking=False):
            return
        try:
            self._due = now + EVERY
            self._read(now)
        except ConfigError as error:
            self._complain(str(error))
        except OSError as error:
            self._seen = None
            self._complain(f"{self._path}: {error.strerror or type(error).__name__}")
        finally:
            self._lock.release()

    def _read(self, now: float) -> None:
        file = self._path.stat()
        if _signature(file) == self._seen:
            return
        if 0 <= time.time() - file.st_mtime < SETTLED:
            self._due = now + SETTLED
            return
        self._seen = _signature(file)
        routes = read_routes(self._path)
        if _signature(self._path.stat()) != self._seen:
            self._seen, self._due = None, now + SETTLED
            return
        if new := _differing(self._routes, routes):
            self._take(new)
        for number, route in new.items():
            self._routes[number] = route
            said = f"rollout = {route.rollout:g}, shadow = {str(route.shadow).lower()}"
            log.info("%s: the route %s now has %s", self._path, ", ".join(route.events), said)
        self._problem = ""

    def _complain(self, problem: str) -> None:
        if problem != self._problem:
            log.warning("routes are unchanged, because the file cannot be used: %s", problem)
        self._problem = problem


def _signature(file: os.stat_result) -> tuple[int, ...]:
    return file.st_mtime_ns, file.st_size, file.st_ino


def _differing(before: Sequence[Route], after: Iterable[Route]) -> dict[int, Route]:
    """Return the routes of ``before``, by index, that now have another rollout or shadow."""
    same = defaultdict(list)
    for route in after:
        same[_ends(route)].append(route)
    paired = {number: (same[_ends(route)] or [route]).pop(0) for number, route in enumerate(before)}
    return {number: new for number, new in paired.items() if new != before[number]}


HEADER = "relaybox-shadow"
MARK = f'"{HEADER}"'
"""Headers without this text cannot have the mark and need no parsing."""


def mark(headers: str) -> str:
    """Return a row's headers with the mark added."""
    return f"{{{MARK}:true}}" if headers == "{}" else f"{headers[:-1]},{MARK}:true}}"


def is_shadow(headers: str) -> bool:
    """True if a row's headers have the mark."""
    if MARK not in headers:
        return False
    try:
        values = msgspec.json.decode(headers)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(values, dict) and values.get(HEADER) is True
