"""What messages tell a reader to type: the commands, by the names that they have where this process runs."""

from __future__ import annotations


class Program:
    """The command line: its name, and how it makes the tables. A framework that wraps it writes its own."""

    name = "relaybox"
    migrate = "relaybox migrate"
    otherwise = ", or call outbox.migrate()"
    """How code makes the tables, where code does."""
    route = 'add Route({!r}, to="…")'
    """How a route is added for an event type."""
    unrouted = 'unrouted = "store"'
    max_payload = "max_payload"
    """How settings are written that an application may have to change."""

    @staticmethod
    def deliverer() -> str | None:
        """What delivers where no relay runs, if anything does."""
        return None


def command(words: str) -> str:
    """A command as it is to be typed, in the quotes of messages."""
    return f"`{Program.name} {words}`"
