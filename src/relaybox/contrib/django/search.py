"""Read a QuerySet's rows as search documents, locked by id without joins, and emit their events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, TypeVar

from django.core.exceptions import FieldDoesNotExist, ValidationError
from django.db import Error, connections, router, transaction
from django.db.models.query import ModelIterable, ValuesIterable

from relaybox.contrib.django.databases import connection_of, driver_error, execute, get_statements, run_ours
from relaybox.contrib.django.emit import emit_events
from relaybox.contrib.django.private import alias_of, chosen_fields, gives
from relaybox.database.dialects import refusal
from relaybox.database.transactions import REPEATABLE_READ, lock_file, lock_tables, lock_wait
from relaybox.emit.row import Call
from relaybox.errors import ConfigError, did_you_mean
from relaybox.outbox import Outbox
from relaybox.search.source import Also, Calls, Item, Repairs, Source, as_key, find_items
from relaybox.search.transactions import HURRIED, PATIENT, Found, Portion, emit_all, patiently

T = TypeVar("T")


@asynccontextmanager
async def open_rows(outbox: Outbox, source: Source, queryset: Any) -> AsyncIterator[QuerySetRows]:
    """Open the documents of a QuerySet. Raise ``ConfigError`` if its rows cannot be paged by id."""
    with ThreadPoolExecutor(1, "relaybox-rows") as thread:
        rows = QuerySetRows(outbox, source, queryset.all(), thread)
        try:
            await rows.check()
            yield rows
        finally:
            await asyncio.get_running_loop().run_in_executor(thread, connections.close_all)


class QuerySetRows:
    """The ``Rows`` of a QuerySet, in a thread with its own connection."""

    guarded = True

    def __init__(self, outbox: Outbox, source: Source, queryset: Any, thread: ThreadPoolExecutor) -> None:
        _check_clauses(source, queryset)
        self._using = alias_of(queryset) or router.db_for_write(queryset.model)
        _check_place(source, self._using, outbox)
        self.aggregate_type, self.event_type = source.types(queryset.model.__name__)
        self._documents = Documents(source, queryset, self._using)
        self._thread = thread
        self._portion = Portion()

    async def check(self) -> None:
        """Raise ``ConfigError`` if an id is null."""
        await self._call(self._documents.check)

    async def count(self) -> int:
        """Return the number of documents."""
        return await self._call(self._documents.queryset.count)

    async def read(self, size: int, after: Any = None) -> AsyncIterator[Sequence[Item]]:
        """Yield pages by key, without locks."""
        while page := await self._call(partial(self._documents.page, after, size)):
            yield page
            after = page[-1].key

    async def emit_after(
        self, after: Any, size: int, calls: Calls, also: Also | None = None
    ) -> Sequence[Item]:
        """Read and lock a page, and emit its events in the same transaction."""

        def work(size: int, wait: float) -> Awaitable[Sequence[Item]]:
            return self._call(partial(self._emit_after, after, size, calls, also, wait), wait)

        return await self._portion.take(size, work)

    async def emit_ids(self, ids: Sequence[str], calls: Repairs) -> int:
        """Read and lock these rows, and emit; the missing ones cannot be created before the commit."""

        def work(ids: Sequence[str], wait: float) -> Awaitable[Found]:
            return self._call(partial(self._emit_found, ids, calls, wait), wait)

        def fence(missing: Sequence[str]) -> Awaitable[int]:
            return self._call(partial(self._emit_missing, missing, calls))

        return await emit_all(self, ids, work, fence)

    async def existing(self, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the payloads of the existing ids, without locks."""
        items = await self._call(partial(self._documents.by_ids, ids, lock=False))
        return {item.id: item.payload for item in items}

    async def _call(self, work: Callable[[], T], wait: float = PATIENT) -> T:
        """Call it in the thread with ``patiently``."""
        run = partial(asyncio.get_running_loop().run_in_executor, self._thread)
        try:
            return await patiently("rows, or the table,", wait, lambda: run(work), Error, driver_error)
        except Error as error:
            await run(lambda: connection_of(self._using).close_if_unusable_or_obsolete())
            raise refusal(driver_error(error)) from error

    def _emit_after(
        self, after: Any, size: int, calls: Calls, also: Also | None, wait: float
    ) -> Sequence[Item]:
        # Outside the transaction, which must not take its snapshot before the rows are locked.
        while ids := self._documents.ids(after, size):
            with transaction.atomic(using=self._using):
                self._wait(wait)
                if items := self._documents.of(ids, lock=True):
                    self._emit(items, calls, also)
                    return items
            after = self._documents.key(ids[-1])
        return []

    def _emit_found(self, ids: Sequence[str], calls: Repairs, wait: float) -> Found:
        with transaction.atomic(using=self._using):
            self._wait(wait)
            items = self._documents.by_ids(ids, lock=True)
            emitted = self._write(calls(items, []))
        return Found(emitted, frozenset(ids) - {item.id for item in items})

    def _emit_missing(self, ids: Sequence[str], calls: Repairs) -> int:
        """Emit for the missing ids, while their rows cannot be created."""
        connection = connection_of(self._using)
        if connection.vendor == "mysql":
            # MySQL locks the gaps between rows only in REPEATABLE READ, and holds them from the first row on.
            self._wait(HURRIED)
            execute(connection, REPEATABLE_READ)
        with transaction.atomic(using=self._using):
            by_table = connection.vendor == "postgresql"
            if by_table:
                self._wait(PATIENT)
                self._documents.lock_tables()
            items = self._documents.by_ids(ids, lock=not by_table)
            there = {item.id for item in items}
            return self._write(calls(items, [id_ for id_ in ids if id_ not in there]))

    def _wait(self, seconds: float) -> None:
        connection = connection_of(self._using)
        if text := lock_wait(connection.vendor, seconds):
            execute(connection, text)

    def _emit(self, items: Sequence[Item], calls: Calls, also: Also | None) -> None:
        if also is not None:
            self._wait(PATIENT)
            connection = connection_of(self._using)
            items = run_ours(connection, also(get_statements(connection), items))
        self._write(calls(items))

    def _write(self, made: Sequence[Call]) -> int:
        self._wait(PATIENT)
        if made:
            emit_events(made, using=self._using)
        return len(made)


