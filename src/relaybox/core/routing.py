"""Find the destinations of an event.

A pattern is an event type in which ``*`` stands for any run of characters, dots included. It is matched
against the event type with and without its version. ``document.created`` also takes ``document.created.v2``;
``document.created.v2`` takes that version only.

A route with a ``rollout`` takes the aggregates with a ``bucket`` below it. The bucket depends only on the
aggregate's id, so it is the same in every process, route and release.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import re
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from relaybox.core.commands import Program
from relaybox.core.settings import OnUnrouted, Route
from relaybox.errors import InvalidField, UnknownDestination, Unrouted

UNROUTED = ""
"""The destination of an event that waits until a route takes it."""

_VERSION = re.compile(r"\.v[0-9]+\Z")


_BUCKETS = 10_000


def bucket(aggregate_id: str) -> int:
    """Return an aggregate's fixed bucket, 0 to 9999: hundredths of a percent."""
    digest = hashlib.sha256(aggregate_id.encode()).digest()
    return int.from_bytes(digest[:4]) % _BUCKETS


def limit(route: Route) -> int:
    """Return the bucket at which a route's rollout ends."""
    return round(route.rollout * 100)


class Share(NamedTuple):
    """The buckets of an event type that a destination gets: below ``sent`` sent, below ``taken`` stored."""

    destination: str
    sent: int
    taken: int


class Narrowed(NamedTuple):
    """The destinations of one event, and which of them are in shadow."""

    destinations: tuple[str, ...]
    shadowed: tuple[str, ...]


class Routes:
    """The routes in order, with a cache. ``gradual``: at least one is partial or a shadow."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self.gradual = any(route.shadow or limit(route) < _BUCKETS for route in self.routes)
        self._compiled = [(_compile(route.events), route) for route in self.routes]
        # Bounded, because an application may generate event types.
        self._find: Callable[[str], tuple[str, ...]] = functools.lru_cache(4096)(self._match)
        self._share: Callable[[str], tuple[Share, ...]] = functools.lru_cache(4096)(self._shares)

    def destinations(self, event_type: str) -> tuple[str, ...]:
        """Return the destinations of all routes that take ``event_type``, in order, without repeats."""
        return self._find(event_type)

    def shares(self, event_type: str) -> tuple[Share, ...]:
        """Return the buckets that each destination gets from any of its routes."""
        return self._share(event_type)

    def narrow(self, event_type: str, aggregate_id: str) -> Narrowed:
        """Return the destinations for this aggregate; one is in shadow if no other route sends to it."""
        shares, at = self._share(event_type), bucket(aggregate_id)
        taken = [share for share in shares if at < share.taken]
        return Narrowed(
            tuple(share.destination for share in taken),
            tuple(share.destination for share in taken if at >= share.sent),
        )

    @property
    def patterns(self) -> tuple[str, ...]:
        """Return every pattern, in the routes' order."""
        return tuple(dict.fromkeys(pattern for route in self.routes for pattern in route.events))

    def _taking(self, event_type: str) -> list[Route]:
        forms = (event_type, _VERSION.sub("", event_type))
        return [route for pattern, route in self._compiled if any(map(pattern.fullmatch, forms))]

    def _match(self, event_type: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for route in self._taking(event_type) for name in route.to))

    def _shares(self, event_type: str) -> tuple[Share, ...]:
        shares: dict[str, Share] = {}
        for route in self._taking(event_type):
            taken, sent = limit(route), 0 if route.shadow else limit(route)
            for name in route.to:
                before = shares.get(name, Share(name, 0, 0))
                shares[name] = Share(name, max(before.sent, sent), max(before.taken, taken))
        return tuple(shares.values())


def _compile(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(re.escape(pattern).replace(r"\*", ".*") for pattern in patterns), re.DOTALL)


def resolve(
    event_type: str,
    explicit: Iterable[str] | None,
    routes: Routes,
    known: Collection[str],
    unrouted: OnUnrouted = "raise",
) -> tuple[str, ...]:
    """Return the destinations of one event: those the caller named, else those of the routes."""
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
