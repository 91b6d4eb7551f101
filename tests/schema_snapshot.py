"""What a database holds, as values to compare: one function per database, by whatever means it was made.

The order of columns is left out: it means nothing, and a later version may add one at the end.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import sqlalchemy as sa
from pymysql.constants import CLIENT

from tests.databases import engine

Snapshot: TypeAlias = dict[str, Any]

OF_POSTGRESQL = {
    "tables": """
        SELECT c.relname, c.relkind, c.reloptions FROM pg_class c
        WHERE c.relnamespace = to_regnamespace(quote_ident(:schema)) AND c.relkind IN ('r', 'S', 'v')""",
    "columns": """
        SELECT c.relname, a.attname, format_type(a.atttypid, a.atttypmod), a.attnotnull, a.attidentity,
               a.attgenerated, o.collname, pg_get_expr(d.adbin, d.adrelid)
        FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid AND c.relkind = 'r'
        LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
        LEFT JOIN pg_collation o ON o.oid = a.attcollation
        WHERE c.relnamespace = to_regnamespace(quote_ident(:schema))
          AND a.attnum > 0 AND NOT a.attisdropped""",
    "constraints": """
        SELECT c.relname, n.conname, n.contype, pg_get_constraintdef(n.oid)
        FROM pg_constraint n JOIN pg_class c ON c.oid = n.conrelid
        WHERE n.connamespace = to_regnamespace(quote_ident(:schema))""",
    "indexes": "SELECT tablename, indexname, indexdef FROM pg_indexes WHERE schemaname = :schema",
    "sequences": """
        SELECT sequencename, data_type, start_value, increment_by, cycle, cache_size
        FROM pg_sequences WHERE schemaname = :schema""",
    "triggers": """
        SELECT event_object_table, trigger_name, action_statement FROM information_schema.triggers
        WHERE trigger_schema = :schema""",
}

OF_MARIADB = {
    "tables": """
        SELECT table_name, engine, table_collation FROM information_schema.tables
        WHERE table_schema = :schema""",
    "columns": """
        SELECT table_name, column_name, column_type, is_nullable, column_default, extra, collation_name,
               generation_expression
        FROM information_schema.columns WHERE table_schema = :schema""",
    "constraints": """
        SELECT table_name, constraint_name, check_clause FROM information_schema.check_constraints
        WHERE constraint_schema = :schema""",
    "indexes": """
        SELECT table_name, index_name, non_unique, seq_in_index, column_name, sub_part
        FROM information_schema.statistics WHERE table_schema = :schema""",
    "triggers": """
        SELECT event_object_table, trigger_name, action_statement FROM information_schema.triggers
        WHERE trigger_schema = :schema""",
}

OF_SQLITE = {
    "columns": """
        SELECT m.name, x.name, x.type, x."notnull", x.dflt_value, x.pk, x.hidden
        FROM sqlite_master m JOIN pragma_table_xinfo(m.name) x WHERE m.type = 'table'""",
    "indexes and triggers": """
        SELECT tbl_name, type, name, sql FROM sqlite_master WHERE type IN ('index', 'trigger')""",
}


@contextmanager
def transaction(url: str) -> Iterator[sa.Connection]:
    """Yield a connection in a transaction of its own."""
    with engine(url).begin() as connection:
        yield connection


def run_script(url: str, script: str) -> None:
    """Execute the whole text at once, as psql, mariadb and sqlite3 do."""
    multiple = {"client_flag": CLIENT.MULTI_STATEMENTS} if sa.make_url(url).drivername == "mysql" else {}
    connection: Any = engine(url, connect_args=multiple).raw_connection()
    try:
        cursor = connection.cursor()
        (cursor.executescript if hasattr(cursor, "executescript") else cursor.execute)(script)
        while hasattr(cursor, "nextset") and cursor.nextset():
            pass
        connection.commit()
    finally:
        connection.detach()
        connection.close()


def snapshot(url: str, *, schema: str | None = None, leave_out: tuple[str, ...] = ()) -> Snapshot:
    """Return everything in the database, or in its schema, but the tables that are left out."""
    take = {"postgresql": postgresql, "mysql": mariadb, "sqlite": sqlite}[sa.make_url(url).drivername]
    with transaction(url) as connection:
        return {
            kind: {line for line in lines if line[0] not in leave_out}
            for kind, lines in take(connection, schema).items()
        }


def postgresql(connection: sa.Connection, schema: str | None = None) -> Snapshot:
    """Tables with their storage, columns, constraints, indexes, sequences and triggers."""
    schema = schema or "public"
    # Definitions spell out a schema that is not on the path; what is compared is what stands in it.
    connection.exec_driver_sql(f'SET LOCAL search_path TO "{schema}"')
    found = _ask(connection, OF_POSTGRESQL, schema)
    found["indexes"] = {
        (table, name, re.sub(rf' ON "?{schema}"?\.', " ON ", definition))
        for table, name, definition in found["indexes"]
    }
    return found


def mariadb(connection: sa.Connection, schema: str | None = None) -> Snapshot:
    """Tables with their engine, columns, constraints, indexes and triggers."""
    return _ask(connection, OF_MARIADB, schema or connection.scalar(sa.text("SELECT DATABASE()")))


def sqlite(connection: sa.Connection, schema: str | None = None) -> Snapshot:
    """Columns, constraints, indexes and triggers."""
    found = _ask(connection, OF_SQLITE, None)
    inspector = sa.inspect(connection)
    found["constraints"] = {
        (table, constraint["name"], _one_line(constraint["sqltext"]))
        for table in inspector.get_table_names()
        for constraint in inspector.get_check_constraints(table)
    }
    return found


def _ask(connection: sa.Connection, questions: dict[str, str], schema: str | None) -> Snapshot:
    values = {} if schema is None else {"schema": schema}
    return {
        kind: {tuple(map(_plain, row)) for row in connection.execute(sa.text(question), values)}
        for kind, question in questions.items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return _one_line(value) if isinstance(value, str) else value


def _one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()
