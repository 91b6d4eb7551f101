"""What a comparison or a rebuild works with: a source, a destination's index, the outbox's own records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from uuid import UUID

import msgspec

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, PayloadError, UnknownDestination
from relaybox.operate.admin import Admin
from relaybox.search.change import LIMITS, Changes, check_target, index_of, search_address
from relaybox.search.engine import Engine, open_engine
from relaybox.search.rows import Rows, open_rows
from relaybox.search.source import Source
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.undelivered import Undelivered
from relaybox.wire.codec import encode_payload

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

NIL = UUID(int=0)
OF_THE_SOURCE = {"aggregate_type", "destination"}
"""What the name of an index may be made of that is the same for all documents of a source."""


@dataclass(frozen=True, slots=True)
class Unwritable:
    """A document that the destination would not write, and why."""

    reason: str


Wanted: TypeAlias = Mapping[str, Any] | Unwritable | None
"""What is to be in the index; None: nothing."""


@dataclass(frozen=True, slots=True)
class Target:
    """A destination's index, for the documents of one source."""

    destination: Destination
    engine: Engine
    index: str
    changes: Changes
    aggregate_type: str
    event_type: str

    @property
    def deleted_type(self) -> str:
        """The type of the events that delete a document."""
        return f"{self.event_type.rpartition('.')[0] or self.aggregate_type.lower()}.deleted"

    def check_deletes(self) -> None:
        """Raise where an event of that type would write a document of nothing but its id, or do nothing."""
        try:
            action = self.changes.action_of(self.deleted_type)
        except Reject as refused:
            raise ConfigError(f"destination {self.destination.name!r}: {refused}") from None
        if action == "ignore" or (action == "index" and not self.changes.waits):
            fix = f"write {self.deleted_type!r} = 'delete' into the option actions, ahead of wider patterns"
            told = f"for events of the type {self.deleted_type!r} it does {action}, and deletes nothing"
            raise ConfigError(f"destination {self.destination.name!r}: {told}; {fix}")

    async def wanted(self, id_: str, payload: Mapping[str, Any]) -> Wanted:
        """What the destination would write of it."""
        return await wanted(self.changes, self, self.destination, id_, payload)


async def wanted(
    changes: Changes, source: Rows | Target, destination: Destination, id_: str, payload: Mapping[str, Any]
) -> Wanted:
    """What a destination with these ``changes`` would write of a document."""
    try:
        text, data, encoding = encode_payload(payload, LIMITS)
        event = _event(source, id_, destination)
        change = await changes.change_of(
            msgspec.structs.replace(event, payload=text, payload_data=data, payload_encoding=encoding)
        )
    except (Reject, Retry, PayloadError) as error:
        return Unwritable(str(error))
    return None if change is None else change.document


class OutboxRecords(NamedTuple):
    """The operators' service, and what is under way, on the same connections."""

    admin: Admin
    undelivered: Undelivered
    ledger: SqlLedger


class Workspace(NamedTuple):
    """The outbox's records, the rows of a source and the index of a destination, all open."""

    records: OutboxRecords
    rows: Rows
    target: Target


@asynccontextmanager
async def open_workspace(
    outbox: Outbox, destination: str, source: Source, index: str | None, actor: str
) -> AsyncIterator[Workspace]:
    """Hold all that a comparison needs until the end of the block."""
    async with (
        open_rows(outbox, source) as rows,
        open_target(outbox, destination, rows, index) as target,
        open_records(outbox, actor) as records,
    ):
        yield Workspace(records, rows, target)


@asynccontextmanager
async def open_records(outbox: Outbox, actor: str) -> AsyncIterator[OutboxRecords]:
    """Hold a connection to the outbox's database, or two, until the end of the block."""
    store = open_store(outbox.settings.database, outbox.tables)
    try:
        ledger = SqlLedger(store)
        yield OutboxRecords(Admin(ledger, outbox.settings.destinations, actor), Undelivered(store), ledger)
    finally:
        await store.close()


@asynccontextmanager
async def open_target(
    outbox: Outbox, name: str, rows: Rows, index: str | None = None
) -> AsyncIterator[Target]:
    """The index of a search destination; raises ``ConfigError`` where it has several, or none."""
    destination = destination_of(outbox, name)
    engine = open_engine(destination)
    try:
        check_target(destination, rows.event_type)
        own = index or _index(destination, rows)
        changes = Changes(destination, search_address(destination).options)
        try:
            yield Target(destination, engine, own, changes, rows.aggregate_type, rows.event_type)
        finally:
            changes.close()
    finally:
        await engine.close()


def destination_of(outbox: Outbox, name: str) -> Destination:
    """The destination of that name; raises ``UnknownDestination``."""
    known = {one.name: one for one in outbox.settings.destinations}
    if name not in known:
        raise UnknownDestination(name, known)
    return known[name]


def _index(destination: Destination, rows: Rows) -> str:
    template = index_of(destination)
    others = template.fields - OF_THE_SOURCE
    if others:
        names = ", ".join(sorted(others))
        fix = "say which one is meant with --index, and give a source of its documents only"
        raise ConfigError(f"destination {destination.name!r} has an index for each {names}: {fix}")
    return template(_event(rows, "", destination))


def _event(source: Rows | Target, id_: str, destination: Destination) -> Delivery:
    """An event of a document, without what it carries."""
    return Delivery(
        id=NIL,
        event_id=NIL,
        aggregate_type=source.aggregate_type,
        aggregate_id=id_,
        event_type=source.event_type,
        payload=None,
        payload_data=None,
        payload_encoding=None,
        headers="{}",
        ordering_key=None,
        position=0,
        idempotency_key=str(NIL),
        attempts=1,
        max_attempts=1,
        crashes=0,
        created_at=datetime.now(UTC),
        destination=destination.name,
        lease_token=NIL,
        lease_owner="",
    )
