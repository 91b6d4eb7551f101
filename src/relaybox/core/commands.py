"""The commands that messages tell a reader to type, as they are called where this process runs."""

from __future__ import annotations


class Program:
    """The command line's names, and how messages write settings. A framework that wraps it overrides them."""

    name = "relaybox"
    migrate = "relaybox migrate"
    otherwise = ", or call outbox.migrate()"
    """How code creates the tables, if it can."""
    route = 'add Route({!r}, to="…")'
    unrouted = 'unrouted = "store"'
    max_payload = "max_payload"

    @staticmethod
    def deliverer() -> str | None:
        """Name what delivers if no relay runs, or return None."""
        return None


def command(words: str) -> str:
    """Return a command in the backquotes that messages use."""
    return f"`{Program.name} {words}`"
