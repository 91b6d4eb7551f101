"""Marks: set, taken back, pruned. As generators, which ``database/drivers`` execute on any connection."""

from __future__ import annotations

import secrets
from collections import defaultdict

from relaybox.database.dialects import Dialect
from relaybox.database.schema import Tables
from relaybox.database.statements.delivery import ParamStyle, Statements
from relaybox.database.statements.inbox import texts
from relaybox.database.steps import Steps
from relaybox.receive.key import Key

BATCH = 1000
"""Marks pruned in one transaction."""


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
