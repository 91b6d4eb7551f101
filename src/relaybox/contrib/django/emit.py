"""Emit events inside the transaction that Django has open: by ``emit_event``, or by a model's changes.

A model decorated with ``@emits`` writes the event in the transaction that changes the row; ``save()`` outside
``atomic()`` opens one for both. An event that cannot be written rolls the change back.

``@emits`` sees what Django sends signals for: ``save()``, ``create()``, ``get_or_create()``, ``delete()`` of
an object or of a QuerySet, and what cascades. It does not see ``bulk_create()``, ``bulk_update()``,
``QuerySet.update()``, raw SQL, changes of a many-to-many field, and what the database itself cascades or
triggers. Fixtures of ``loaddata`` emit no events. Use ``emit_event`` where it matters what happened, and not
only that a row changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, Unpack

from asgiref.sync import sync_to_async
from django.db import router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.conf import get_configuration, get_settings
from relaybox.contrib.django.databases import connection_of, dialect_of, get_statements, run_ours
from relaybox.contrib.django.dispatch import after_commit
from relaybox.core.event import Emitted
from relaybox.core.routing import UNROUTED
from relaybox.database.dialects import Dialect
from relaybox.database.drivers.driver import failed
from relaybox.emit.emitter import Calls, as_calls, build
from relaybox.emit.row import Call, Emission, EmitOptions
from relaybox.emit.write import write
from relaybox.errors import ConfigError, NotInTransaction, shorten

if TYPE_CHECKING:
    from django.db.models import Field, Model

ModelClass = TypeVar("ModelClass", bound=type[Any])
Key: TypeAlias = Callable[["Model"], str | None] | str | EllipsisType | None

_UNKNOWN = object()


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
    The other arguments are those of ``Outbox.emit``. After the commit, the relay or worker that delivers is
    notified; that never raises here.

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
    """Emit from asynchronous code, on the connection and in the transaction of its synchronous calls."""
    call = sync_to_async(emit_event, thread_sensitive=True)
    return await call(aggregate_type, aggregate_id, event_type, payload, **options)


async def aemit_events(calls: Calls, *, using: str | None = None) -> list[Emitted]:
    """Emit several events from asynchronous code."""
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
    """Return the database that routers choose for writing outbox events."""
    from relaybox.contrib.django.models import OutboxEvent

    alias: str = router.db_for_write(OutboxEvent)
    return alias


def _in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """True if one is open. Raise if one is required and missing, or if it can only be rolled back."""
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
        emitted = run_ours(connection, writing)
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


def emits(
    *,
    created: str | None = None,
    updated: str | None = None,
    deleted: str | None = None,
    payload: Callable[[Any], Any] | None = None,
    aggregate_type: str | None = None,
    key: Key = ...,
) -> Callable[[ModelClass], ModelClass]:
    """Emit an event of these types when a row of the model is created, updated or deleted.

        @emits(created="order.created", updated="order.updated", payload=lambda order: {"total": order.total})
        class Order(models.Model): ...

    - ``payload``: makes the payload of the object. Left out, it is every field of the row by its column's
      attribute (``customer_id``), a file by its name; mind that this may hold private data.
    - ``aggregate_type``: the model's name unless given. The aggregate's id is the primary key.
    - ``key``: as in ``emit_event``, or a function of the object.

    Models derived from this one emit the same, as the aggregate that they are rows of: proxies, children with
    tables of their own (a deletion has the fields of the parent), and all models of an abstract one. The
    event goes to the database that the row is in. ``updated`` follows every ``save()``, whether or not it
    changed a value.
    """
    events = {"created": created, "updated": updated, "deleted": deleted}
    for name, event in events.items():
        if event is not None and (not isinstance(event, str) or not event):
            raise ConfigError(f"emits: {name} = {shorten(event)}: write an event type, as in 'order.{name}'")
    if not any(events.values()):
        raise ConfigError("emits: say which changes are events, as in @emits(created='order.created')")

    def decorate(model: ModelClass) -> ModelClass:
        from django.db.models.base import ModelBase

        if not isinstance(model, ModelBase):
            raise ConfigError(f"emits: {shorten(model)} is no model; write it above a class of models.Model")
        Changes(model, created, updated, deleted, payload, aggregate_type, key).watch()
        return model

    return decorate


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """What ``emits`` says of one model, and the receivers of its signals."""

    model: Any
    created: str | None
    updated: str | None
    deleted: str | None
    payload: Callable[[Any], Any] | None
    aggregate_type: str | None
    key: Key

    def watch(self) -> None:
        """Connect to the signals of this model, and of those that are derived from it later."""
        from django.db.models.signals import class_prepared

        _save_in_transaction(self.model)
        if not self.model._meta.abstract:
            self.prepared(self.model)
        class_prepared.connect(self.prepared, weak=False, dispatch_uid=(self, "prepared"))

    def prepared(self, sender: Any, **_: Any) -> None:
        """Connect to the signals of a model that was just defined, if it is derived from ours."""
        from django.db.models.signals import post_delete, post_save

        if not issubclass(sender, self.model):
            return
        if self.created or self.updated:
            post_save.connect(self.saved, sender=sender, weak=False, dispatch_uid=(self, "saved"))
        # A child's rows go together with its parent's, of which there is a signal of its own.
        if self.deleted and self._root(sender) is sender._meta.concrete_model:
            post_delete.connect(self.removed, sender=sender, weak=False, dispatch_uid=(self, "removed"))

    def saved(
        self,
        instance: Any,
        created: bool,
        raw: bool,
        using: str,
        update_fields: Iterable[str] | None = None,
        **_: Any,
    ) -> None:
        """Emit that a row was created or updated."""
        event_type = self.created if created else self.updated
        if event_type is not None and not raw:
            content = self.payload(instance) if self.payload else stored(instance, using, update_fields)
            self._emit(instance, event_type, content, using)

    def removed(self, instance: Any, using: str, **_: Any) -> None:
        """Emit that a row was deleted."""
        assert self.deleted is not None
        content = self.payload(instance) if self.payload else loaded(instance)
        self._emit(instance, self.deleted, content, using)

    def _emit(self, instance: Any, event_type: str, content: Any, using: str) -> None:
        root = self._root(type(instance))
        aggregate_type = self.aggregate_type or root._meta.object_name
        key = self.key(instance) if callable(self.key) else self.key
        aggregate_id = getattr(instance, root._meta.pk.attname)
        emit_event(aggregate_type, aggregate_id, event_type, content, key=key, using=using)

    def _root(self, model: Any) -> Any:
        """Return the model whose table has the aggregate's own row: the topmost that is ours."""
        concrete = model._meta.concrete_model
        parents = [parent for parent in concrete._meta.get_parent_list() if issubclass(parent, self.model)]
        return parents[-1] if parents else concrete


