"""Generates the statements that restore tables changed by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from relaybox.database.catalogue import Column, Constraint, Index
from relaybox.database.migrations import Outbox, quoted
from relaybox.database.schema import MYSQL

_IN_PLACE = "SQLite cannot change it in place: make new tables with another prefix, and copy the rows"


class ColumnRepair:
    """Repair statements for columns."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._mysql = outbox.dialect in MYSQL
        self._sqlite = outbox.dialect == "sqlite"

    def add(self, table: str, name: str, column: Column) -> str:
        """Add a column as CREATE TABLE has it."""
        spec = column.ddl or f"{quoted(self._outbox, name)} {column.type}"
        return alter(self._outbox, table, f"ADD COLUMN {spec}")

    def drop(self, table: str, name: str) -> str:
        """Drop a column."""
        return alter(self._outbox, table, f"DROP COLUMN {quoted(self._outbox, name)}")

    def change_type(self, table: str, name: str, column: Column) -> str:
        """Set a column's type and collation."""
        collation = f' COLLATE "{column.collation}"' if column.collation else ""
        using = f"USING {quoted(self._outbox, name)}::{column.type}"
        return self._change(table, name, column, f"TYPE {column.type}{collation} {using}")

    def set_not_null(self, table: str, name: str, column: Column) -> str:
        """Make a column NOT NULL."""
        return self._change(table, name, column, "SET NOT NULL")

    def drop_not_null(self, table: str, name: str, column: Column) -> str:
        """Make a column nullable."""
        if self._mysql and not column.ddl:
            how = f"MODIFY COLUMN {quoted(self._outbox, name)} {column.type} NULL"
            return alter(self._outbox, table, how)
        return self._change(table, name, column, "DROP NOT NULL")

    def set_default(self, table: str, name: str, column: Column) -> str:
        """Set a column's default or identity."""
        if " GENERATED " in column.ddl:
            identity = column.ddl[column.ddl.index("GENERATED ") :].removesuffix(" NOT NULL")
            return self._change(table, name, column, f"ADD {identity}")
        default = column.ddl.partition(" DEFAULT ")[2].removesuffix(" NOT NULL")
        return self._change(table, name, column, f"SET DEFAULT {default}")

    def _change(self, table: str, name: str, column: Column, how: str) -> str:
        if self._sqlite:
            return _IN_PLACE
        if self._mysql:
            # MODIFY takes the whole column. The index of UNIQUE already exists.
            return alter(self._outbox, table, f"MODIFY COLUMN {column.ddl.replace(' UNIQUE', '')}")
        return alter(self._outbox, table, f"ALTER COLUMN {quoted(self._outbox, name)} {how}")


class Repair:
    """Repair statements for the tables of one outbox, one per line, each with a semicolon."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._mysql = outbox.dialect in MYSQL
        self._sqlite = outbox.dialect == "sqlite"
        self.columns = ColumnRepair(outbox)

    def statements(self, *texts: str) -> str:
        """Join these statements unchanged."""
        return "\n".join(f"{text.strip()};" for text in texts)

    def add_key(self, table: str, columns: Sequence[str], another: bool) -> str:
        """Add the primary key; with ``another``, drop the existing one first."""
        if self._sqlite:
            return _IN_PLACE
        names = ", ".join(quoted(self._outbox, name) for name in columns)
        drop = ""
        if another:
            constraint = quoted(self._outbox, f"{table}_pkey")
            drop = "DROP PRIMARY KEY, " if self._mysql else f"DROP CONSTRAINT {constraint}, "
        return alter(self._outbox, table, f"{drop}ADD PRIMARY KEY ({names})")

    def add_check(self, table: str, name: str, check: Constraint) -> str:
        """Add a constraint."""
        if self._sqlite:
            return _IN_PLACE
        how = f"ADD CONSTRAINT {quoted(self._outbox, name)} CHECK ({check.condition})"
        return alter(self._outbox, table, how)

    def validate(self, table: str, name: str) -> str:
        """Validate a constraint against existing rows."""
        return alter(self._outbox, table, f"VALIDATE CONSTRAINT {quoted(self._outbox, name)}")

    def create_index(self, index: Index) -> str:
        """Create an index; on PostgreSQL without blocking writers."""
        create = index.create
        if self._outbox.dialect == "postgresql":
            create = create.replace("CREATE INDEX ", "CREATE INDEX CONCURRENTLY ", 1)
        return self.statements(create)

    def rebuild_index(self, name: str) -> str:
        """Rebuild an index without blocking writers."""
        return f"REINDEX INDEX CONCURRENTLY {in_schema(self._outbox, name)};"

    def replace_index(self, table: str, name: str, index: Index) -> str:
        """Drop a wrong index and create the right one."""
        if self._mysql:
            drop = f"DROP INDEX {quoted(self._outbox, name)} ON {in_schema(self._outbox, table)};"
        else:
            how = "" if self._sqlite else "CONCURRENTLY "
            drop = f"DROP INDEX {how}{in_schema(self._outbox, name)};"
        return f"{drop}\n{self.create_index(index)}"

    def set_options(self, table: str, options: Mapping[str, str]) -> str:
        """Set storage parameters; existing rows keep their pages until VACUUM FULL."""
        if "engine" in options:
            return self.set_engine(table, options["engine"])
        settings = ", ".join(f"{name} = {value}" for name, value in options.items())
        return alter(self._outbox, table, f"SET ({settings})")

    def set_engine(self, table: str, engine: str) -> str:
        """Move a table to another engine."""
        return alter(self._outbox, table, f"ENGINE = {engine}")


def alter(outbox: Outbox, table: str, how: str) -> str:
    """Return the ALTER TABLE."""
    return f"ALTER TABLE {in_schema(outbox, table)} {how};"


def in_schema(outbox: Outbox, name: str) -> str:
    """Return the quoted name with its schema."""
    return quoted(outbox, outbox.schema, name)
