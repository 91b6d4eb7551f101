"""Documents of a SQLAlchemy select on the outbox's own database.

A page is read in two statements: the first locks the rows by their ids, the second reads them. One statement
would not do: what it had to wait for it would see anew, but not what is joined to it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import sqlalchemy as sa
from sqlalchemy.orm import Session

from relaybox.database.dialects import missing_tables
from relaybox.database.transactions import lock_tables
from relaybox.emit.row import Call
from relaybox.errors import ConfigError, did_you_mean
from relaybox.search.locks import Found, Portion, by_parts
from relaybox.search.rows import AT_ONCE, Also, Calls, Item, Repairs, as_id, as_key, from_key
from relaybox.search.source import Source
from relaybox.search.transactions import Transactions

if TYPE_CHECKING:
    from relaybox.outbox import Outbox


@asynccontextmanager
async def open_select(outbox: Outbox, source: Source, statement: Any) -> AsyncIterator[SelectRows]:
    """The documents of a select; raises ``ConfigError`` where its rows cannot be gone through by id."""
    shape = shape_of(source, statement)
    rows = SelectRows(Transactions(outbox), source, shape)
    try:
        await rows.check()
        yield rows
    finally:
        await rows.transactions.close()


class SelectRows:
    """``Rows`` (see there) of a select."""

    guarded = True

    def __init__(self, transactions: Transactions, source: Source, shape: Shape) -> None:
        self.transactions = transactions
        self.aggregate_type, self.event_type = source.types(shape.entity_name)
        self._source = source
        self._reader = _Reader(source, shape)
        self._portion = Portion()

    async def check(self) -> None:
        """Raise where an id is null, or the select cannot be executed at all."""
        await self.transactions.run("read", self._reader.check)

    async def count(self) -> int:
        """How many documents there are."""
        return await self.transactions.run("read", self._reader.count)

    async def read(self, size: int, after: Any = None) -> AsyncIterator[Sequence[Item]]:
        """Pages by key, no locks."""
        while True:
            page = await self.transactions.run("read", partial(self._reader.page, after=after, size=size))
            if not page:
                return
            yield page
            after = page[-1].key

    async def emit_after(
        self, after: Any, size: int, calls: Calls, also: Also | None = None
    ) -> Sequence[Item]:
        """Read a page locked, and emit its events in that transaction."""

        def emit(size: int, connection: sa.Connection) -> Sequence[Item]:
            page = self._reader.page(connection, after, size, lock=True)
            if page:
                self.transactions.emit(connection, page, calls, also)
            return page

        def work(size: int, wait: float) -> Awaitable[Sequence[Item]]:
            return self.transactions.run("write", partial(emit, size), wait=wait)

        return await self._portion.take(size, work)

    async def emit_ids(self, ids: Sequence[str], calls: Repairs) -> int:
        """Read these locked, and emit; nobody makes the missing ones before the commit."""
        there = await self.existing(ids)
        found = await self._emit_found([id_ for id_ in ids if id_ in there], calls)
        missing = [id_ for id_ in ids if id_ not in there or id_ in found.gone]
        return found.emitted + await self._emit_missing(missing, calls)

    async def _emit_found(self, ids: Sequence[str], calls: Repairs) -> Found:
        """Of those that are there, as long as they are."""

        def emit(ids: Sequence[str], connection: sa.Connection) -> Found:
            items = self._reader.by_ids(connection, ids, lock=True)
            emitted = self._emit(connection, calls(items, []))
            return Found(emitted, frozenset(ids) - {item.id for item in items})

        def work(ids: Sequence[str], wait: float) -> Awaitable[Found]:
            return self.transactions.run("write", partial(emit, ids), wait=wait)

        return await by_parts(ids, work)

    async def _emit_missing(self, ids: Sequence[str], calls: Repairs) -> int:
        """Of those that are not there, while nobody can make them."""

        def work(connection: sa.Connection) -> int:
            table = self.transactions.backend == "postgresql"
            if table:
                self._reader.fence(connection)
            items = self._reader.by_ids(connection, ids, lock=not table)
            there = {item.id for item in items}
            return self._emit(connection, calls(items, [id_ for id_ in ids if id_ not in there]))

        return await self.transactions.run("fence", work) if ids else 0

    def _emit(self, connection: sa.Connection, made: Sequence[Call]) -> int:
        self.transactions.emit(connection, (), lambda _: made, None)
        return len(made)

    async def existing(self, ids: Sequence[str]) -> Mapping[str, Mapping[str, Any]]:
        """The payloads that there are of these; no locks."""
        items = await self.transactions.run("read", lambda c: self._reader.by_ids(c, ids))
        return {item.id: item.payload for item in items}


@dataclass(frozen=True, slots=True)
class _Reader:
    """The statements, executed on a connection whose transaction is open."""

    source: Source
    shape: Shape

    def check(self, connection: sa.Connection) -> None:
        """Raise where an id is null."""
        # With the columns themselves, so that whatever is wrong with them shows before the first page.
        self._execute(connection, self.shape.statement.where(sa.false())).close()
        if self.shape.nullable and self._execute(connection, self.shape.nulls()).first() is not None:
            fix = "leave those rows out with a WHERE, or name another column with Source(id=…)"
            raise ConfigError(f"{self.source.told}: {self.source.id} is null in some rows; {fix}")

    def count(self, connection: sa.Connection) -> int:
        """How many rows the select gives."""
        count: int = self._execute(connection, self.shape.count()).scalar_one()
        return count

    def fence(self, connection: sa.Connection) -> None:
        """Wait for whoever writes to the table, and keep others from it until the end (PostgreSQL)."""
        name = connection.dialect.identifier_preparer.format_table(self.shape.base)
        connection.exec_driver_sql(lock_tables(name))

    def page(self, connection: sa.Connection, after: Any, size: int, *, lock: bool = False) -> Sequence[Item]:
        """The next documents by id. Where none is left of the rows that were found, those behind them."""
        bound = None if after is None else from_key(after, self.shape.kind)
        while ids := self._execute(connection, self.shape.ids(bound, size, lock)).scalars().all():
            if items := self._items(connection, ids):
                return items
            bound = ids[-1]
        return []

    def by_ids(self, connection: sa.Connection, ids: Sequence[str], *, lock: bool = False) -> Sequence[Item]:
        """Those of these documents that there are."""
        wanted = list(self._values(ids))
        items: list[Item] = []
        for start in range(0, len(wanted), AT_ONCE):
            part: Sequence[Any] = wanted[start : start + AT_ONCE]
            if lock:
                part = self._execute(connection, self.shape.locked(part)).scalars().all()
            items += self._items(connection, part)
        return [item for item in items if item.id in set(ids)]

    def _values(self, ids: Iterable[str]) -> Iterable[Any]:
        """As the column has them; one that it cannot have is missing."""
        for id_ in dict.fromkeys(ids):
            try:
                value = from_key(id_, self.shape.kind)
            except (ValueError, ArithmeticError):
                continue
            if not isinstance(value, int) or -(2**63) <= value < 2**63:
                yield value

    def _items(self, connection: sa.Connection, ids: Sequence[Any]) -> list[Item]:
        statement = self.shape.of_ids(list(dict.fromkeys(ids)))
        if self.shape.entity is None:
            rows = self._execute(connection, statement)
            return self._single([self._item(row, row._mapping[self.source.id], _columns) for row in rows])
        with Session(connection, autoflush=False) as session:
            things = session.scalars(statement).unique()
            return self._single(
                [self._item(one, getattr(one, self.source.id), self.shape.fields) for one in things]
            )

    def _item(self, thing: Any, id_: Any, default: Any) -> Item:
        key = as_key(id_, self.source)
        return Item(as_id(id_, key), self.source.payload(thing, id_, default), key)

    def _single(self, items: list[Item]) -> list[Item]:
        for one, next_ in pairwise(items):
            if one.id == next_.id:
                fix = "a document is one row: gather what is joined to it in a subquery, or in document="
                raise ConfigError(f"{self.source.told}: the select gives several rows of {one.id!r}; {fix}")
        return items

    def _execute(self, connection: sa.Connection, statement: Any) -> sa.CursorResult[Any]:
        try:
            return connection.execute(statement)
        except sa.exc.DBAPIError as error:
            if error.orig is not None and missing_tables(error.orig):
                # Not of the outbox's tables, which another message is about.
                told = str(error.orig).partition("\n")[0]
                raise ConfigError(f"{self.source.told}: the select cannot be executed: {told}") from error
            raise


def _columns(row: Any) -> Mapping[str, Any]:
    return {str(name): value for name, value in row._mapping.items()}


# Private attributes of SQLAlchemy, tried with 2.1.8, from here to the end of the module: nothing public tells
# which clauses a select has. tests/unit/test_private_attributes.py says what to do when they change.
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
    """A select whose rows can be gone through by id, and locked."""

    statement: sa.Select[Any]
    id: Any
    table: Any
    """As the select names it; ``base`` is the table itself."""
    base: sa.TableClause
    kind: type | None
    nullable: bool
    entity: Any = None
    """The class, or an alias of it, where the select gives its objects."""

    @property
    def entity_name(self) -> str | None:
        """The name of the class."""
        return None if self.entity is None else str(sa.inspect(self.entity).mapper.class_.__name__)

    def fields(self, thing: Any) -> Mapping[str, Any]:
        """The mapped columns of an object."""
        return {one.key: getattr(thing, one.key) for one in sa.inspect(self.entity).mapper.column_attrs}

    def count(self) -> sa.Select[Any]:
        """How many rows it gives."""
        return self._only(sa.func.count())

    def nulls(self) -> sa.Select[Any]:
        """A row without an id."""
        return self._only(sa.literal(1)).where(self.id.is_(None)).limit(1)

    def ids(self, after: Any, size: int, lock: bool) -> sa.Select[Any]:
        """The next ids."""
        found = self._only(self.id).order_by(self.id).limit(size)
        if after is not None:
            found = found.where(self.id > after)
        return self._locking(found) if lock else found

    def locked(self, ids: Sequence[Any]) -> sa.Select[Any]:
        """Those of these ids that there are, locked."""
        return self._locking(self._only(self.id).where(self.id.in_(ids)).order_by(self.id))

    def of_ids(self, ids: Sequence[Any]) -> sa.Select[Any]:
        """The select itself, of these ids."""
        return self.statement.where(self.id.in_(ids)).order_by(self.id)

    def _locking(self, statement: sa.Select[Any]) -> sa.Select[Any]:
        # What is joined stays free: it may be on the side of an outer join that cannot be locked.
        return statement.with_for_update(read=True, of=self.table if self.entity is None else self.entity)

    def _only(self, column: Any) -> sa.Select[Any]:
        only = self.statement.with_only_columns(column, maintain_column_froms=True)
        # They say how to load an entity, which this does not.
        only._with_options = ()
        return only


def shape_of(source: Source, statement: Any) -> Shape:
    """What the select is made of; raises ``ConfigError`` where its rows cannot be gone through by id."""
    if not isinstance(statement, sa.Select):
        raise ConfigError(f"{source.told}: it is a {type(statement).__name__}; give one select of a table")
    _check_clauses(source, statement)
    entity = _entity(source, statement)
    id_ = _id(source, statement, entity)
    column = id_.__clause_element__() if hasattr(id_, "__clause_element__") else id_
    column = column.element if isinstance(column, sa.Label) else column
    table = getattr(column, "table", None)
    named = table.element if isinstance(table, sa.sql.expression.Alias) else table
    if not isinstance(column, sa.ColumnClause) or not isinstance(named, sa.TableClause):
        fix = "it must be a column of a table, whose rows are locked; name one with Source(id=…)"
        raise ConfigError(f"{source.told}: {source.id} is an expression, or of a subquery; {fix}")
    nullable = bool(getattr(column, "nullable", True))
    own = column if entity is None else id_
    return Shape(statement, own, table, named, _kind(column), nullable, entity)


def _check_clauses(source: Source, statement: sa.Select[Any]) -> None:
    for attribute, (clause, why) in REFUSED_CLAUSES.items():
        found = getattr(statement, attribute, None)
        if found is not None and found is not False and found != ():
            raise ConfigError(f"{source.told}: the select has {clause}; leave it out: {why}")


def _entity(source: Source, statement: sa.Select[Any]) -> Any:
    described = statement.column_descriptions
    # Of tables without classes they say less.
    entities = [one for one in described if one.get("entity") is not None and one["expr"] is one["entity"]]
    if not entities:
        return None
    if len(described) > 1:
        fix = "select one entity, or columns only"
        raise ConfigError(f"{source.told}: the select gives an entity and more; {fix}")
    return entities[0]["entity"]


def _id(source: Source, statement: sa.Select[Any], entity: Any) -> Any:
    if entity is not None:
        names = [one.key for one in sa.inspect(entity).mapper.column_attrs]
        found = getattr(entity, source.id) if source.id in names else None
    else:
        columns = statement.selected_columns
        names = [str(name) for name, _ in columns.items()]
        found = columns.get(source.id)
    if found is None:
        hint = did_you_mean(source.id, names)
        fix = "name the column of the documents' ids with Source(id=…)"
        raise ConfigError(f"{source.told}: the select has no column {source.id!r}{hint}; {fix}")
    return found


def _kind(column: Any) -> type | None:
    try:
        kind: type = column.type.python_type
    except NotImplementedError:
        return None
    return None if kind is object else kind
