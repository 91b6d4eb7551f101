"""``@emits``: a model whose changes are events.

The event is written in the transaction that changes the row, and ``save()`` outside ``atomic()`` makes one
for both. An event that cannot be written takes the change back.

It sees what Django sends signals for: ``save()``, ``create()``, ``get_or_create()``, ``delete()`` of an
object or of a QuerySet, and what cascades. It does not see ``bulk_create()``, ``bulk_update()``,
``QuerySet.update()``, raw SQL, changes of a many-to-many field, and what the database itself cascades or
triggers; nor are fixtures of ``loaddata`` events. Where it matters what happened, and not that a row changed,
``emit_event`` says more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from relaybox.contrib.django.emit import emit_event
from relaybox.errors import ConfigError, shorten

if TYPE_CHECKING:
    from django.db.models import Field, Model

ModelClass = TypeVar("ModelClass", bound=type[Any])
Key: TypeAlias = Callable[["Model"], str | None] | str | EllipsisType | None


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
      attribute (``customer_id``), a file by its name; mind that this may hold what is nobody's business.
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
        """Hear of the changes of this model, and of those that are derived from it later."""
        from django.db.models.signals import class_prepared

        _save_in_transaction(self.model)
        if not self.model._meta.abstract:
            self.prepared(self.model)
        class_prepared.connect(self.prepared, weak=False, dispatch_uid=(self, "prepared"))

    def prepared(self, sender: Any, **_: Any) -> None:
        """A model is there; where it is ours, hear of its changes."""
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
        """The model whose table has the aggregate's own row: the highest that is ours."""
        concrete = model._meta.concrete_model
        parents = [parent for parent in concrete._meta.get_parent_list() if issubclass(parent, self.model)]
        return parents[-1] if parents else concrete


def _save_in_transaction(model: Any) -> None:
    """Let the row and its event be written together: Django sends ``post_save`` after its own transaction."""
    from django.db import router, transaction

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
    """The row as it was just written, by attribute.

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
    """The fields that the object has, by attribute: of a row that is gone, what was not loaded is unknown."""
    fields = [field for field in instance._meta.concrete_fields if field.attname in instance.__dict__]
    return _plain(fields, {field.attname: instance.__dict__[field.attname] for field in fields})


def _plain(fields: Iterable[Field], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the fields' own types, whatever they were assigned as."""
    return {field.attname: _value(field, values[field.attname]) for field in fields}


def _value(field: Field, value: Any) -> Any:
    from django.db.models import FileField

    if isinstance(field, FileField):
        return str(value) if value else ""
    return field.to_python(value)


_UNKNOWN = object()
