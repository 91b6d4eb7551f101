"""The tables that this release needs, and the tables that a database has, as comparable values.

This module reads the catalogue itself: SQLAlchemy's inspector knows no triggers and needs a second
connection. Before 2.1 it also hides invalid indexes and collations on PostgreSQL.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn

from relaybox.database.connect import denied
from relaybox.database.migrations import Outbox, ddl, quoted, rendered
from relaybox.database.schema import MYSQL
from relaybox.database.steps import Row
from relaybox.errors import NoTables, StoreError

Rows = Sequence[Sequence[Any]]
Ask = Callable[..., Awaitable[list[Row]]]
"""Executes a statement with named parameters and returns its rows."""

_INDEX = re.compile(r"CREATE INDEX (\S+) ON \S+ \((.*?)\)( WHERE .*)?$", re.DOTALL)
_TYPE_ENDS = re.compile(
    r" (CHARACTER SET|COLLATE|DEFAULT|NOT NULL|NULL|GENERATED|AUTO_INCREMENT|PRIMARY|AS \().*", re.DOTALL
)
_FILLED = re.compile(r" (DEFAULT|GENERATED|AUTO_INCREMENT|AS \()")
_SAME = {"varchar": "character varying", "integer": "int", "json": "longtext"}

# Names without a schema follow the search path, as in every statement.
_OURS = "(SELECT CAST(to_regclass(name) AS oid) FROM unnest(CAST(ARRAY[:names] AS text[])) AS name)"
_POSTGRESQL = tuple(
    query.replace("OURS", _OURS)
    for query in (
        "SELECT relname, reloptions FROM pg_class WHERE oid IN OURS",
        """
SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), o.collname, NOT a.attnotnull,
       a.atthasdef OR a.attidentity <> ''
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid LEFT JOIN pg_collation o ON o.oid = a.attcollation
WHERE a.attrelid IN OURS AND a.attnum > 0 AND NOT a.attisdropped""",
        """
SELECT c.relname, n.conname, n.convalidated FROM pg_constraint n JOIN pg_class c ON c.oid = n.conrelid
WHERE n.conrelid IN OURS AND n.contype = 'c'""",
        """
SELECT c.relname, i.relname, x.indisprimary, x.indisvalid AND x.indisready, x.indpred IS NOT NULL,
       (SELECT string_agg(pg_get_indexdef(x.indexrelid, k, true), ',' ORDER BY k)
        FROM generate_series(1, CAST(x.indnkeyatts AS int)) AS k)
