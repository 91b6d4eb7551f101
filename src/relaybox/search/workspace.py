"""Open what a comparison or a rebuild works with: a source, a destination's index, the outbox's records."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from uuid import UUID

from relaybox.core.event import Delivery
from relaybox.core.outcome import Reject, Retry
from relaybox.core.settings import Destination
from relaybox.errors import ConfigError, PayloadError
from relaybox.operate.admin import Admin
from relaybox.search.change import LIMITS, Changes, check_target, index_of, search_address
from relaybox.search.engine import Engine, open_engine
from relaybox.search.iterable_rows import open_iterable
from relaybox.search.results import RefusedDocument
from relaybox.search.select_rows import open_select
from relaybox.search.source import Rows, Source, as_source, kind_of, resolve
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger
from relaybox.stores.sql.store import SqlStore
from relaybox.stores.sql.undelivered import Undelivered
from relaybox.wire.codec import encode_payload

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

NIL = UUID(int=0)
OF_THE_SOURCE = {"aggregate_type", "destination"}
"""Fields of an index name that are the same for all documents of a source."""

Encoded: TypeAlias = tuple[str | None, bytes | None, str | None]
Wanted: TypeAlias = Mapping[str, Any] | RefusedDocument | None
"""The document that belongs in the index, why the destination would not write it, or None."""


class OutboxRecords(NamedTuple):
    """The admin service, the queries of what is undelivered, and the store whose connections both share."""

    admin: Admin
    undelivered: Undelivered
    ledger: SqlLedger
    store: SqlStore


@dataclass(frozen=True, slots=True)
class Workspace:
    """The outbox's records, a source's rows and a destination's index, all open."""

    records: OutboxRecords
    rows: Rows
    destination: Destination
    engine: Engine
    index: str
    changes: Changes

    @property
    def deleted_type(self) -> str:
        """Return the type of events that delete a document."""
        rows = self.rows
        return f"{rows.event_type.rpartition('.')[0] or rows.aggregate_type.lower()}.deleted"

    def check_deletes(self) -> None:
        """Raise if events of that type would be ignored, or would write a document of only an id."""
        try:
            action = self.changes.action_of(self.deleted_type)
        except Reject as refused:
            raise ConfigError(f"destination {self.destination.name!r}: {refused}") from None
        if action == "ignore" or (action == "index" and not self.changes.waits):
            fix = f"write {self.deleted_type!r} = 'delete' into the option actions, ahead of wider patterns"
            effect = f"for events of the type {self.deleted_type!r} it does {action}, and deletes nothing"
            raise ConfigError(f"destination {self.destination.name!r}: {effect}; {fix}")


@asynccontextmanager
async def open_workspace(
    outbox: Outbox, destination: str, source: Source, index: str | None, actor: str
) -> AsyncIterator[Workspace]:
    """Open all that a comparison needs. Raise ``ConfigError`` if the destination has several indexes."""
    async with AsyncExitStack() as opened:
        rows = await opened.enter_async_context(open_rows(outbox, source))
        configured = outbox.settings.destination(destination)
        engine = open_engine(configured)
        opened.push_async_callback(engine.close)
        check_target(configured, rows.event_type)
        own = index or _index(configured, rows)
        changes = Changes(configured, search_address(configured).options)
        opened.callback(changes.close)
        records = await opened.enter_async_context(open_records(outbox, actor))
        yield Workspace(records, rows, configured, engine, own, changes)


@asynccontextmanager
async def open_rows(outbox: Outbox, source: Source) -> AsyncIterator[Rows]:
    """Open the documents of a source, for events in this outbox; hold connections until the end."""
    source = as_source(source)
    documents = await resolve(source)
    match kind_of(documents):
        case "queryset":
            # Imported by name, because Django's part is in a layer above this one.
            opened = import_module("relaybox.contrib.django.search").open_rows(outbox, source, documents)
        case "select":
            opened = open_select(outbox, source, documents)
        case _:
            opened = open_iterable(outbox, source, documents)
    async with opened as rows:
        yield rows


@asynccontextmanager
async def open_records(outbox: Outbox, actor: str) -> AsyncIterator[OutboxRecords]:
    """Hold a connection or two to the outbox's database until the end of the block."""
    store = open_store(outbox.settings.database, outbox.tables)
    try:
        ledger = SqlLedger(store)
        admin = Admin(ledger, outbox.settings.destinations, actor)
        yield OutboxRecords(admin, Undelivered(store), ledger, store)
    finally:
        await store.close()


async def wanted(
    changes: Changes, rows: Rows, destination: Destination, id_: str, payload: Mapping[str, Any]
) -> Wanted:
    """Return what a destination with these ``changes`` would write for a document."""
    try:
        event = _event(rows, destination, id_, encode_payload(payload, LIMITS))
        change = await changes.change_of(event)
    except (Reject, Retry, PayloadError) as error:
        return RefusedDocument(id_, str(error), at_destination=True)
    return None if change is None else change.document


def _index(destination: Destination, rows: Rows) -> str:
    template = index_of(destination)
    if others := template.fields - OF_THE_SOURCE:
        names = ", ".join(sorted(others))
        fix = "say which one is meant with --index, and give a source of its documents only"
        raise ConfigError(f"destination {destination.name!r} has an index for each {names}: {fix}")
    return template(_event(rows, destination))


def _event(
    rows: Rows, destination: Destination, id_: str = "", encoded: Encoded = (None, None, None)
) -> Delivery:
    text, data, encoding = encoded
    return Delivery(
        id=NIL,
        event_id=NIL,
        aggregate_type=rows.aggregate_type,
        aggregate_id=id_,
        event_type=rows.event_type,
        payload=text,
        payload_data=data,
        payload_encoding=encoding,
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
