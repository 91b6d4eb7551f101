"""The contract of a source that is open: its documents page by page, and events of them as they are.

A live writer changes its row before it emits. Where rows stay locked from the moment they are read to the
commit of their events, an event of ours stands before or after the writer's as the states that they tell do.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from datetime import date, datetime
from decimal import Decimal
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias
from uuid import UUID

from relaybox.core.text import id_field
from relaybox.database.statements.delivery import Statements
from relaybox.database.steps import Steps
from relaybox.emit.row import Call
from relaybox.errors import ConfigError
from relaybox.search.source import Source, as_source, is_queryset, is_select, resolve

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

AT_ONCE = 1_000
"""Ids that one statement names."""


class Item(NamedTuple):
    """A document: the aggregate's id, the payload, and what the next page starts after (as JSON has it)."""

    id: str
    payload: Mapping[str, Any]
    key: Any


Calls: TypeAlias = Callable[[Sequence[Item]], Sequence[Call]]
Repairs: TypeAlias = Callable[[Sequence[Item], Sequence[str]], Sequence[Call]]
Also: TypeAlias = Callable[[Statements, Sequence[Item]], Steps[Sequence[Item]]]
"""Statements in the transaction of a page, ahead of its events; those of its items that get events."""


class Rows(Protocol):
    """The documents of a source. See the module's text."""

    aggregate_type: str
    event_type: str
    guarded: bool
    """Whether rows stay locked from the read to the commit of their events."""

    async def count(self) -> int | None:
        """How many documents there are, where that can be said without reading them."""
        ...

    def read(self, size: int, after: Any = None) -> AsyncIterator[Sequence[Item]]:
        """Pages by key, no locks."""
        ...

    async def emit_after(
        self, after: Any, size: int, calls: Calls, also: Also | None = None
    ) -> Sequence[Item]:
        """In one transaction: read the next page, locked, emit its events, and do what ``also`` says.

        The page that was read comes back, which is smaller where others have rows of it; ``[]`` at the end.
        Raises ``Busy`` where they do not let go of one.
        """
        ...

    async def emit_ids(self, ids: Sequence[str], calls: Repairs) -> int:
        """In one or more transactions: read these, locked, and emit; how many events it were.

        ``calls`` gets items that are found, and ids that are not. None of those is made before the commit,
        where rows are guarded. Raises ``Busy`` where others do not let go of them.
        """
        ...

    async def existing(self, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """The payloads that there are of these, by id; no locks."""
        ...


@asynccontextmanager
async def open_rows(outbox: Outbox, source: Source) -> AsyncIterator[Rows]:
    """The documents of a source, for events in this outbox; connections are held until the end."""
    source = as_source(source)
    documents = await resolve(source)
    if is_queryset(documents):
        # Not an import: Django's part stands above this one.
        django = import_module("relaybox.contrib.django.search")
        opened = django.open_rows(outbox, source, documents)
    elif is_select(documents):
        from relaybox.search.select_rows import open_select

        opened = open_select(outbox, source, documents)
    else:
        from relaybox.search.iterable_rows import open_iterable

        opened = open_iterable(outbox, source, documents)
    async with opened as rows:
        yield rows


def name_of(source: Source, rows: Rows) -> str:
    """By which the same backfill is known again."""
    if source.name:
        return source.name
    made = source.documents
    types = f"{rows.aggregate_type} ({rows.event_type})"
    if not hasattr(made, "__qualname__"):
        return types
    own = f"{getattr(made, '__module__', '')}:{made.__qualname__}"
    # All lambdas of a module are called the same.
    return f"{own} {types}" if "<lambda>" in own else own


def as_key(value: Any, source: Source) -> Any:
    """An id as a checkpoint keeps it: a number or a text."""
    match value:
        case bool() | None:
            pass
        case int() | str():
            return value
        case UUID() | Decimal():
            return str(value)
        case date():
            return value.isoformat()
    fix = "it must be an integer, a text, a UUID or a time"
    raise ConfigError(f"{source.told}: the id of a document ({source.id}) is {value!r}; {fix}")


def as_id(value: Any, key: Any) -> str:
    """An id as an event has it."""
    return id_field("aggregate_id", value if isinstance(value, int | UUID) else str(key))


def from_key(key: Any, kind: type | None) -> Any:
    """What a column of that type compares with; raises ``ValueError`` where the key is none of its."""
    if kind is None or isinstance(key, kind):
        return key
    if kind is bytes:
        raise ValueError("an id that is bytes has no form in JSON")
    if kind in (datetime, date):
        return kind.fromisoformat(str(key))
    if kind is int:
        return int(key)
    return kind(str(key))
