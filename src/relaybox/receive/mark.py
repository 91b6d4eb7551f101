"""Mark messages as processed, in the transaction that does the work (see docs/how-to/inbox.md).

The mark comes first: one INSERT that reports whether it was the first, because a SELECT before it would race.
A second transaction with the same message waits for the first, and does the work if that rolls back. A
database that cannot wait raises its own retryable error. ``database/drivers`` execute the statements.
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
"""Seconds for which marks are kept by default."""

BATCH = 1000


class Key(NamedTuple):
    """The key of a mark: each consumer has its own marks."""

    consumer: str
    message_id: str


def key_of(consumer: Any, message: Any) -> Key:
    """Return the key of an event or a message id; raise ``InvalidField``."""
    if consumer is None:
        raise InvalidField("consumer", None, "pass consumer=, or set it for all calls with Inbox(consumer=…)")
    given = message.id if isinstance(message, Event) else message
    return Key(text_field("consumer", consumer, 100), id_field("message_id", given))


def inbox_statements(tables: Tables, dialect: Dialect, style: ParamStyle) -> Statements:
    """Return the statements of an inbox for one kind of connection."""
    return Statements(tables, dialect, style, texts(dialect.name))


def mark(statements: Statements, key: Key) -> Steps[bool]:
    """Mark the message; return True if this is the first time."""
    if statements.dialect.returning:
        [marked] = yield [statements("mark", **key._asdict())]
        return bool(marked)
    number = secrets.randbits(62) | 1 << 62
    yield [statements("mark", **key._asdict(), number=number)]
    [[[was_there]]] = yield [statements("was_there", number=number)]
    return not was_there


def forget(statements: Statements, key: Key) -> Steps[None]:
    """Remove the mark."""
    yield [statements("forget", consumer=key.consumer, ids=[key.message_id])]


def prune(statements: Statements, window: float) -> Steps[int]:
    """Remove a batch of marks older than ``window`` seconds; return their number."""
    [rows] = yield [statements("old", seconds=-window, limit=BATCH)]
    ids: dict[str, list[str]] = defaultdict(list)
    for consumer, message_id in rows:
        ids[consumer].append(message_id)
    for consumer, of in ids.items():
        yield [statements("forget", consumer=consumer, ids=of)]
    return len(rows)


def note_left(error: BaseException, key: Key, failure: Exception) -> None:
    """Add a note to the error: its transaction must be rolled back, because the mark could not be removed."""
    problem = f"{type(failure).__name__} when the mark was to be taken back"
    error.add_note(f"inbox: {key.consumer!r}, {key.message_id!r}: {problem}; roll the transaction back")
