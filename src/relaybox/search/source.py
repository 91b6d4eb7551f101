"""What the documents of an index are made of: a select, a QuerySet, or anything that can be iterated."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from relaybox.core.imports import load, told_where
from relaybox.core.text import text_field
from relaybox.errors import ConfigError

FIX = "write where the application's Source is, such as --source shop.search:documents"
KINDS = "a select, a QuerySet, an iterable, a function that returns one of these, or a Source of it"


@dataclass(frozen=True)
class Source:
    """Where documents come from, and what their events are called.

    ``documents``: a SQLAlchemy select (of columns, or of an entity), a Django QuerySet, an iterable, also an
    asynchronous one, or a function that returns one of these.

    - ``aggregate_type``: left out, the name of the entity's or model's class, else ``Document``.
    - ``event_type``: left out, that name in lower case and ``.updated``.
    - ``id``: the column or field that is the aggregate's id; pages go by it.
    - ``document``: makes the payload of a row or an object. Left out, it is the columns of a row, the mapped
      columns of an entity, the fields of a model, or the mapping itself.
    """

    documents: Any
    aggregate_type: str | None = None
    event_type: str | None = None
    id: str = "id"
    document: Callable[[Any], Mapping[str, Any]] | None = None
    name: str = ""
    """By which a backfill that was interrupted is found again; ``load_source`` sets it."""

    def __post_init__(self) -> None:
        text_field("Source.id", self.id, 255)
        for name in ("aggregate_type", "event_type"):
            if getattr(self, name) is not None:
                text_field(f"Source.{name}", getattr(self, name), 100)
        if self.document is not None and not callable(self.document):
            raise ConfigError(f"Source.document = {self.document!r}: give a function of a row or an object")

    def types(self, entity: str | None) -> tuple[str, str]:
        """The aggregate's and the events' type, where the documents are of a class of that name."""
        aggregate_type = self.aggregate_type or entity or "Document"
        return aggregate_type, self.event_type or f"{aggregate_type.lower()}.updated"

    def payload(self, thing: Any, id_: object, default: Callable[[Any], Any]) -> Mapping[str, Any]:
        """The document of a row or an object; raises ``ConfigError`` that names the id."""
        make = self.document or default
        try:
            made = make(thing)
        except Exception as error:
            raise ConfigError(
                f"{self.told}: the document of {id_!r} cannot be made: {told_where(error)}"
            ) from error
        if not isinstance(made, Mapping):
            fix = "give a mapping of names and values; Source(document=…) makes one"
            raise ConfigError(f"{self.told}: the document of {id_!r} is of type {type(made).__name__}; {fix}")
        return made

    @property
    def told(self) -> str:
        """What messages call it."""
        return f"source = {self.name!r}" if self.name else "source"


def load_source(text: str) -> Source:
    """The source at ``module:name``; a bare select, QuerySet, iterable or function is made into one."""
    setting = f"source = {text!r}"
    return as_source(load(text, setting, FIX), text)


def as_source(found: Any, name: str = "") -> Source:
    """A source of whatever may be one; raises ``ConfigError``."""
    if isinstance(found, Source):
        return found if found.name or not name else _named(found, name)
    setting = f"source = {name!r}" if name else "source"
    if isinstance(found, type):
        raise ConfigError(f"{setting}: it is a class; give {_documents_of(found)}")
    if not may_be_documents(found):
        raise ConfigError(f"{setting}: it is of type {type(found).__name__}; give {KINDS}")
    return Source(found, name=name)


def _documents_of(found: type) -> str:
    """What to write for all objects of a class."""
    if sa.inspect(found, raiseerr=False) is not None:
        return f"its documents: sa.select({found.__name__})"
    if hasattr(found, "_default_manager"):
        return f"its documents: {found.__name__}.objects.all()"
    return KINDS


def _named(source: Source, name: str) -> Source:
    return Source(
        source.documents, source.aggregate_type, source.event_type, source.id, source.document, name
    )


def may_be_documents(found: Any) -> bool:
    """Whether it is, or may return, something that documents can be read from."""
    return callable(found) or is_select(found) or is_queryset(found) or is_iterable(found)


def is_select(found: Any) -> bool:
    """Whether it is a statement of SQLAlchemy's."""
    return isinstance(found, sa.sql.expression.SelectBase)


def is_queryset(found: Any) -> bool:
    """Whether it is a QuerySet, or a manager, of Django's, said without importing Django."""
    names = {("django.db.models.query", "QuerySet"), ("django.db.models.manager", "BaseManager")}
    return any((base.__module__, base.__qualname__) in names for base in type(found).__mro__)


def is_iterable(found: Any) -> bool:
    """Whether it can be iterated, as more than the letters of a text or the keys of a mapping."""
    return isinstance(found, Iterable | AsyncIterable) and not isinstance(found, str | bytes | Mapping)


async def resolve(source: Source) -> Any:
    """The documents themselves: what the function returns, where they are a function's."""
    found = source.documents
    if callable(found) and not (is_select(found) or is_queryset(found)):
        try:
            found = found()
            if inspect.isawaitable(found):
                found = await found
        except TypeError as error:
            raise ConfigError(f"{source.told}: the call failed: {told_where(error)}") from error
    if is_select(found) or is_queryset(found) or is_iterable(found):
        return found
    raise ConfigError(f"{source.told}: the documents are of type {type(found).__name__}; give {KINDS}")
