"""Sources of an index's documents: how an application names one, and what an open one can do.

A live writer changes its row before it emits. Rows stay locked from the read until their events commit, so
our event and the writer's have the order of the states they carry.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date, datetime
from decimal import Decimal
from itertools import pairwise
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias
from uuid import UUID

import sqlalchemy as sa

from relaybox.core.imports import error_with_line, load
from relaybox.core.text import id_field, text_field
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.emit.row import Call
from relaybox.errors import ConfigError
from relaybox.search.engine import pages

KINDS = "a select, a QuerySet, an iterable, a function that returns one of these, or a Source of it"

AT_ONCE = 1_000


@dataclass(frozen=True)
class Source:
    """Where documents come from, and the types of their events.

    - ``documents``: a SQLAlchemy select (of columns, or of an entity), a Django QuerySet, an iterable (also
      asynchronous), or a function that returns one of these.
    - ``aggregate_type``: by default the name of the entity's or model's class, or ``Document``.
    - ``event_type``: by default that name in lower case and ``.updated``.
    - ``id``: the column or field that is the aggregate's id; pages are in its order.
    - ``document``: makes the payload of a row or an object. By default it is the columns of a row, the mapped
      columns of an entity, the fields of a model, or the mapping itself.
    """

    documents: Any
    aggregate_type: str | None = None
    event_type: str | None = None
    id: str = "id"
    document: Callable[[Any], Mapping[str, Any]] | None = None
    name: str = ""
    """Identifies an interrupted backfill; ``load_source`` sets it."""

    def __post_init__(self) -> None:
        text_field("Source.id", self.id, 255)
        for name in ("aggregate_type", "event_type"):
            if getattr(self, name) is not None:
                text_field(f"Source.{name}", getattr(self, name), 100)
        if self.document is not None and not callable(self.document):
            raise ConfigError(f"Source.document = {self.document!r}: give a function of a row or an object")

    def types(self, entity: str | None) -> tuple[str, str]:
        """Return the aggregate type and the event type for documents of this class."""
        aggregate_type = self.aggregate_type or entity or "Document"
        return aggregate_type, self.event_type or f"{aggregate_type.lower()}.updated"

    def item(self, thing: Any, id_: Any, default: Callable[[Any], Any], key: Any = None) -> Item:
        """Return the item of a row or an object; ``key`` is its position if that is not its id."""
        own = as_key(id_, self)
        aggregate_id = id_field("aggregate_id", id_ if isinstance(id_, int | UUID) else str(own))
        what = f"{self.label}: the document of {id_!r}"
        try:
            made = (self.document or default)(thing)
        except Exception as error:
            raise ConfigError(f"{what} cannot be made: {error_with_line(error)}") from error
        if not isinstance(made, Mapping):
            fix = "give a mapping of names and values; Source(document=…) makes one"
            raise ConfigError(f"{what} is of type {type(made).__name__}; {fix}")
        return Item(aggregate_id, made, own if key is None else key)

    def check_distinct(self, items: Iterable[Item], kind: str, subquery: str) -> None:
        """Raise ``ConfigError`` if two items that follow each other have the same id."""
        for one, next_ in pairwise(items):
            if one.id == next_.id:
                fix = f"a document is one row: gather what is joined to it in a {subquery}, or in document="
                raise ConfigError(f"{self.label}: the {kind} gives several rows of {one.id!r}; {fix}")

    @property
    def label(self) -> str:
        """Return the name to use in messages."""
        return _setting(self.name)


def load_source(text: str) -> Source:
    """Return the source at ``module:name``; a bare select, QuerySet, iterable or function becomes one."""
    fix = "write where the application's Source is, such as --source shop.search:documents"
    return as_source(load(text, f"source = {text!r}", fix), text)


def as_source(found: Any, name: str = "") -> Source:
    """Return a ``Source`` of the value. Raise ``ConfigError`` if it cannot be one."""
    if isinstance(found, Source):
        return found if found.name or not name else replace(found, name=name)
    if isinstance(found, type):
        documents = KINDS
        if sa.inspect(found, raiseerr=False) is not None:
            documents = f"its documents: sa.select({found.__name__})"
        elif hasattr(found, "_default_manager"):
            documents = f"its documents: {found.__name__}.objects.all()"
        raise ConfigError(f"{_setting(name)}: it is a class; give {documents}")
    if not callable(found) and kind_of(found) is None:
        raise ConfigError(f"{_setting(name)}: it is of type {type(found).__name__}; give {KINDS}")
    return Source(found, name=name)


def _setting(name: str) -> str:
    return f"source = {name!r}" if name else "source"


_DJANGO = {("django.db.models.query", "QuerySet"), ("django.db.models.manager", "BaseManager")}
"""QuerySets and managers, recognized without importing Django."""


def kind_of(found: Any) -> Literal["select", "queryset", "iterable"] | None:
    """Return how documents can be read; text and mappings do not count as iterables."""
    if isinstance(found, sa.sql.expression.SelectBase):
        return "select"
    if any((base.__module__, base.__qualname__) in _DJANGO for base in type(found).__mro__):
        return "queryset"
    iterable = isinstance(found, Iterable | AsyncIterable) and not isinstance(found, str | bytes | Mapping)
    return "iterable" if iterable else None


async def resolve(source: Source) -> Any:
    """Return the documents; if they are a function, call it."""
    found = source.documents
    if callable(found) and kind_of(found) not in ("select", "queryset"):
        try:
            found = found()
            if inspect.isawaitable(found):
                found = await found
        except TypeError as error:
            raise ConfigError(f"{source.label}: the call failed: {error_with_line(error)}") from error
    if kind_of(found) is None:
        raise ConfigError(f"{source.label}: the documents are of type {type(found).__name__}; give {KINDS}")
    return found


class Item(NamedTuple):
    """A document: the aggregate's id, the payload, and the key (as JSON) that the next page starts after."""

    id: str
    payload: Mapping[str, Any]
    key: Any


