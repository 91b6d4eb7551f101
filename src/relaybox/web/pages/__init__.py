"""The dashboard's pages, a module for each thing that they show."""

from relaybox.web.pages import actions, destinations, events, system

__all__ = ["actions", "destinations", "events", "system"]
