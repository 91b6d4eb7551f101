"""Emit events inside Django's open transaction, by ``emit_event`` or from a model's changes (``@emits``)."""

from __future__ import annotations

import functools
import logging
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias, TypeVar, Unpack

from asgiref.sync import sync_to_async
from django.db import router, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.contrib.django.conf import get_configuration, get_settings
from relaybox.contrib.django.databases import connection_of, get_statements, in_transaction, run_ours
from relaybox.core.event import Emitted
from relaybox.core.routing import UNROUTED
from relaybox.core.text import plural
from relaybox.emit.row import Call, Calls, Emission, EmitOptions, as_calls
from relaybox.emit.write import write
from relaybox.errors import ConfigError, NotInTransaction, shorten

if TYPE_CHECKING:
    from django.db.models import Field, Model

log = logging.getLogger("relaybox.django")

P = ParamSpec("P")
T = TypeVar("T")
ModelClass = TypeVar("ModelClass", bound=type[Any])
Key: TypeAlias = Callable[["Model"], str | None] | str | EllipsisType | None

_UNKNOWN = object()


def emit_event(
    aggregate_type: str,
    aggregate_id: Any,
    event_type: str,
    payload: Any,
    *,
    using: str | None = None,
    **options: Unpack[EmitOptions],
) -> Emitted:
    """Write an event inside the open ``atomic()``; it exists if and only if that commits.

    ``using`` defaults to the routers' choice for ``OutboxEvent``; the other arguments are those of
    ``Outbox.emit``. After the commit, the relay or worker is notified; that never raises here.

    Raise an ``EmitError`` before anything reaches the database, so that the transaction stays usable. It is
    ``NotInTransaction`` outside ``atomic()``, unless ``OUTBOX["REQUIRE_ATOMIC"]`` is False. Raise
    ``ConfigError`` for a wrong alias or setting, ``SchemaError`` for missing tables, else Django's errors.
    """
    return _emit([Call(aggregate_type, aggregate_id, event_type, payload, **options)], using)[0]


def emit_events(calls: Calls, *, using: str | None = None) -> list[Emitted]:
    """Write several events in order, each a ``Call`` or a dict of arguments; if one is invalid, none."""
    return _emit(as_calls(calls), using, many=True)


def _asynchronous(function: Callable[P, T]) -> Callable[P, Coroutine[Any, Any, T]]:
    """Return the function for asynchronous code, in the transaction of its synchronous calls."""

    @functools.wraps(function)
    async def called(*args: P.args, **options: P.kwargs) -> T:
        return await sync_to_async(function, thread_sensitive=True)(*args, **options)

    called.__name__ = called.__qualname__ = f"a{function.__name__}"
    return called


aemit_event = _asynchronous(emit_event)
aemit_events = _asynchronous(emit_events)


def _emit(calls: Sequence[Call], using: str | None, many: bool = False) -> list[Emitted]:
    connection = connection_of(using or default_alias())
    statements = get_statements(connection)
    builder = get_configuration().builder
    inside = in_transaction(connection)
    if not inside and get_settings().REQUIRE_ATOMIC:
        raise NotInTransaction(
            "no transaction is open: the event would be committed without the change it belongs to; put both"
            " into `with transaction.atomic():` (in asynchronous code, into a function called with"
            " sync_to_async), or set OUTBOX['REQUIRE_ATOMIC'] = False to allow it"
        )
    emissions = builder.build_all(calls, statements.dialect, many)
    with nullcontext() if inside else transaction.atomic(using=connection.alias):
        # Some databases keep the rows of a failed call. Committing its idempotency key would lose the event.
        with transaction.mark_for_rollback_on_error(using=connection.alias):
            emitted = run_ours(connection, write(emissions, statements))
        after_commit(connection, _new_rows(emissions, emitted))
    return emitted


def _new_rows(emissions: Sequence[Emission], emitted: Sequence[Emitted]) -> list[tuple[str, str]]:
    """Return the destination and id of each row that was written for a destination."""
    written = [one for one, result in zip(emissions, emitted, strict=True) if not result.duplicate]
    return [(row[2], row[0]) for one in written for row in one.rows if row[2] != UNROUTED]


def default_alias() -> str:
    """Return the database that routers choose for writing outbox events."""
    from relaybox.contrib.django.models import OutboxEvent

    alias: str = router.db_for_write(OutboxEvent)
    return alias


class Dispatch:
    """The rows of one transaction, and its ``on_commit`` hook; rows rolled back since are not found."""

    def __init__(self, using: str) -> None:
        self.using = using
        self.rows: defaultdict[str, list[str]] = defaultdict(list)
        self.done = False

    def __call__(self) -> None:
        """Notify Celery or a relay, once."""
        if self.done:
            return
        self.done = True
        try:
            tell(self.using, self.rows)
        except Exception as error:
            log.warning(
                "could not announce %s on %s; the next sweep will find them: %s: %s",
                plural(sum(map(len, self.rows.values())), "delivery"),
                self.using,
                type(error).__name__,
                error,
            )


