"""The tables as they should be, and as they are: the same values of both, to be compared."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import sqlalchemy as sa
from sqlalchemy.schema import CreateColumn

from relaybox.migrations import Outbox, ddl, rendered
from relaybox.schema import MYSQL

_INDEX = re.compile(r"CREATE INDEX (\S+) ON (\S+) \((.*?)\)( WHERE .*)?$", re.DOTALL)
_TABLE = re.compile(r"CREATE TABLE (\S+) \(")
_TYPE_ENDS = re.compile(
    r" (CHARACTER SET|COLLATE|DEFAULT|NOT NULL|NULL|GENERATED|AUTO_INCREMENT|PRIMARY|AS \().*", re.DOTALL
)
_FILLED = re.compile(r" (DEFAULT|GENERATED|AUTO_INCREMENT|AS \()")
_SAME = {"varchar": "character varying", "integer": "int", "json": "longtext"}
"""How the catalogue spells a type, or how two catalogues spell the same one."""


@dataclass(frozen=True, slots=True)
class Column:
    """``filled``: the database itself gives it a value where an INSERT does not."""

    type: str
    nullable: bool
    filled: bool
    collation: str | None = None
    ddl: str = ""
    """As CREATE TABLE has it, where it is known."""


@dataclass(frozen=True, slots=True)
class Index:
    """``partial``: it has a WHERE."""

    columns: tuple[str, ...]
    partial: bool = False
    valid: bool = True
    create: str = ""
    """The statement that makes it, where it is known."""


@dataclass(frozen=True, slots=True)
class Check:
    """A CHECK constraint by its name."""

    condition: str = ""
    valid: bool = True


@dataclass(slots=True)
class Table:
    """A table and all that belongs to it, by name."""

    columns: dict[str, Column] = field(default_factory=dict)
    key: tuple[str, ...] = ()
    checks: dict[str, Check] = field(default_factory=dict)
    indexes: dict[str, Index] = field(default_factory=dict)
    triggers: dict[str, str] = field(default_factory=dict)
    options: dict[str, str] = field(default_factory=dict)
    """Of its storage."""
    create: tuple[str, ...] = ()
    """The statements that make it, where they are known."""


def expected(outbox: Outbox) -> dict[str, Table]:
    """The tables of this release."""
    if outbox.dialect == "sqlite":
        return _of_sqlite(outbox)
    metadata = outbox.metadata()
    statements = rendered(outbox.dialect, lambda engine: metadata.create_all(engine, checkfirst=False))
    dialect = sa.create_mock_engine(f"{outbox.dialect}://", None).dialect
    tables = {table.name: _table(table, dialect) for table in metadata.sorted_tables}
    for statement in statements:
        _add(tables, statement)
    return tables


def _table(table: sa.Table, dialect: sa.Dialect) -> Table:
    checks = [one for one in table.constraints if isinstance(one, sa.CheckConstraint)]
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
        checks={str(check.name): Check(str(check.sqltext)) for check in checks if check.name},
        options={name: str(value) for name, value in options.items()},
    )


def _column(column: sa.Column[Any], dialect: sa.Dialect) -> Column | None:
    """The column, where this database has it."""
    compiled = CreateColumn(column).compile(dialect=dialect, compile_kwargs={"literal_binds": True})
    if not compiled.string:
        return None
    # Without a driver the compiler doubles percent signs; no type or default of ours has one elsewhere.
    text = compiled.string.replace("%%", "%")
    spec = text.partition(" ")[2]
    collation = re.search(r'COLLATE "?(\w+)"?', spec)
    return Column(
        type=spelled(_TYPE_ENDS.sub("", spec)),
        nullable=bool(column.nullable),
        filled=bool(_FILLED.search(f" {spec}")),
        collation=collation[1] if collation else None,
        ddl=text,
    )


def _add(tables: Mapping[str, Table], statement: str) -> None:
    """An index, and how a table is made."""
    if match := _INDEX.match(statement):
        name, table, columns, where = match.groups()
        found = tables[_bare(table)]
        found.indexes[_bare(name)] = Index(_split(columns), where is not None, create=statement)
        found.create = (*found.create, statement)
    elif (match := _TABLE.match(statement)) and _bare(match[1]) in tables:
        tables[_bare(match[1])].create = (statement,)


def _of_sqlite(outbox: Outbox) -> dict[str, Table]:
    """What the statements make of an empty database, read as the real one is."""
    from relaybox.doctor.seen import SQLITE, of_sqlite

    with closing(sqlite3.connect(":memory:")) as connection:
        for statement in ddl("sqlite", prefix=outbox.prefix):
            connection.execute(statement)
        answers = [connection.execute(question).fetchall() for question in SQLITE]
        tables = of_sqlite(*answers)
    for table in tables.values():
        indexes = (index.create for index in table.indexes.values())
        table.create = (*table.create, *indexes, *table.triggers.values())
    return tables


def spelled(type_: str) -> str:
    """A type in one spelling, whoever wrote it."""
    text = type_.strip().lower()
    word, bracket, rest = text.partition("(")
    word = _SAME.get(word.strip(), word.strip())
    # The width in which MySQL would print a number is not part of its type.
    if word in ("int", "bigint", "smallint", "tinyint") or not bracket:
        return f"{word}{' ' + rest.partition(')')[2].strip() if 'unsigned' in rest else ''}"
    return f"{word}({rest}"


def parse_index(statement: str) -> Index:
    """An index of the statement that makes it."""
    match = _INDEX.match(" ".join(statement.split()))
    if match is None:
        return Index((), create=statement)
    return Index(_split(match[3]), match[4] is not None, create=statement)


def _split(columns: str) -> tuple[str, ...]:
    return tuple(_unquoted(name.strip()) for name in columns.split(","))


def _bare(name: str) -> str:
    """Without quotes and schema."""
    return _unquoted(name.rpartition(".")[2])


def _unquoted(name: str) -> str:
    return name.strip('"`')


def by_table(rows: Iterable[Sequence[Any]]) -> dict[str, list[Sequence[Any]]]:
    """Rows by their first value, without it."""
    tables: dict[str, list[Sequence[Any]]] = {}
    for name, *rest in rows:
        tables.setdefault(str(name), []).append(rest)
    return tables
