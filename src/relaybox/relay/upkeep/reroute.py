"""Where a stored event goes that no route took when it was emitted: as if it were emitted now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from relaybox.core.routing import Routes
from relaybox.core.settings import Destination, Route, Settings
from relaybox.emit.row import DEFAULT_MAX_ATTEMPTS, Call, check_payload, ordering_key
from relaybox.stores.upkeep import Target, Waiting
from relaybox.wire.codec import decode


class StoredRouter:
    """A ``Router`` (see there) by the routes and destinations of one outbox.

    ``latest`` are the routes as they are now, where they change while the relay runs.
    """

    def __init__(self, settings: Settings, latest: Callable[[], Sequence[Route]] | None = None) -> None:
        self._given: Sequence[Route] = settings.routes
        self._routes = Routes(settings.routes)
        self._destinations = {destination.name: destination for destination in settings.destinations}
        self._latest = latest

    def takes(self, event_type: str) -> bool:
        """Whether any route takes such events."""
        self._look()
        return bool(self._routes.destinations(event_type))

    def targets(self, event: Waiting) -> Sequence[Target]:
        """Where the event goes now; raises what a key's function raises, or what ``emit`` would.

        One that no destination would be sent, because of a rollout or a shadow, goes on waiting.
        """
        self._look()
        names = self._routes.destinations(event.event_type)
        if self._routes.gradual:
            narrowed = self._routes.narrow(event.event_type, event.aggregate_id)
            names = tuple(name for name in narrowed.destinations if name not in narrowed.shadowed)
        targets = _targets(event, [self._destinations[name] for name in names])
        # What is ordered has no time of its own: it would hold up its key. So its event waits here.
        if event.scheduled and any(target.ordering_key is not None or target.final for target in targets):
            return ()
        return targets

    def _look(self) -> None:
        if self._latest is None or (latest := self._latest()) is self._given:
            return
        self._given = latest
        # A destination that was added since is one of relays that start later.
        known = self._destinations.keys()
        self._routes = Routes(route for route in latest if known >= set(route.to))


def _targets(event: Waiting, destinations: Sequence[Destination]) -> list[Target]:
    # A payload that cannot be read is no obstacle where nobody asks for it.
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


def stored_call(event: Waiting, *, payload: bool = True) -> Call:
    """The call that emitted the event, as far as its row tells.

    The aggregate's id is text, the payload what its JSON says, and ``max_attempts`` of the default is as if
    it had not been given.
    """
    headers: dict[str, Any] = msgspec.json.decode(event.headers)
    tenant = headers.get("tenant")
    stored = (event.payload, event.payload_data, event.payload_encoding)
    own = str(event.event_id)
    return Call(
        event.aggregate_type,
        event.aggregate_id,
        event.event_type,
        decode(*stored) if payload else None,
        idempotency_key=None if event.idempotency_key == own else event.idempotency_key,
        key=... if event.ordering_key is None else None if event.ordering_key == own else event.ordering_key,
        headers=headers,
        tenant=tenant if isinstance(tenant, str) else None,
        max_attempts=None if event.max_attempts == DEFAULT_MAX_ATTEMPTS else event.max_attempts,
    )
