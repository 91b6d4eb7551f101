"""Read documents with a SQLAlchemy select on the outbox's own database.

A page takes two statements: one locks the rows by id, one reads them. A single statement that waited for a
lock would see the new row, but not the new rows joined to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from relaybox.database.dialects import missing_tables
from relaybox.database.transactions import lock_tables
from relaybox.errors import ConfigError, did_you_mean
from relaybox.search.source import Also, Calls, Item, Repairs, Source, find_items, from_key
from relaybox.search.transactions import Found, Portion, Transactions, emit_all

if TYPE_CHECKING:
    from relaybox.outbox import Outbox


@asynccontextmanager
async def open_select(outbox: Outbox, source: Source, statement: Any) -> AsyncIterator[SelectRows]:
    """Open the documents of a select. Raise ``ConfigError`` if its rows cannot be paged by id."""
    shape = shape_of(source, statement)
    async with aclosing(Transactions(outbox)) as transactions:
        rows = SelectRows(transactions, source, shape)
        await transactions.run("read", rows.check)
        yield rows


class SelectRows:
    """``Rows`` of a select."""

    guarded = True

    def __init__(self, transactions: Transactions, source: Source, shape: Shape) -> None:
        self.aggregate_type, self.event_type = source.types(shape.entity_name)
        self._transactions = transactions
        self._source = source
        self._shape = shape
        self._portion = Portion()

    def check(self, connection: sa.Connection) -> None:
        """Raise if an id is null, or the select cannot be executed."""
        shape, source = self._shape, self._source
        # Selects all columns, so that an error in one shows before the first page.
        self._execute(connection, shape.statement.where(sa.false())).close()
        nulls = shape.only(sa.literal(1)).where(shape.id.is_(None)).limit(1)
        if shape.nullable and self._execute(connection, nulls).first() is not None:
            fix = "leave those rows out with a WHERE, or name another column with Source(id=…)"
            raise ConfigError(f"{source.label}: {source.id} is null in some rows; {fix}")

    async def count(self) -> int:
        """Return the number of documents."""
        counting = self._shape.only(sa.func.count())
        return await self._transactions.run("read", lambda c: int(self._execute(c, counting).scalar_one()))

    async def read(self, size: int, after: Any = None) -> AsyncIterator[Sequence[Item]]:
        """Yield pages by key, without locks."""
        while page := await self._transactions.run("read", partial(self._page, after, size)):
            yield page
            after = page[-1].key

    async def emit_after(self, after: Any, size: int, calls: Calls, also: Also) -> Sequence[Item]:
        """Lock and read a page, and emit its events in the same transaction."""

        def emit(size: int, connection: sa.Connection) -> Sequence[Item]:
            if page := self._page(after, size, connection, lock=True):
                self._transactions.emit_page(connection, page, calls, also)
            return page

        def work(size: int, wait: float) -> Awaitable[Sequence[Item]]:
            return self._transactions.run("write", partial(emit, size), wait=wait)

        return await self._portion.take(size, work)

    async def emit_ids(self, ids: Sequence[str], calls: Repairs) -> int:
        """Lock and read these rows, and emit. No one can create the missing ones before the commit."""

        def emit_found(ids: Sequence[str], connection: sa.Connection) -> Found:
            items = self._by_ids(ids, connection, lock=True)
            emitted = self._transactions.emit(connection, calls(items, []))
            return Found(emitted, frozenset(ids) - {item.id for item in items})

        def work(ids: Sequence[str], wait: float) -> Awaitable[Found]:
            return self._transactions.run("write", partial(emit_found, ids), wait=wait)

        def fence(missing: Sequence[str]) -> Awaitable[int]:
            return self._transactions.run("fence", partial(self._emit_missing, missing, calls))

        return await emit_all(self, ids, work, fence)

    async def existing(self, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """Return the payloads of those that exist, without locks."""
        items = await self._transactions.run("read", partial(self._by_ids, ids))
        return {item.id: item.payload for item in items}

    def _emit_missing(self, ids: Sequence[str], calls: Repairs, connection: sa.Connection) -> int:
        """Emit for the missing ids while nobody can create them."""
        fenced = self._transactions.backend == "postgresql"
        if fenced:
            # Waits for writers of the table, and keeps others out until the commit.
            name = connection.dialect.identifier_preparer.format_table(self._shape.base)
            connection.exec_driver_sql(lock_tables(name))
        items = self._by_ids(ids, connection, lock=not fenced)
        there = {item.id for item in items}
        return self._transactions.emit(connection, calls(items, [id_ for id_ in ids if id_ not in there]))

    def _page(self, after: Any, size: int, connection: sa.Connection, lock: bool = False) -> Sequence[Item]:
        """Return the next documents by id. If a whole page is gone by the second read, go on after it."""
        shape = self._shape
        bound = None if after is None else from_key(after, shape.kind)
        first = shape.ids(lock=lock).limit(size)
        while True:
            statement = first if bound is None else first.where(shape.id > bound)
            ids = self._execute(connection, statement).scalars().all()
            items = self._items(connection, ids) if ids else []
            if items or not ids:
                return items
            bound = ids[-1]

    def _by_ids(self, ids: Sequence[str], connection: sa.Connection, lock: bool = False) -> Sequence[Item]:
        """Return those of these documents that exist."""
        shape = self._shape

        def read(part: Sequence[Any]) -> Sequence[Item]:
            if lock:
                locked = shape.ids(lock=True).where(shape.id.in_(part))
                part = self._execute(connection, locked).scalars().all()
            return self._items(connection, part)

        return find_items(ids, lambda id_: from_key(id_, shape.kind), read)

    def _items(self, connection: sa.Connection, ids: Sequence[Any]) -> list[Item]:
        shape, source = self._shape, self._source
        statement = shape.statement.where(shape.id.in_(list(dict.fromkeys(ids)))).order_by(shape.id)
        if shape.entity is None:
            rows = self._execute(connection, statement)
            items = [source.item(row, row._mapping[source.id], shape.fields) for row in rows]
        else:
            with Session(connection, autoflush=False) as session:
                things = session.scalars(statement).unique()
                items = [source.item(one, getattr(one, source.id), shape.fields) for one in things]
        source.check_distinct(items, "select", "subquery")
        return items

    def _execute(self, connection: sa.Connection, statement: Any) -> sa.CursorResult[Any]:
        try:
            return connection.execute(statement)
        except sa.exc.DBAPIError as error:
            if error.orig is None or not missing_tables(error.orig):
                raise
            # The table is the application's; the usual message is about the outbox's tables.
            reason = str(error.orig).partition("\n")[0]
            raise ConfigError(f"{self._source.label}: the select cannot be executed: {reason}") from error


# Private attributes of SQLAlchemy from here on, tried with 2.1.8: no public API tells which clauses a select
# has. tests/unit/test_private_attributes.py says what to do when they change.
REFUSED_CLAUSES = {
    "_order_by_clauses": ("ORDER BY", "documents are read in the order of their ids"),
    "_limit_clause": ("LIMIT", "say with a WHERE which rows are meant"),
    "_offset_clause": ("OFFSET", "say with a WHERE which rows are meant"),
    "_fetch_clause": ("FETCH", "say with a WHERE which rows are meant"),
    "_distinct": ("DISTINCT", "a document is one row of a table, which is locked"),
    "_group_by_clauses": ("GROUP BY", "a document is one row of a table: group in a subquery and join that"),
    "_having_criteria": ("HAVING", "a document is one row of a table: group in a subquery and join that"),
    "_for_update_arg": ("FOR UPDATE", "rows are locked as far as needed without it"),
}


@dataclass(frozen=True, slots=True)
class Shape:
    """A select with rows that can be locked and paged by id."""

    statement: sa.Select[Any]
    id: Any
    table: Any
    """The table as the select names it; ``base`` is the table itself."""
    base: sa.TableClause
    kind: type | None
    nullable: bool
    entity: Any = None
    """The class, or its alias, if the select returns objects."""

    @property
    def entity_name(self) -> str | None:
        """Return the name of the class."""
        return None if self.entity is None else str(sa.inspect(self.entity).mapper.class_.__name__)

    def fields(self, thing: Any) -> Mapping[str, Any]:
        """Return the columns of a row, or the mapped columns of an object."""
        if self.entity is None:
            return {str(name): value for name, value in thing._mapping.items()}
        return {one.key: getattr(thing, one.key) for one in sa.inspect(self.entity).mapper.column_attrs}

    def ids(self, *, lock: bool) -> sa.Select[Any]:
        """Return a select of the ids, in order."""
        ids = self.only(self.id).order_by(self.id)
        # Joined tables are not locked: one may be on the side of an outer join that cannot be.
        of = self.table if self.entity is None else self.entity
        return ids.with_for_update(read=True, of=of) if lock else ids

    def only(self, column: Any) -> sa.Select[Any]:
        """Return a select of this column from the same rows."""
        only = self.statement.with_only_columns(column, maintain_column_froms=True)
        # The options say how to load an entity, which this select does not.
        only._with_options = ()
        return only


def shape_of(source: Source, statement: Any) -> Shape:
    """Analyze a select. Raise ``ConfigError`` if its rows cannot be paged by id."""
    if not isinstance(statement, sa.Select):
        raise ConfigError(f"{source.label}: it is a {type(statement).__name__}; give one select of a table")
    for attribute, (clause, why) in REFUSED_CLAUSES.items():
        found = getattr(statement, attribute, None)
        if found is not None and found is not False and found != ():
            raise ConfigError(f"{source.label}: the select has {clause}; leave it out: {why}")
    entity = _entity(source, statement)
    id_ = _id(source, statement, entity)
    column = id_.__clause_element__() if hasattr(id_, "__clause_element__") else id_
    column = column.element if isinstance(column, sa.Label) else column
    table = getattr(column, "table", None)
    named = table.element if isinstance(table, sa.sql.expression.Alias) else table
    if not isinstance(column, sa.ColumnClause) or not isinstance(named, sa.TableClause):
        fix = "rows are locked by their id, so name a column of a table with Source(id=…)"
        raise ConfigError(f"{source.label}: {source.id} is an expression or belongs to a subquery; {fix}")
    nullable = bool(getattr(column, "nullable", True))
    return Shape(statement, column if entity is None else id_, table, named, _kind(column), nullable, entity)


def _entity(source: Source, statement: sa.Select[Any]) -> Any:
    described = statement.column_descriptions
    # The key is missing for tables without classes.
    entities = [one for one in described if one.get("entity") is not None and one["expr"] is one["entity"]]
    if entities and len(described) > 1:
        fix = "select one entity, or columns only"
        raise ConfigError(f"{source.label}: the select gives an entity and more; {fix}")
    return entities[0]["entity"] if entities else None


def _id(source: Source, statement: sa.Select[Any], entity: Any) -> Any:
    columns = statement.selected_columns
    known = columns if entity is None else sa.inspect(entity).mapper.column_attrs
    names = list(map(str, known.keys()))
    if source.id not in names:
        hint = did_you_mean(source.id, names)
        fix = "name the column of the documents' ids with Source(id=…)"
        raise ConfigError(f"{source.label}: the select has no column {source.id!r}{hint}; {fix}")
    return columns[source.id] if entity is None else getattr(entity, source.id)


def _kind(column: Any) -> type | None:
    with suppress(NotImplementedError):
        kind: type = column.type.python_type
        return None if kind is object else kind
    return None
