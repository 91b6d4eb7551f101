"""Give unrouted events to their destinations: those that no route took when they were emitted.

Routes change when a process starts, so a relay routes at once when it starts or begins to lead. The leader
may not have the route, so the other relays take turns and route under the leader's term. Routing holds a lock
on the term. So one relay routes at a time, each event is routed once, and none overtakes another of its key.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from relaybox.core.clock import Clock
from relaybox.core.commands import command
from relaybox.core.routing import Routes
from relaybox.core.settings import Destination, Route, Settings
from relaybox.emit.row import DEFAULT_MAX_ATTEMPTS, Call, check_payload, ordering_key
from relaybox.errors import RelayboxError
from relaybox.relay.upkeep.schedule import Rest, Round, take_turns
from relaybox.stores.sql.upkeep.route import SqlRoute
from relaybox.stores.upkeep import Router, StoredEvent, Target, Turn
from relaybox.wire.codec import decode

BATCH = 1000
"""Events checked before the next rest."""
BATCHES = 200
"""Batches in one round: with its rests, the round ends before the next one is due."""
INTERVAL = 30.0
"""Seconds from the end of the leader's round to its next."""

log = logging.getLogger(__name__)

Wake = Callable[[Iterable[str]], None]
"""Called with the destinations that got events."""


class Reroute:
    """Routes round by round; a round continues where the last one stopped."""

    def __init__(self, rows: SqlRoute, router: Router, wake: Wake, clock: Clock, rest: Rest) -> None:
        self._rows = rows
        self._asked = _Asked(router)
        self._wake = wake
        self._clock = clock
        self._rest = rest
        self._after: Turn | None = None
        self._term: int | None = None
        self._due = -math.inf

    async def __call__(self, mine: int | None, turns: int) -> Round:
        """Run a round if it is due or my term is new; without a term of my own, use the leader's."""
        if mine in (None, self._term) and self._clock.now() < self._due:
            return Round()
        term = await self._rows.current_term() if mine is None else mine
        if term is None:
            return Round()
        round_ = await self.round(term)
        if round_.led:
            self._term, self._due = mine, self._clock.now() + turns * INTERVAL
        return round_

    async def round(self, term: int) -> Round:
        """Run a round now."""
        self._asked.refused = 0
        round_ = await take_turns(term, [self._batch], self._clock, self._rest, BATCHES)
        self._asked.report()
        return round_

    async def _batch(self, term: int) -> Round | None:
        try:
            routed = await self._rows.route(term, self._asked, self._after, BATCH)
        finally:
            # After an error too: a part may have been committed.
            names, self._asked.named = self._asked.named, set()
            if names:
                self._wake(names)
        if routed is None:
            return None
        self._after = routed.after
        return Round(routed.changed, done=routed.after is None)


class _Asked:
    """A router that remembers its answers. An event that it cannot route waits, and others are routed."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.named: set[str] = set()
        self.refused = 0
        self._problem = ""
        self._reported = ""

    def takes(self, event_type: str) -> bool:
        return self._router.takes(event_type)

    def targets(self, event: StoredEvent) -> Sequence[Target]:
        try:
            targets = self._router.targets(event)
        except Exception as error:
            if not self.refused:
                known = isinstance(error, RelayboxError)
                what = str(error) if known else f"{type(error).__name__}: {error}"
                self._problem = f"{event.event_id} ({event.event_type}): {what}"
            self.refused += 1
            return ()
        self.named.update(target.destination for target in targets)
        return targets

    def report(self) -> None:
        """Log the refused events, again only if another one is the first."""
        if self.refused and self._problem != self._reported:
            many = "1 event stays" if self.refused == 1 else f"{self.refused} events stay"
            fix = "fix what makes its ordering key, or use " + command("move '' NAME")
            log.warning("%s unrouted, the first is %s; %s", many, self._problem, fix)
        self._reported = self._problem if self.refused else ""


class StoredRouter:
    """Routes by the settings of one outbox, or by its ``latest`` routes if they change at run time."""

    def __init__(self, settings: Settings, latest: Callable[[], Sequence[Route]] | None = None) -> None:
        self._given: Sequence[Route] = settings.routes
        self._routes = Routes(settings.routes)
        self._destinations = {destination.name: destination for destination in settings.destinations}
        self._latest = latest

    def takes(self, event_type: str) -> bool:
        """True if a route takes events of this type."""
        self._look()
        return bool(self._routes.destinations(event_type))

    def targets(self, event: StoredEvent) -> Sequence[Target]:
        """Return the event's destinations now; raise what its ordering function or ``emit`` would raise.

        If a rollout or shadow leaves no destination, return none, so that the event waits.
        """
        self._look()
        names = self._routes.destinations(event.event_type)
        if self._routes.gradual:
            narrowed = self._routes.narrow(event.event_type, event.aggregate_id)
            names = tuple(name for name in narrowed.destinations if name not in narrowed.shadowed)
        targets = _targets(event, [self._destinations[name] for name in names])
        # An ordered delivery cannot be scheduled, because it would hold up its key. So the event waits here.
        if event.scheduled and any(target.ordering_key is not None or target.final for target in targets):
            return ()
        return targets

    def _look(self) -> None:
        if self._latest is None or (latest := self._latest()) is self._given:
            return
        self._given = latest
        # Skip routes to destinations that were added later: relays that start later have them.
        known = self._destinations.keys()
        self._routes = Routes(route for route in latest if known >= set(route.to))


def _targets(event: StoredEvent, destinations: Sequence[Destination]) -> list[Target]:
    # Decode the payload only if an ordering function needs it: it may be unreadable.
    asked = any(
        callable(destination.ordering) and (destination.ordered or destination.handed_over)
        for destination in destinations
    )
    call = stored_call(event, payload=asked)
    aggregate = event.aggregate_type, event.aggregate_id
    for destination in destinations:
        if destination.handed_over:
            check_payload(event.payload, destination)
    return [
        Target(
            destination.name,
            ordering_key(call, aggregate, destination),
            call.max_attempts or destination.max_attempts,
            final=destination.handed_over,
        )
        for destination in destinations
    ]


def stored_call(event: StoredEvent, *, payload: bool = True) -> Call:
    """Return the call that emitted the event, as far as its row shows it: ids are text, without defaults."""
    headers: dict[str, Any] = msgspec.json.decode(event.headers)
    tenant = headers.get("tenant")
    own = str(event.event_id)
    return Call(
        event.aggregate_type,
        event.aggregate_id,
        event.event_type,
        decode(event.payload, event.payload_data, event.payload_encoding) if payload else None,
        idempotency_key=None if event.idempotency_key == own else event.idempotency_key,
        key=... if event.ordering_key is None else None if event.ordering_key == own else event.ordering_key,
        headers=headers,
        tenant=tenant if isinstance(tenant, str) else None,
        max_attempts=None if event.max_attempts == DEFAULT_MAX_ATTEMPTS else event.max_attempts,
    )
