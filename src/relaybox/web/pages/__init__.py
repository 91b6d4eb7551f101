"""The dashboard's pages, a module for each thing that they show."""

from relaybox.web.pages import (
    actions,
    audit,
    dead_letters,
    destinations,
    event,
    events,
    failures,
    operations,
    overview,
    relays,
    system,
)

__all__ = [
    "actions",
    "audit",
    "dead_letters",
    "destinations",
    "event",
    "events",
    "failures",
    "operations",
    "overview",
    "relays",
    "system",
]
