"""The configured destinations, and what operators may do with them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Literal

from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, did_you_mean
from relaybox.stores.ledger import Choice, Filter, Policy
from relaybox.stores.sql.ledger.overview import SqlOverview

Action = Literal["retry", "replay", "discard", "move"]

STATUSES: Mapping[str, tuple[Choice, ...]] = {
    "retry": ("failed",),
    "replay": ("delivered", "completed", "failed", "discarded"),
    "discard": ("failed", "pending", "due", "scheduled", "parked"),
    # Failed ones first: if they block their keys, no later row of a key may get ahead of them.
    "move": ("failed", "pending"),
}
"""The statuses that each action's filter may have, the first by default; a move takes one after the other."""


class Configured:
    """Knows the destinations of the configuration; each check raises ``ConfigError``."""

    def __init__(self, overview: SqlOverview, destinations: Iterable[Destination]) -> None:
        self._overview = overview
        self.destinations = {destination.name: destination for destination in destinations}
        self.policies = {name: _policy(one) for name, one in self.destinations.items()}
        self.handed_over = frozenset(name for name, one in self.policies.items() if one.handed_over)
        # Only a thread can keep running after its timeout.
        functions = (one for one in self.destinations.values() if one.scheme == "handler")
        self.timeouts = {one.name: one.timeout for one in functions}
        """The timeout in seconds of each destination that is a function."""

    async def check_known(self, name: str | None) -> None:
        """Check that a destination is configured or has rows."""
        if name is not None and name not in self.destinations:
            check_named(name, self.destinations.keys() | await self._overview.names())

    async def check_filter(self, filter: Filter) -> Filter:
        """Check the filter. A filter by fingerprint finds failed rows only."""
        await self.check_known(filter.destination)
        if filter.fingerprint is None:
            return filter
        if filter.status not in (None, "failed"):
            raise ConfigError(f"status = {filter.status!r}: only failed deliveries have a fingerprint")
        return replace(filter, status="failed")

    async def check_filter_of(self, action: str, filter: Filter) -> Filter:
        """Check the filter of an action, and add the action's status."""
        filter = await self.check_filter(filter)
        statuses = STATUSES[action]
        if filter.status not in (None, *statuses):
            raise ConfigError(f"status = {filter.status!r}: {action} takes {', '.join(statuses)}")
        return replace(filter, status=filter.status or statuses[0])

    def check_relayed(self, name: str, fix: str) -> None:
        """Check that a relay sends to the destination."""
        if name in self.handed_over:
            raise ConfigError(f"destination {name!r} is read by Debezium, no relay sends there; {fix}")

    def check_target(self, action: str, to: str | None, from_: str | None = None) -> None:
        """Check that rows can go there: Debezium sees only inserts, and emit makes its message key."""
        if to is None and action == "move":
            raise ConfigError("to: name the destination that gets the deliveries")
        if to is None:
            return
        check_named(to, self.destinations)
        if to in self.handed_over:
            own = "replay its own deliveries without it"
            fix = f"{own if action == 'replay' else 'name another destination'}, or emit the events again"
            raise ConfigError(f"to = {to!r}: Debezium takes only what is emitted to it; {fix}")
        if from_ == to:
            raise ConfigError(f"to = {to!r}: the rows are there already; name another destination")


def check_named(name: str, known: Collection[str]) -> None:
    """Raise if the name is not one of the known destinations."""
    if name not in known:
        raise ConfigError(f"no destination is called {name!r}{did_you_mean(name, known)}")


def _policy(one: Destination) -> Policy:
    return Policy(one.ordered or one.handed_over, one.on_failed == "block", one.handed_over)
