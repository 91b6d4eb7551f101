"""The contract of an inbox: a consumer's memory of the messages it has processed.

Whoever sends at least once sends some messages twice. A consumer that writes down, in the transaction that
does its work, which message it has processed, does that work once:

- The mark comes first and decides. It is one INSERT, which finds out whether it is the first and says so; a
  look beforehand would race.
- Work and mark commit together, or neither does. What would commit by itself is refused.
- Of two transactions with the same message the second waits for the first. It is told that the message is
  done if the first commits, and takes it over if the first rolls back. Where the database cannot wait, it
  raises an error of its own that is worth another try.
- A block that raises leaves no mark, also where somebody catches the exception and commits.
- Marks are kept for a window of time. It must be longer than the longest time after which a sender may send
  a message once more; a message that comes later is new.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from relaybox.core.event import Event
from relaybox.core.text import id_field, text_field
from relaybox.errors import InvalidField

WINDOW = 7 * 86_400.0
"""Seconds for which marks are kept, unless something else is said."""


class Key(NamedTuple):
    """What a mark is known by: each consumer remembers for itself."""

    consumer: str
    message_id: str


def key_of(consumer: Any, message: Any) -> Key:
    """The key of an event or of a message's id; raises ``InvalidField``."""
    if consumer is None:
        raise InvalidField("consumer", None, "give consumer=, or a name for all as in Inbox(consumer=…)")
    given = message.id if isinstance(message, Event) else message
    return Key(text_field("consumer", consumer, 100), id_field("message_id", given))
