"""Which destinations take an event.

A pattern is an event type in which ``*`` stands for any run of characters, dots too. It is held against
the event type as it is and without its version, so that ``document.created`` takes
``document.created.v2`` as well, while ``document.created.v2`` takes that version only.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Collection, Iterable

from relaybox.config import OnUnrouted, Route
from relaybox.errors import InvalidField, UnknownDestination, Unrouted
from relaybox.program import Program

UNROUTED = ""
"""The destination of an event that waits until a route takes it."""

_VERSION = re.compile(r"\.v[0-9]+\Z")


class Routes:
    """The routes in their order, and what they said of recent event types."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._routes = tuple(routes)
        self._compiled = [(_compile(route.events), route.to) for route in self._routes]
        # Bounded, because an application may make up event types as it goes.
        self._find: Callable[[str], tuple[str, ...]] = functools.lru_cache(4096)(self._match)

    def destinations(self, event_type: str) -> tuple[str, ...]:
        """The destinations of every route that takes ``event_type``, in the routes' order, each once."""
        return self._find(event_type)

    @property
    def patterns(self) -> tuple[str, ...]:
        """Every pattern, in the routes' order."""
        return tuple(dict.fromkeys(pattern for route in self._routes for pattern in route.events))

    def _match(self, event_type: str) -> tuple[str, ...]:
        forms = (event_type, _VERSION.sub("", event_type))
        taken = (to for pattern, to in self._compiled if any(map(pattern.fullmatch, forms)))
        return tuple(dict.fromkeys(name for to in taken for name in to))


def _compile(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(pattern).replace(r"\*", ".*") for pattern in patterns), re.DOTALL)


def resolve(
    event_type: str,
    explicit: Iterable[str] | None,
    routes: Routes,
    known: Collection[str],
    unrouted: OnUnrouted = "raise",
) -> tuple[str, ...]:
    """The destinations of one event: those the caller named, else those of the routes."""
    if explicit is not None:
        return _named(explicit, known)
    found = routes.destinations(event_type)
    if not found and unrouted == "raise":
        raise Unrouted(_unrouted_message(event_type, routes.patterns))
    return found or (UNROUTED,)


def _named(explicit: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    try:
        given = (explicit,) if isinstance(explicit, str) else tuple(explicit)
    except Exception:
        raise InvalidField("destinations", explicit, "give a list of names") from None
    if not all(isinstance(name, str) for name in given):
        raise InvalidField("destinations", explicit, "give names, which are text")
    names = tuple(dict.fromkeys(map(str.__str__, given)))
    if not names:
        raise InvalidField("destinations", explicit, "name at least one, or leave it out to use the routes")
    for name in names:
        if name not in known:
            raise UnknownDestination(name, known)
    return names


def _unrouted_message(event_type: str, patterns: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(event_type, patterns, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ";"
    listed = ", ".join(patterns[:20]) + (", …" if len(patterns) > 20 else "")
    routes = f"the routes take {listed}" if patterns else "there are no routes"
    add, store = Program.route.format(event_type), Program.unrouted
    fix = f"{add}, or set {store} to keep such events until a route does"
    return f"no route takes the event type {event_type!r}{hint} {routes}; {fix}"