Calls: TypeAlias = Callable[[Sequence[Item]], Sequence[Call]]
Repairs: TypeAlias = Callable[[Sequence[Item], Sequence[str]], Sequence[Call]]
Also: TypeAlias = Callable[[Statements, Sequence[Item]], Steps[Sequence[Item]]]
"""Runs statements in a page's transaction before its events; returns the items that get events."""


class Rows(Protocol):
    """The documents of an open source."""

    aggregate_type: str
    event_type: str
    guarded: bool
    """True if rows stay locked from the read until their events commit."""

    async def count(self) -> int | None:
        """Return the number of documents, or None if they must be read to count them."""

    def read(self, size: int, after: Any = None) -> AsyncIterator[Sequence[Item]]:
        """Yield pages by key, without locks."""

    async def emit_after(self, after: Any, size: int, calls: Calls, also: Also) -> Sequence[Item]:
        """In one transaction: lock and read the next page, run ``also``, and emit the events.

        Return the page: smaller if others have locked some rows, ``[]`` at the end. Raise ``Busy`` if a row
        stays locked.
        """

    async def emit_ids(self, ids: Sequence[str], calls: Repairs) -> int:
        """Lock and read these, in one or more transactions, and emit; return the number of events.

        ``calls`` gets the items that exist and the ids that do not. If rows are guarded, nobody can create
        the missing ones before the commit. Raise ``Busy`` if others keep rows locked.
        """

    async def existing(self, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the payloads of those that exist, by id, without locks."""


def find_items(
    ids: Sequence[str], convert: Callable[[str], Any], read: Callable[[Sequence[Any]], Sequence[Item]]
) -> Sequence[Item]:
    """Return those of these documents that exist, ``AT_ONCE`` in a read.

    ``convert`` makes a column's value of an id, or raises if the column cannot hold it.
    """
    asked = dict.fromkeys(ids)
    wanted: list[Any] = []
    for id_ in asked:
        with suppress(ValueError, ArithmeticError):
            value = convert(id_)
            if not isinstance(value, int) or -(2**63) <= value < 2**63:
                wanted.append(value)
    return [item for page in pages(wanted, AT_ONCE) for item in read(page) if item.id in asked]


def name_of(source: Source, rows: Rows) -> str:
    """Return the name that identifies the backfill when it is resumed."""
    made, types = source.documents, f"{rows.aggregate_type} ({rows.event_type})"
    if source.name or not hasattr(made, "__qualname__"):
        return source.name or types
    own = f"{getattr(made, '__module__', '')}:{made.__qualname__}"
    # All lambdas of a module have the same name.
    return f"{own} {types}" if "<lambda>" in own else own


def as_key(value: Any, source: Source) -> Any:
    """Return an id as a checkpoint stores it: a number or text."""
    match value:
        case int() | str() if not isinstance(value, bool):
            return value
        case UUID() | Decimal():
            return str(value)
        case date():
            return value.isoformat()
    fix = "it must be an integer, a text, a UUID or a time"
    raise ConfigError(f"{source.label}: the id of a document ({source.id}) is {value!r}; {fix}")


def from_key(key: Any, kind: type | None) -> Any:
    """Convert the key to the type of its column. Raise ``ValueError`` if it cannot hold the key."""
    if kind is None or isinstance(key, kind):
        return key
    if kind is bytes:
        raise ValueError("JSON cannot hold an id that is bytes")
    if kind in (datetime, date):
        return kind.fromisoformat(str(key))
    return kind(str(key))