class Documents:
    """Reads and locks the rows of a QuerySet as documents, on this thread's connection."""

    def __init__(self, source: Source, queryset: Any, using: str) -> None:
        self._source = source
        self._using = using
        self._field = _id(source, queryset)
        self._id = self._field.attname
        self.queryset = queryset.using(using).order_by(self._id)

    def check(self) -> None:
        """Raise ``ConfigError`` if an id is null."""
        if self._field.null and self.queryset.filter(**{f"{self._id}__isnull": True}).exists():
            fix = "leave those rows out with filter(), or name another field with Source(id=…)"
            raise ConfigError(f"{self._source.label}: {self._id} is null in some rows; {fix}")

    def page(self, after: Any, size: int) -> Sequence[Item]:
        """Return the documents after a key, without locks."""
        return self._items(self._after(after)[:size])

    def ids(self, after: Any, size: int) -> list[Any]:
        """Return the field's values after a key."""
        return list(self._after(after).values_list(self._id, flat=True)[:size])

    def key(self, value: Any) -> Any:
        """Return the field's value as the key to read on from."""
        return as_key(value, self._source)

    def by_ids(self, ids: Sequence[str], *, lock: bool) -> Sequence[Item]:
        """Return the documents of these ids; ids that the field cannot hold have none."""
        return find_items(ids, self._value, partial(self.of, lock=lock))

    def of(self, values: Sequence[Any], *, lock: bool) -> list[Item]:
        """Return the documents whose field has one of these values."""
        if lock:
            self._lock(values)
        return self._items(self.queryset.filter(**{f"{self._id}__in": values}))

    def lock_tables(self) -> None:
        """Keep others from writing to the documents' tables."""
        connection, model = connection_of(self._using), self.queryset.model
        models = (model, *model._meta.get_parent_list())
        names = dict.fromkeys(connection.ops.quote_name(one._meta.db_table) for one in models)
        execute(connection, lock_tables(", ".join(names)))

    def _lock(self, values: Sequence[Any]) -> None:
        connection, model = connection_of(self._using), self.queryset.model
        if not connection.features.has_select_for_update:
            # SQLite: become the writer first, to see what others have committed by then.
            table, key = map(connection.ops.quote_name, (model._meta.db_table, model._meta.pk.column))
            execute(connection, lock_file(table, key))
            return
        no_key = connection.features.has_select_for_no_key_update
        rows = model._base_manager.using(self._using).filter(**{f"{self._id}__in": values})
        # A child model has rows in several tables; this locks all of them.
        list(rows.order_by(self._id).select_for_update(no_key=no_key).only(self._id))

    def _after(self, after: Any) -> Any:
        if after is None:
            return self.queryset
        return self.queryset.filter(**{f"{self._id}__gt": self._field.to_python(after)})

    def _value(self, id_: str) -> Any:
        """Return an id as the field's value. Raise ``ValueError`` if it cannot hold it."""
        try:
            return self._field.to_python(id_)
        except ValidationError as error:
            raise ValueError(str(error)) from error

    def _items(self, things: Iterable[Any]) -> list[Item]:
        items = [self._source.item(thing, self._id_of(thing), _fields) for thing in things]
        self._source.check_distinct(items, "QuerySet", "Subquery")
        return items

    def _id_of(self, thing: Any) -> Any:
        return thing[self._id] if isinstance(thing, Mapping) else getattr(thing, self._id)