FROM pg_index x JOIN pg_class c ON c.oid = x.indrelid JOIN pg_class i ON i.oid = x.indexrelid
WHERE x.indrelid IN OURS""",
    )
)

_MYSQL = (
    "SELECT table_name, engine FROM information_schema.tables "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN (:names)",
    "SELECT table_name, column_name, column_type, collation_name, is_nullable = 'YES', "
    "COALESCE(column_default, 'NULL') <> 'NULL' OR extra <> '' FROM information_schema.columns "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN (:names)",
    "SELECT table_name, index_name, GROUP_CONCAT(column_name ORDER BY seq_in_index) "
    "FROM information_schema.statistics WHERE table_schema = COALESCE(:schema, DATABASE()) "
    "AND table_name IN (:names) GROUP BY table_name, index_name",
)

_SQLITE = (
    "SELECT name, sql FROM sqlite_master WHERE type = 'table'",
    'SELECT m.name, x.name, x.type, NULL, NOT x."notnull", x.dflt_value IS NOT NULL, x.pk '
    "FROM sqlite_master m JOIN pragma_table_xinfo(m.name) x WHERE m.type = 'table'",
    "SELECT tbl_name, type, name, sql FROM sqlite_master "
    "WHERE type IN ('index', 'trigger') AND sql IS NOT NULL",
)


@dataclass(frozen=True, slots=True)
class Column:
    """A column; ``filled`` is true if the database supplies a value that an INSERT leaves out."""

    type: str
    nullable: bool
    filled: bool
    collation: str | None = None
    ddl: str = ""
    """The column in CREATE TABLE; empty if it was read from a database."""


@dataclass(frozen=True, slots=True)
class Index:
    """An index; ``partial`` is true if it has a WHERE clause."""

    columns: tuple[str, ...]
    partial: bool = False
    valid: bool = True
    create: str = ""


@dataclass(frozen=True, slots=True)
class Constraint:
    """A CHECK constraint."""

    condition: str = ""
    valid: bool = True


@dataclass(slots=True)
class Table:
    """A table and its parts by name."""

    columns: dict[str, Column] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    checks: dict[str, Constraint] = field(default_factory=dict)
    indexes: dict[str, Index] = field(default_factory=dict)
    triggers: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    """Storage parameters on PostgreSQL, the engine on MariaDB and MySQL."""
    create: tuple[str, ...] = ()


def wanted_tables(outbox: Outbox) -> dict[str, Table]:
    """Return the tables that this release needs."""
    if outbox.dialect == "sqlite":
        return _wanted_on_sqlite(outbox)
    dialect = sa.create_mock_engine(f"{outbox.dialect}://", None).dialect
    return {table.name: _table(outbox, table, dialect) for table in outbox.metadata().sorted_tables}


def _table(outbox: Outbox, table: sa.Table, dialect: sa.Dialect) -> Table:
    checks = {str(one.name): one for one in table.constraints if isinstance(one, sa.CheckConstraint)}
    create, *indexes = _statements(outbox, table)
    options: Mapping[str, Any] = {}
    if dialect.name == "postgresql":
        options = table.dialect_options["postgresql"]["with"] or {}
    elif dialect.name in MYSQL:
        options = {"engine": "InnoDB"}
    return Table(
        columns={
            column.name: made for column in table.columns if (made := _column(column, dialect)) is not None
        },
        key=tuple(column.name for column in table.primary_key.columns),
        checks={name: Constraint(str(checks[name].sqltext)) for name in sorted(checks)},
        indexes=dict(map(_index, sorted(indexes))),
        options={name: str(value) for name, value in options.items()},
        create=(create, *sorted(indexes)),
    )


def _column(column: sa.Column[Any], dialect: sa.Dialect) -> Column | None:
    """Return the column, or ``None`` if this database does not have it."""
    compiled = CreateColumn(column).compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    if not compiled.string:
        return None
    # The compiler doubles percent signs; our types and defaults contain no others.
    text = compiled.string.replace("%%", "%")
    spec = text.partition(" ")[2]
    collation = re.search(r'COLLATE "?(\w+)"?', spec)
    return Column(
        type=_spelled(_TYPE_ENDS.sub("", spec)),
        nullable=bool(column.nullable),
        filled=bool(_FILLED.search(f" {spec}")),
        collation=collation[1] if collation else None,
        ddl=text,
    )


def _statements(outbox: Outbox, table: sa.Table) -> list[str]:
    metadata = outbox.metadata()
    statements = rendered(
        outbox.dialect, lambda engine: metadata.create_all(engine, tables=[table], checkfirst=False)
    )
    # The other statements record the version.
    return [statement for statement in statements if statement.startswith("CREATE ")]


def _wanted_on_sqlite(outbox: Outbox) -> dict[str, Table]:
    """Create the tables in an empty database and read its catalogue."""
    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in ddl("sqlite", prefix=outbox.prefix):
            connection.execute(statement)
        answers = [connection.execute(query).fetchall() for query in _SQLITE]
        tables = _found_on_sqlite(*answers)
    for table in tables.values():
        indexes = (index.create for index in table.indexes.values())
        table.create = (*table.create, *indexes, *table.triggers.values())
    return tables


async def found_tables(
    ask: Ask, outbox: Outbox, names: Collection[str]
) -> tuple[dict[str, Table], Collection[str]]:
    """Return the existing tables, and the names of tables that the role may not inspect."""
    match outbox.dialect:
        case "postgresql":
            whole = [quoted(outbox, outbox.schema, name) for name in names]
            return _found_on_postgresql(*[await ask(one, names=whole) for one in _POSTGRESQL]), ()
        case "sqlite":
            tables = _found_on_sqlite(*[await ask(query) for query in _SQLITE])
            return {name: table for name, table in tables.items() if name in names}, ()
    texts, hidden = await _texts(ask, outbox, names)
    params = {"schema": outbox.schema, "names": list(names)}
    return _found_on_mysql(texts, *[await ask(one, **params) for one in _MYSQL]), hidden


async def _texts(ask: Ask, outbox: Outbox, names: Collection[str]) -> tuple[dict[str, str], set[str]]:
    """Return CREATE TABLE for each table: MariaDB's views show constraints only to owners."""
    texts: dict[str, str] = {}
    hidden: set[str] = set()
    for name in names:
        try:
            rows = await ask(f"SHOW CREATE TABLE {quoted(outbox, outbox.schema, name)}")
        except NoTables:
            continue
        except StoreError as error:
            if not denied(error.__cause__):
                raise
            hidden.add(name)
        else:
            texts[name] = _text(rows[0][1])
    return texts, hidden