def _save_in_transaction(model: Any) -> None:
    """Write the row and its event together: Django sends ``post_save`` after its own transaction."""
    save_base = model.save_base

    @functools.wraps(save_base)
    def in_transaction(
        self: Any,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Any = None,
    ) -> None:
        using = using or router.db_for_write(type(self), instance=self)
        with transaction.atomic(using=using):
            save_base(self, raw, force_insert, force_update, using, update_fields)

    model.save_base = in_transaction


def stored(instance: Any, using: str, update_fields: Iterable[str] | None) -> dict[str, Any]:
    """Return the row as it was just written, by attribute.

    What the object does not know itself, as after ``update_fields`` or an ``F()``, is read.
    """
    written = None if update_fields is None else set(update_fields)
    values, unknown = {}, []
    for field in instance._meta.concrete_fields:
        value = instance.__dict__.get(field.attname, _UNKNOWN)
        names = (field.name, field.attname)
        is_written = written is None or field.primary_key or not written.isdisjoint(names)
        if value is _UNKNOWN or not is_written or hasattr(value, "resolve_expression"):
            unknown.append(field)
        values[field.attname] = value
    if unknown:
        rows = type(instance)._base_manager.using(using).filter(pk=instance.pk)
        values |= rows.values(*(field.attname for field in unknown)).get()
    return _plain(instance._meta.concrete_fields, values)


def loaded(instance: Any) -> dict[str, Any]:
    """Return the fields that the object has loaded, by attribute: the row is gone, so no more can be read."""
    fields = [field for field in instance._meta.concrete_fields if field.attname in instance.__dict__]
    return _plain(fields, {field.attname: instance.__dict__[field.attname] for field in fields})


def _plain(fields: Iterable[Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values of the fields' own types, whatever they were assigned as."""
    return {field.attname: _value(field, values[field.attname]) for field in fields}


def _value(field: Field, value: Any) -> Any:
    from django.db.models import FileField

    if isinstance(field, FileField):
        return str(value) if value else ""
    return field.to_python(value)
