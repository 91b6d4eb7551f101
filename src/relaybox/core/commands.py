"""The commands that messages tell a reader to type, as they are called where this process runs."""

from __future__ import annotations


class Program:
    """The command line's names. A framework that wraps the command line overrides them."""

    name = "relaybox"
    migrate = "relaybox migrate"
    otherwise = ", or call outbox.migrate()"
    """How code creates the tables, if it can."""
    route = 'add Route({!r}, to="…")'
    """How to add a route for an event type."""
    unrouted = 'unrouted = "store"'
    max_payload = "max_payload"
    """How the settings are written that an application may have to change."""

    @staticmethod
    def deliverer() -> str | None:
        """Name what delivers if no relay runs, or return None."""
        return None


def command(words: str) -> str:
    """Return a command in the backquotes that messages use."""
    return f"`{Program.name} {words}`"