def _found_on_postgresql(classes: Rows, columns: Rows, checks: Rows, indexes: Rows) -> dict[str, Table]:
    tables = _with_columns(columns, collation=True)
    for name, options in classes:
        found = tables.setdefault(str(name), Table())
        found.options = dict(option.split("=", 1) for option in options or ())
    for name, check, valid in checks:
        tables[str(name)].checks[str(check)] = Constraint(valid=valid)
    for name, index, primary, valid, partial, of in indexes:
        cut = tuple(column.strip('"') for column in of.split(","))
        if primary:
            tables[str(name)].key = cut
        else:
            tables[str(name)].indexes[str(index)] = Index(cut, partial, valid)
    return tables


def _found_on_mysql(
    texts: Mapping[str, str], classes: Rows, columns: Rows, indexes: Rows
) -> dict[str, Table]:
    tables = _with_columns(columns, collation=True)
    for name, engine in classes:
        tables.setdefault(str(name), Table()).options = {"engine": str(engine)}
    for name, text in texts.items():
        checks = re.findall(r"CONSTRAINT `([^`]+)` CHECK", text)
        tables.setdefault(name, Table()).checks = {check: Constraint() for check in checks}
    for name, index, of in indexes:
        if index == "PRIMARY":
            tables[str(name)].key = tuple(_text(of).split(","))
        else:
            tables[str(name)].indexes[str(index)] = Index(tuple(_text(of).split(",")))
    return tables


def _found_on_sqlite(texts: Rows, columns: Rows, others: Rows) -> dict[str, Table]:
    tables = _with_columns([row[:6] for row in columns], collation=False)
    for name, rows in _by_table(columns).items():
        keyed = sorted((row[5], row[0]) for row in rows if row[5])
        tables[name].key = tuple(column for _, column in keyed)
    for name, text in texts:
        found = tables.setdefault(name, Table())
        found.create = (text,)
        found.checks = {check: Constraint() for check in re.findall(r'CONSTRAINT "?(\w+)"? CHECK', text)}
    for name, kind, other, text in others:
        if kind == "trigger":
            tables[name].triggers[other] = text
        else:
            tables[name].indexes[other] = _index(text)[1]
    return tables


def _with_columns(rows: Rows, *, collation: bool) -> dict[str, Table]:
    return {
        table: Table(
            columns={
                str(name): Column(
                    _spelled(_text(type_)), bool(nullable), bool(filled), collated if collation else None
                )
                for name, type_, collated, nullable, filled in of
            }
        )
        for table, of in _by_table(rows).items()
    }


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _spelled(type_: str) -> str:
    text = type_.strip().lower()
    word, bracket, rest = text.partition("(")
    word = _SAME.get(word.strip(), word.strip())
    # MySQL's display width is not part of the type.
    if word in ("int", "bigint", "smallint", "tinyint") or not bracket:
        return f"{word}{' ' + rest.partition(')')[2].strip() if 'unsigned' in rest else ''}"
    return f"{word}({rest}"


def _index(statement: str) -> tuple[str, Index]:
    match = _INDEX.match(" ".join(statement.split()))
    if match is None:
        return "", Index((), create=statement)
    name, columns, where = match.groups()
    cut = tuple(_unquoted(column.strip()) for column in columns.split(","))
    return _unquoted(name.rpartition(".")[2]), Index(cut, where is not None, create=statement)


def _unquoted(name: str) -> str:
    return name.strip('"`')


def _by_table(rows: Iterable[Sequence[Any]]) -> dict[str, list[Sequence[Any]]]:
    """Group rows by their first value, and remove it from them."""
    tables: dict[str, list[Sequence[Any]]] = {}
    for name, *rest in rows:
        tables.setdefault(str(name), []).append(rest)
    return tables
