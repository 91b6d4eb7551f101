"""The pages of the dashboard."""

from relaybox.web.pages import actions, destinations, events, system

__all__ = ["actions", "destinations", "events", "system"]
