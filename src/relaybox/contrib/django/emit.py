"""``emit_event``: an event inside the transaction that Django has open."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import EllipsisType
from typing import Any, Unpack

from asgiref.sync import sync_to_async
from django.db import router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.conf import get_configuration, get_settings
from relaybox.contrib.django.databases import connection_of, dialect_of, execute_ours, get_statements
from relaybox.contrib.django.dispatch import after_commit
from relaybox.emit.drive import drive
from relaybox.emit.driver import failed
from relaybox.emit.emitter import Calls, as_calls, build
from relaybox.emit.row import Call, Emission, EmitOptions
from relaybox.emit.write import write
from relaybox.errors import NotInTransaction
from relaybox.event import Emitted
from relaybox.routing import UNROUTED
from relaybox.stores.dialects import Dialect


class Options(EmitOptions, total=False):
    """The optional arguments of ``emit_event``."""

    using: str | None


def emit_event(
    aggregate_type: str,
    aggregate_id: Any,
    event_type: str,
    payload: Any,
    *,
    idempotency_key: str | None = None,
    key: str | EllipsisType | None = ...,
    headers: Mapping[str, Any] | None = None,
    tenant: str | None = None,
    max_attempts: int | None = None,
    deliver_at: datetime | None = None,
    destinations: Sequence[str] | None = None,
    using: str | None = None,
) -> Emitted:
    """Write an event inside the open ``atomic()``; it exists if and only if that commits.

    ``using`` is the database's alias; left out, the database that routers choose for writing outbox events.
    The other arguments are those of ``Outbox.emit``. Once the transaction has committed, whoever delivers is
    told; that never raises here.

    Raises an ``EmitError`` before anything reaches the database, so that the transaction can go on:
    ``InvalidField``, ``PayloadError``, ``Unrouted``, ``UnknownDestination``, ``NotInTransaction`` outside
    ``atomic()`` (unless ``OUTBOX["REQUIRE_ATOMIC"]`` is False), ``TransactionFailed``. ``ConfigError`` where
    the alias or the settings are wrong, ``SchemaError`` where the tables are missing; other errors of the
    database arrive as Django's.
    """
    call = Call(
        aggregate_type,
        aggregate_id,
        event_type,
        payload,
        idempotency_key,
        key,
        headers,
        tenant,
        max_attempts,
        deliver_at,
        destinations,
    )
    return _emit([call], using)[0]


def emit_events(calls: Calls, *, using: str | None = None) -> list[Emitted]:
    """Write several events in few statements, in the order given; if one is refused, none is written.

    Each is a ``relaybox.emit.row.Call``, or a dict of ``emit_event``'s arguments.
    """
    return _emit(as_calls(calls), using, many=True)


async def aemit_event(
    aggregate_type: str, aggregate_id: Any, event_type: str, payload: Any, **options: Unpack[Options]
) -> Emitted:
    """``emit_event`` from asynchronous code: on the connection, and in the transaction, of its synchronous
    calls.
    """
    call = sync_to_async(emit_event, thread_sensitive=True)
    return await call(aggregate_type, aggregate_id, event_type, payload, **options)


async def aemit_events(calls: Calls, *, using: str | None = None) -> list[Emitted]:
    """``emit_events`` from asynchronous code."""
    return await sync_to_async(emit_events, thread_sensitive=True)(calls, using=using)


def _emit(calls: Sequence[Call], using: str | None, many: bool = False) -> list[Emitted]:
    connection = connection_of(using or default_alias())
    dialect = dialect_of(connection)
    builder = get_configuration().builder
    if _in_transaction(connection):
        return _write(connection, build(builder, calls, dialect, many), dialect)
    emissions = build(builder, calls, dialect, many)
    with transaction.atomic(using=connection.alias):
        return _write(connection, emissions, dialect)


def default_alias() -> str:
    """The database that routers choose for writing outbox events."""
    from relaybox.contrib.django.models import OutboxEvent

    alias: str = router.db_for_write(OutboxEvent)
    return alias


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Whether one is open; raises where one must be, or where it can only be rolled back."""
    if connection.needs_rollback:
        raise failed("Django")
    if connection.in_atomic_block or not connection.get_autocommit():
        return True
    if get_settings().REQUIRE_ATOMIC:
        raise NotInTransaction(
            "no transaction is open, so the event would commit apart from the change it belongs to; write"
            " `with transaction.atomic():` around both (asynchronous code calls one such function by"
            " sync_to_async), or set OUTBOX['REQUIRE_ATOMIC'] = False if that is what you want"
        )
    return False


def _write(connection: BaseDatabaseWrapper, emissions: Sequence[Emission], dialect: Dialect) -> list[Emitted]:
    writing = write(emissions, get_statements(dialect), dialect)
    # Some databases keep what a failed call had written; to commit that would lose an event to its own key.
    with transaction.mark_for_rollback_on_error(using=connection.alias):
        emitted = drive(writing, functools.partial(execute_ours, connection))
    rows = [
        row
        for emission, one in zip(emissions, emitted, strict=True)
        if not one.duplicate
        for row in emission.rows
        if row[2] != UNROUTED
    ]
    if rows:
        after_commit(connection, [(row[2], row[0]) for row in rows])
    return emitted