def _fields(thing: Any) -> Mapping[str, Any]:
    if isinstance(thing, Mapping):
        return thing
    return {field.attname: getattr(thing, field.attname) for field in thing._meta.concrete_fields}


def _check_clauses(source: Source, queryset: Any) -> None:
    query = queryset.query
    refused = {
        "a slice": query.is_sliced,
        "distinct()": query.distinct,
        "a union, intersection or difference": query.combinator,
        "an aggregate (its annotations go into a Subquery)": query.group_by is not None,
        "values_list() (use values())": not issubclass(gives(queryset), (ModelIterable, ValuesIterable)),
    }
    for what, found in refused.items():
        if found:
            why = "each document must be one row of a table, which is found and locked by its id"
            raise ConfigError(f"{source.label}: the QuerySet has {what}; leave it out: {why}")


def _check_place(source: Source, using: str, outbox: Outbox) -> None:
    own = getattr(outbox, "using", None)
    if own is None:
        fix = "use relaybox.contrib.django.outbox.get_outbox(), or `manage.py outbox`"
        raise ConfigError(f"{source.label}: a QuerySet needs the project's own outbox; {fix}")
    if own != using:
        fix = f"choose it with using={using!r}, or read the documents with .using({own!r})"
        raise ConfigError(
            f"{source.label}: the documents are in the database {using!r}, the outbox in {own!r}; {fix}"
        )


def _id(source: Source, queryset: Any) -> Any:
    model = queryset.model._meta
    names = [field.name for field in model.concrete_fields]
    try:
        field = model.pk if source.id == "pk" else model.get_field(source.id)
    except FieldDoesNotExist:
        field = None
    chosen = chosen_fields(queryset)
    if field is None or not getattr(field, "concrete", False):
        hint = did_you_mean(source.id, names)
        fix = "name the field of the documents' ids with Source(id=…)"
        raise ConfigError(f"{source.label}: {model.object_name} has no field {source.id!r}{hint}; {fix}")
    if chosen and field.attname not in chosen:
        fix = f"add {field.attname!r} to it"
        raise ConfigError(f"{source.label}: values() leaves out the documents' ids; {fix}")
    return field
