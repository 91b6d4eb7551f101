"""The dashboard's pages, a module for each thing that they show."""

from relaybox.web.pages import actions, destinations, event, events, operations, overview, system

__all__ = ["actions", "destinations", "event", "events", "operations", "overview", "system"]
