"""The tables as they are, read from the catalogue of each database."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from relaybox.connect import denied
from relaybox.doctor.check import DatabaseContext
from relaybox.doctor.expected import Check, Column, Index, Table, by_table, parse_index, spelled
from relaybox.errors import NoTables, StoreError
from relaybox.migrations import quoted

Rows = Sequence[Sequence[Any]]

# Names without a schema are looked for along the search path, as every statement does.
_OURS = "(SELECT CAST(to_regclass(name) AS oid) FROM unnest(CAST(ARRAY[:names] AS text[])) AS name)"
POSTGRESQL = tuple(
    question.replace("OURS", _OURS)
    for question in (
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

MYSQL = (
    "SELECT table_name, engine FROM information_schema.tables "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN (:names)",
    "SELECT table_name, column_name, column_type, collation_name, is_nullable = 'YES', "
    "COALESCE(column_default, 'NULL') <> 'NULL' OR extra <> '' FROM information_schema.columns "
    "WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name IN (:names)",
    "SELECT table_name, index_name, GROUP_CONCAT(column_name ORDER BY seq_in_index) "
    "FROM information_schema.statistics WHERE table_schema = COALESCE(:schema, DATABASE()) "
    "AND table_name IN (:names) GROUP BY table_name, index_name",
)

SQLITE = (
    "SELECT name, sql FROM sqlite_master WHERE type = 'table'",
    'SELECT m.name, x.name, x.type, NULL, NOT x."notnull", x.dflt_value IS NOT NULL, x.pk '
    "FROM sqlite_master m JOIN pragma_table_xinfo(m.name) x WHERE m.type = 'table'",
    "SELECT tbl_name, type, name, sql FROM sqlite_master "
    "WHERE type IN ('index', 'trigger') AND sql IS NOT NULL",
)


class Seen(NamedTuple):
    """Tables that are there, and names of which the role may not know whether they are."""

    tables: dict[str, Table]
    hidden: Collection[str] = ()


async def seen(context: DatabaseContext, names: Collection[str]) -> Seen:
    """Those of these tables that are there."""
    outbox = context.outbox
    match outbox.dialect:
        case "postgresql":
            whole = [quoted(outbox, outbox.schema, name) for name in names]
            return Seen(of_postgresql(*[await context.ask(one, names=whole) for one in POSTGRESQL]))
        case "sqlite":
            tables = of_sqlite(*[await context.ask(question) for question in SQLITE])
            return Seen({name: table for name, table in tables.items() if name in names})
    texts, hidden = await _texts(context, names)
    params = {"schema": outbox.schema, "names": list(names)}
    return Seen(of_mysql(texts, *[await context.ask(one, **params) for one in MYSQL]), hidden)


async def _texts(context: DatabaseContext, names: Collection[str]) -> tuple[dict[str, str], set[str]]:
    """What made each table: the views of MariaDB's catalogue hide constraints from all but owners."""
    texts: dict[str, str] = {}
    hidden: set[str] = set()
    for name in names:
        try:
            rows = await context.ask(
                f"SHOW CREATE TABLE {quoted(context.outbox, context.outbox.schema, name)}"
            )
        except NoTables:
            continue
        except StoreError as error:
            if not denied(error.__cause__):
                raise
            hidden.add(name)
        else:
            texts[name] = _text(rows[0][1])
    return texts, hidden


def of_postgresql(classes: Rows, columns: Rows, checks: Rows, indexes: Rows) -> dict[str, Table]:
    """Tables of what the catalogue answered."""
    tables = _with_columns(columns, collation=True)
    for name, options in classes:
        found = tables.setdefault(str(name), Table())
        found.options = dict(option.split("=", 1) for option in options or ())
    for name, check, valid in checks:
        tables[str(name)].checks[str(check)] = Check(valid=valid)
    for name, index, primary, valid, partial, of in indexes:
        cut = tuple(column.strip('"') for column in of.split(","))
        if primary:
            tables[str(name)].key = cut
        else:
            tables[str(name)].indexes[str(index)] = Index(cut, partial, valid)
    return tables


def of_mysql(texts: Mapping[str, str], classes: Rows, columns: Rows, indexes: Rows) -> dict[str, Table]:
    """Tables of what the catalogue answered; a table's own text says its constraints."""
    tables = _with_columns(columns, collation=True)
    for name, engine in classes:
        tables.setdefault(str(name), Table()).options = {"engine": str(engine)}
    for name, text in texts.items():
        checks = re.findall(r"CONSTRAINT `([^`]+)` CHECK", text)
        tables.setdefault(name, Table()).checks = {check: Check() for check in checks}
    for name, index, of in indexes:
        if index == "PRIMARY":
            tables[str(name)].key = tuple(_text(of).split(","))
        else:
            tables[str(name)].indexes[str(index)] = Index(tuple(_text(of).split(",")))
    return tables


def of_sqlite(texts: Rows, columns: Rows, others: Rows) -> dict[str, Table]:
    """Tables of what the catalogue answered; a table's own text says its constraints."""
    tables = _with_columns([row[:6] for row in columns], collation=False)
    for name, rows in by_table(columns).items():
        keyed = sorted((row[5], row[0]) for row in rows if row[5])
        tables[name].key = tuple(column for _, column in keyed)
    for name, text in texts:
        found = tables.setdefault(name, Table())
        found.create = (text,)
        found.checks = {check: Check() for check in re.findall(r'CONSTRAINT "?(\w+)"? CHECK', text)}
    for name, kind, other, text in others:
        if kind == "trigger":
            tables[name].triggers[other] = text
        else:
            tables[name].indexes[other] = parse_index(text)
    return tables


def _with_columns(rows: Rows, *, collation: bool) -> dict[str, Table]:
    return {
        table: Table(
            columns={
                str(name): Column(
                    spelled(_text(type_)), bool(nullable), bool(filled), collated if collation else None
                )
                for name, type_, collated, nullable, filled in of
            }
        )
        for table, of in by_table(rows).items()
    }


def _text(value: Any) -> str:
    """MySQL gives some of its own texts as bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
