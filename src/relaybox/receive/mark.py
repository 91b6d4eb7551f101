"""Marks of an inbox: a consumer's memory of the messages it has processed.

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

What is written is a generator of statements, which ``database/drivers`` execute on any connection.
"""

from __future__ import annotations

import secrets
from collections import defaultdict
from typing import Any, NamedTuple

from relaybox.core.event import Event
from relaybox.core.text import id_field, text_field
from relaybox.database.dialects import Dialect
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import ParamStyle, Statements
from relaybox.database.statements.inbox import texts
from relaybox.database.steps import Steps
from relaybox.errors import InvalidField

WINDOW = 7 * 86_400.0
"""Seconds for which marks are kept, unless something else is said."""

BATCH = 1000
"""Marks pruned in one transaction."""


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


def inbox_statements(tables: Tables, dialect: Dialect, style: ParamStyle) -> Statements:
    """The statements of an inbox for one kind of connection."""
    return Statements(tables, dialect, style, texts(dialect.name))


def mark(statements: Statements, key: Key) -> Steps[bool]:
    """Mark the message; whether this is the first time."""
    if statements.dialect.returning:
        [marked] = yield [statements("mark", **key._asdict())]
        return bool(marked)
    number = secrets.randbits(62) | 1 << 62
    yield [statements("mark", **key._asdict(), number=number)]
    [[[was_there]]] = yield [statements("was_there", number=number)]
    return not was_there


def forget(statements: Statements, key: Key) -> Steps[None]:
    """Take the mark back."""
    yield [statements("forget", consumer=key.consumer, ids=[key.message_id])]


def prune(statements: Statements, window: float) -> Steps[int]:
    """Remove a batch of marks that are older than so many seconds; how many it were."""
    [rows] = yield [statements("old", seconds=-window, limit=BATCH)]
    ids: dict[str, list[str]] = defaultdict(list)
    for consumer, message_id in rows:
        ids[consumer].append(message_id)
    for consumer, of in ids.items():
        yield [statements("forget", consumer=consumer, ids=of)]
    return len(rows)


def note_left(error: BaseException, key: Key, failure: Exception) -> None:
    """Say with the error that its transaction must not be committed."""
    problem = f"{type(failure).__name__} when the mark was to be taken back"
    error.add_note(f"inbox: {key.consumer!r}, {key.message_id!r}: {problem}; roll the transaction back")
