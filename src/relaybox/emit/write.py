"""Write events inside the caller's transaction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from uuid import UUID

from relaybox.core.event import Emitted
from relaybox.database.statements.delivery import INSERTED, Statements
from relaybox.database.steps import Steps
from relaybox.database.transactions import in_transaction
from relaybox.emit.row import Emission

ROWS_PER_STATEMENT = 500
CHARACTERS_PER_STATEMENT = 4_000_000
"""Limit of payloads and headers, so that a statement stays well below a server's packet size."""

_SIZED = [INSERTED.index(name) for name in ("payload", "payload_data", "headers")]


def write(emissions: Sequence[Emission], statements: Statements, alone: bool = False) -> Steps[list[Emitted]]:
    """Write the events, and return for each whether it is new; ``alone`` if no transaction is open.

    Idempotency keys come first and sorted, so that two callers cannot deadlock. Rows follow in the order of
    the calls, which becomes the order of positions. An event without destinations does not take its key.
    """
    if len(emissions) == 1 and emissions[0].idempotency_key is None and len(emissions[0].destinations) == 1:
        only = emissions[0]
        yield [statements.insert(only.rows or only.handed_over, final=not only.rows)]
        return [Emitted(only.event_id, False, only.destinations)]
    writing = _write_several(emissions, statements)
    if alone and any(emission.destinations for emission in emissions):
        # A key that is committed without its rows would make every later try a duplicate.
        writing = in_transaction(writing)
    return (yield from writing)


def _write_several(emissions: Sequence[Emission], statements: Statements) -> Steps[list[Emitted]]:
    first_ids: dict[UUID, UUID] = {}
    keyed = [e for e in emissions if e.idempotency_key is not None and e.destinations]
    for emission in sorted(keyed, key=lambda e: (e.event_type, e.idempotency_key)):
        first_ids[emission.event_id] = yield from _remember(emission, statements)
    fresh = [e for e in emissions if first_ids.get(e.event_id, e.event_id) == e.event_id]
    for rows in _batches(row for emission in fresh for row in emission.rows):
        yield [statements.insert(rows)]
    for rows in _batches(row for emission in fresh for row in emission.handed_over):
        yield [statements.insert(rows, final=True)]
    return [_emitted(emission, first_ids.get(emission.event_id, emission.event_id)) for emission in emissions]


def _batches(rows: Iterable[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    batch: list[tuple[Any, ...]] = []
    size = 0
    for row in rows:
        length = sum(len(row[index]) for index in _SIZED if row[index] is not None)
        if len(batch) == ROWS_PER_STATEMENT or (batch and size + length > CHARACTERS_PER_STATEMENT):
            yield batch
            batch, size = [], 0
        batch.append(row)
        size += length
    if batch:
        yield batch


def _remember(emission: Emission, statements: Statements) -> Steps[UUID]:
    """Return the id of the first event with this key, which is our own if the key is new."""
    key = {"event_type": emission.event_type, "key": emission.idempotency_key}
    event_id = statements.dialect.to_uuid(emission.event_id)
    while True:
        [rows] = yield [statements("remember_key", event_id=event_id, **key)]
        if not rows:
            [rows] = yield [statements("recall_key", **key)]
        if rows:
            return as_uuid(rows[0][0])


def _emitted(emission: Emission, first_id: UUID) -> Emitted:
    duplicate = first_id != emission.event_id
    return Emitted(first_id, duplicate, () if duplicate else emission.destinations)


def as_uuid(value: Any) -> UUID:
    """Return a UUID for the value that a driver returned."""
    if isinstance(value, UUID):
        return value
    return UUID(value.decode() if isinstance(value, bytes) else str(value))
