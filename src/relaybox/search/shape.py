"""What a select is made of: the column of its ids, the table that is locked, and the statements of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from relaybox.errors import ConfigError, did_you_mean
from relaybox.search.source import Source

_REFUSED = {
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
    for attribute, (clause, why) in _REFUSED.items():
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