def after_commit(connection: BaseDatabaseWrapper, rows: Sequence[tuple[str, str]]) -> None:
    """Notify Celery or a relay of these rows (destination and id) after the commit.

    Notify now if no transaction is open. Do nothing if autocommit is off: Django has no hook for that.
    """
    if not rows or not (connection.in_atomic_block or connection.get_autocommit()):
        return
    hooks = connection.run_on_commit
    open_ = (hook[1] for hook in reversed(hooks) if isinstance(hook[1], Dispatch) and not hook[1].done)
    dispatch = next(open_, None) or Dispatch(connection.alias)
    for destination, row in rows:
        dispatch.rows[destination].append(row)
    # A rollback to a savepoint drops its hooks, so each savepoint has one; the first to run notifies.
    if not hooks or hooks[-1][:2] != (set(connection.savepoint_ids), dispatch):
        transaction.on_commit(dispatch, using=connection.alias)


def tell(using: str, rows: Mapping[str, Sequence[str]]) -> None:
    """Notify Celery or a relay of these rows (ids by destination), as ``DISPATCH`` says."""
    settings = get_settings()
    if settings.by_celery:
        from relaybox.contrib.django.tasks import deliver_or_queue

        deliver_or_queue(using, rows)
    elif settings.DISPATCH != "none" and settings.rings:
        from relaybox.contrib.django.outbox import get_outbox

        get_outbox(using).wake(*rows)


def emits(
    *,
    created: str | None = None,
    updated: str | None = None,
    deleted: str | None = None,
    payload: Callable[[Any], Any] | None = None,
    aggregate_type: str | None = None,
    key: Key = ...,
) -> Callable[[ModelClass], ModelClass]:
    """Emit an event, in the row's transaction, when a row of the model is created, updated or deleted.

        @emits(created="order.created", updated="order.updated", payload=lambda order: {"total": order.total})
        class Order(models.Model): ...

    - ``payload``: returns the payload for an object. By default, all fields of the row by attribute
      (``customer_id``), files by name; mind private data.
    - ``aggregate_type``: defaults to the model's name. The aggregate's id is the primary key.
    - ``key``: as in ``emit_event``, or a function of the object.

    It sees what Django sends signals for: ``save()`` (even if no value changed), ``create()``, ``delete()``
    of an object or a QuerySet, and Django's cascades. It does not see ``bulk_create()``, ``bulk_update()``,
    ``QuerySet.update()``, ``loaddata``, raw SQL, many-to-many changes, or the database's own cascades.

    Proxies, children with their own tables, and models of an abstract one emit the same events, as the
    aggregate that they are rows of. A child's deletion has the parent's fields.
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
            raise ConfigError(f"emits: {shorten(model)} is not a model; decorate a subclass of models.Model")
        Changes(model, created, updated, deleted, payload, aggregate_type, key).watch()
        return model

    return decorate


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """The arguments of ``emits`` for one model, and its signal receivers."""

    model: Any
    created: str | None
    updated: str | None
    deleted: str | None
    payload: Callable[[Any], Any] | None
    aggregate_type: str | None
    key: Key

    def watch(self) -> None:
        """Connect to the signals of this model and of models derived from it later."""
        from django.db.models.signals import class_prepared

        _save_in_transaction(self.model)
        if not self.model._meta.abstract:
            self.prepared(self.model)
        class_prepared.connect(self.prepared, weak=False, dispatch_uid=(self, "prepared"))

    def prepared(self, sender: Any, **_: Any) -> None:
        """Connect to the signals of a newly defined model if it derives from ours."""
        from django.db.models.signals import post_delete, post_save

        if not issubclass(sender, self.model):
            return
        if self.created or self.updated:
            post_save.connect(self.saved, sender=sender, weak=False, dispatch_uid=(self, "saved"))
        # Deleting a child also sends the parent's signal, so connect to the parent only.
        if self.deleted and self._root(sender) is sender._meta.concrete_model:
            post_delete.connect(self.removed, sender=sender, weak=False, dispatch_uid=(self, "removed"))

    def saved(
        self, instance: Any, created: bool, raw: bool, using: str, update_fields: Any = None, **_: Any
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
        """Return the topmost parent that is ours: its table has the aggregate's own row."""
        concrete = model._meta.concrete_model
        parents = [parent for parent in concrete._meta.get_parent_list() if issubclass(parent, self.model)]
        return parents[-1] if parents else concrete


def _save_in_transaction(model: Any) -> None:
    """Save the row and its event in one transaction: Django sends ``post_save`` after its own."""
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
    """Return the row just written, by attribute; query what ``update_fields`` or an ``F()`` left unknown."""
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
    return {field.attname: _value(field, values[field.attname]) for field in instance._meta.concrete_fields}


def loaded(instance: Any) -> dict[str, Any]:
    """Return the loaded fields by attribute; the row is gone, so the others cannot be read."""
    values = instance.__dict__
    fields = [field for field in instance._meta.concrete_fields if field.attname in values]
    return {field.attname: _value(field, values[field.attname]) for field in fields}


def _value(field: Field, value: Any) -> Any:
    from django.db.models import FileField

    if isinstance(field, FileField):
        return str(value) if value else ""
    return field.to_python(value)
