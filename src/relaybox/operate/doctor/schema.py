"""The check of the schema: how tables differ from those of this release, and the SQL that repairs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from relaybox.core.commands import Program
from relaybox.database.migrations import NEWEST, Outbox, quoted
from relaybox.database.schema import MYSQL
from relaybox.operate.doctor.catalogue import Column, Constraint, Index, Table, found_tables, wanted_tables
from relaybox.operate.doctor.check import DatabaseContext, Finding, Results, Unseen, check

_FOUND = {
    "postgresql": "SELECT to_regclass(:table) IS NOT NULL",
    "sqlite": "SELECT EXISTS (SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = :table)",
}
_FOUND_MYSQL = """
SELECT EXISTS (SELECT 1 FROM information_schema.tables
               WHERE table_schema = COALESCE(:schema, DATABASE()) AND table_name = :table)"""


_IN_PLACE = "SQLite cannot change it in place: make new tables with another prefix, and copy the rows"


async def recorded_version(context: DatabaseContext) -> int:
    """Return the version of the tables, 0 if there are none."""
    outbox = context.outbox
    table = outbox.tables().migration
    match outbox.dialect:
        case "postgresql":
            params = {"table": quoted(outbox, table.schema, table.name)}
        case "sqlite":
            params = {"table": table.name}
        case _:
            params = {"table": table.name, "schema": outbox.schema}  # type: ignore[dict-item]
    [(found,)] = await context.ask(_FOUND.get(outbox.dialect, _FOUND_MYSQL), **params)
    if not found:
        return 0
    [(version,)] = await context.ask("SELECT max(version) FROM {migration}")
    return version or 0


@check()
async def schema(context: DatabaseContext) -> Results:
    """Find every difference from the tables of this release; of older tables only that they are old."""
    if context.version < NEWEST:
        title = f"the tables are at version {context.version}, and this release needs {NEWEST}"
        yield Finding("error", title, "commands and relays refuse to work on them", Program.migrate)
        return
    if context.version > NEWEST:
        title = f"the tables are at version {context.version}, and this release knows {NEWEST}"
        detail = "which is well while releases are changed; a newer one made them"
        yield Finding("info", title, detail, "pip install --upgrade relaybox")
    wanted = wanted_tables(context.outbox)
    found, hidden = await found_tables(context, wanted.keys())
    if hidden:
        yield Unseen(f"the connected role may not know what {', '.join(sorted(hidden))} look like")
    known = {name: table for name, table in wanted.items() if name not in hidden}
    for finding in differences(context.outbox, known, found, newer=context.version > NEWEST):
        yield finding


def differences(
    outbox: Outbox, wanted: dict[str, Table], found: dict[str, Table], *, newer: bool = False
) -> Iterator[Finding]:
    """Find the differences; ``newer``: other columns are those of a newer release."""
    repair = Repair(outbox)
    for name, table in wanted.items():
        if name not in found:
            detail = "the version that is recorded says that it is there; statements that need it fail"
            fix = repair.statements(*table.create)
            yield Finding("error", f"the table {name} is missing", detail, fix)
            continue
        there = found[name]
        yield from _columns(repair, name, table, there, newer)
        yield from _key(repair, name, table, there)
        yield from _checks(repair, name, table, there)
        yield from _indexes(repair, name, table, there)
        yield from _others(repair, name, table, there)


def _columns(repair: Repair, name: str, table: Table, there: Table, newer: bool) -> Iterator[Finding]:
    for column, wanted in table.columns.items():
        whole = f"{name}.{column}"
        if column not in there.columns:
            detail = "statements that name it fail"
            yield Finding(
                "error", f"the column {whole} is missing", detail, repair.add_column(name, column, wanted)
            )
        else:
            yield from _column(repair, name, column, wanted, there.columns[column])
    for column, beside in there.columns.items():
        if column in table.columns or newer:
            continue
        whole = f"{name}.{column}"
        if beside.nullable or beside.filled:
            detail = "nothing here reads or writes it"
            yield Finding(
                "info", f"the column {whole} is not of this release", detail, repair.drop(name, column)
            )
        else:
            title = f"the column {whole} is not of this release, and must have a value"
            detail = "it is NOT NULL and has no default: every INSERT of ours fails"
            yield Finding("error", title, detail, repair.drop_not_null(name, column, beside))


def _column(repair: Repair, name: str, column: str, wanted: Column, there: Column) -> Iterator[Finding]:
    whole = f"{name}.{column}"
    if there.type != wanted.type:
        title = f"the column {whole} has another type"
        detail = f"it is {there.type} and should be {wanted.type}"
        yield Finding("error", title, detail, repair.change_type(name, column, wanted))
    elif wanted.collation and (there.collation or "").lower() != wanted.collation.lower():
        title = f"the column {whole} has another collation"
        detail = f"it is {there.collation} and should be {wanted.collation}, which compares byte by byte"
        yield Finding("warning", title, detail, repair.change_type(name, column, wanted))
    if there.nullable and not wanted.nullable:
        title = f"the column {whole} may be null"
        detail = "it should be NOT NULL: a row without it cannot be delivered"
        yield Finding("warning", title, detail, repair.set_not_null(name, column, wanted))
    if wanted.nullable and not there.nullable:
        title = f"the column {whole} may not be null"
        detail = "rows that rightly have no value there are refused"
        yield Finding("error", title, detail, repair.drop_not_null(name, column, wanted))
    if wanted.filled and not there.filled:
        title = f"the column {whole} has no default"
        detail = "an INSERT relies on it"
        yield Finding("error", title, detail, repair.set_default(name, column, wanted))


def _key(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    if there.key != table.key:
        is_now = f"it is ({', '.join(there.key)})" if there.key else "there is none"
        title = f"the table {name} has another primary key"
        detail = f"{is_now} and should be ({', '.join(table.key)})"
        yield Finding("error", title, detail, repair.add_key(name, table.key, bool(there.key)))


def _checks(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    for constraint, wanted in table.checks.items():
        found = there.checks.get(constraint)
        if found is None:
            title = f"the table {name} has no constraint {constraint}"
            detail = f"nothing keeps a row from an impossible state: {wanted.condition or 'see relaybox sql'}"
            yield Finding("warning", title, detail, repair.add_check(name, constraint, wanted))
        elif not found.valid:
            title = f"the constraint {constraint} of {name} was never validated"
            detail = "rows that were there before it may break it"
            yield Finding("info", title, detail, repair.validate(name, constraint))


def _indexes(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    for index, wanted in table.indexes.items():
        found = there.indexes.get(index)
        if found is None:
            title = f"the index {index} is missing"
            detail = f"without it the whole of {name} is read where a few rows would do"
            yield Finding("error", title, detail, repair.create_index(wanted))
        elif not found.valid:
            title = f"the index {index} is invalid"
            detail = f"it is kept up and never used: building it on {name} failed, or is not over yet"
            yield Finding("error", title, detail, repair.rebuild_index(index))
        elif (found.columns, found.partial) != (wanted.columns, wanted.partial):
            title = f"the index {index} is another one"
            detail = f"it is on {_on(found)} and should be on {_on(wanted)}"
            yield Finding("error", title, detail, repair.replace_index(name, index, wanted))


def _others(repair: Repair, name: str, table: Table, there: Table) -> Iterator[Finding]:
    for trigger, text in table.triggers.items():
        if trigger not in there.triggers:
            detail = "new rows get no position, and so no place in the order"
            yield Finding("error", f"the trigger {trigger} is missing", detail, repair.statements(text))
    unset = {option: value for option, value in table.options.items() if option not in there.options}
    if unset:
        title = f"the table {name} lacks settings of its storage"
        detail = f"{_listed(unset)}: claims cannot stay on their page, and dead rows are cleaned up too late"
        yield Finding("warning", title, detail, repair.set_options(name, unset))
    other = {
        option: value
        for option, value in there.options.items()
        if option in table.options and table.options[option] != value
    }
    if "engine" in other:
        detail = f"it is {other.pop('engine')}, which has no transactions: events would exist without theirs"
        fix = repair.set_engine(name, table.options["engine"])
        yield Finding("error", f"the table {name} is not of the engine InnoDB", detail, fix)
    if other:
        title = f"the storage of {name} is set otherwise than by this release"
        usual = {option: table.options[option] for option in other}
        detail = f"{_listed(other)}; this release sets {_listed(usual)}"
        yield Finding("info", title, detail, repair.set_options(name, usual))


def _on(index: Index) -> str:
    return f"({', '.join(index.columns)}){' WHERE …' if index.partial else ''}"


def _listed(options: dict[str, str]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in options.items())


class Repair:
    """The statements that repair the tables of one outbox, one a line, each with its semicolon."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._mysql = outbox.dialect in MYSQL
        self._sqlite = outbox.dialect == "sqlite"

    def statements(self, *texts: str) -> str:
        """Return these statements as they are."""
        return "\n".join(f"{text.strip()};" for text in texts)

    def add_column(self, table: str, name: str, column: Column) -> str:
        """Add a column as CREATE TABLE has it."""
        spec = column.ddl or f"{quoted(self._outbox, name)} {column.type}"
        return self._alter(table, f"ADD COLUMN {spec}")

    def drop(self, table: str, name: str) -> str:
        """Drop a column."""
        return self._alter(table, f"DROP COLUMN {quoted(self._outbox, name)}")

    def change_type(self, table: str, name: str, column: Column) -> str:
        """Give a column its type and its collation."""
        collation = f' COLLATE "{column.collation}"' if column.collation else ""
        using = f"USING {quoted(self._outbox, name)}::{column.type}"
        return self._change(table, name, column, f"TYPE {column.type}{collation} {using}")

    def set_not_null(self, table: str, name: str, column: Column) -> str:
        """Refuse null in a column."""
        return self._change(table, name, column, "SET NOT NULL")

    def drop_not_null(self, table: str, name: str, column: Column) -> str:
        """Allow null in a column."""
        if self._mysql and not column.ddl:
            return self._alter(table, f"MODIFY COLUMN {quoted(self._outbox, name)} {column.type} NULL")
        return self._change(table, name, column, "DROP NOT NULL")

    def set_default(self, table: str, name: str, column: Column) -> str:
        """Have the database fill in a column."""
        if " GENERATED " in column.ddl:
            identity = column.ddl[column.ddl.index("GENERATED ") :].removesuffix(" NOT NULL")
            return self._change(table, name, column, f"ADD {identity}")
        default = column.ddl.partition(" DEFAULT ")[2].removesuffix(" NOT NULL")
        return self._change(table, name, column, f"SET DEFAULT {default}")

    def add_key(self, table: str, columns: Sequence[str], another: bool) -> str:
        """Add the primary key; ``another``: drop the one that exists."""
        if self._sqlite:
            return _IN_PLACE
        names = ", ".join(quoted(self._outbox, name) for name in columns)
        drop = ""
        if another:
            constraint = quoted(self._outbox, f"{table}_pkey")
            drop = "DROP PRIMARY KEY, " if self._mysql else f"DROP CONSTRAINT {constraint}, "
        return self._alter(table, f"{drop}ADD PRIMARY KEY ({names})")

    def add_check(self, table: str, name: str, check: Constraint) -> str:
        """Add a constraint."""
        if self._sqlite:
            return _IN_PLACE
        return self._alter(table, f"ADD CONSTRAINT {quoted(self._outbox, name)} CHECK ({check.condition})")

    def validate(self, table: str, name: str) -> str:
        """Validate a constraint against the rows that were there before it."""
        return self._alter(table, f"VALIDATE CONSTRAINT {quoted(self._outbox, name)}")

    def create_index(self, index: Index) -> str:
        """Create an index, on PostgreSQL without blocking writers."""
        create = index.create
        if self._outbox.dialect == "postgresql":
            create = create.replace("CREATE INDEX ", "CREATE INDEX CONCURRENTLY ", 1)
        return self.statements(create)

    def rebuild_index(self, name: str) -> str:
        """Build an index again."""
        return f"REINDEX INDEX CONCURRENTLY {quoted(self._outbox, self._outbox.schema, name)};"

    def replace_index(self, table: str, name: str, index: Index) -> str:
        """Drop a wrong index, and create the right one."""
        if self._mysql:
            drop = f"DROP INDEX {quoted(self._outbox, name)} ON {self._table(table)};"
        else:
            how = "" if self._sqlite else "CONCURRENTLY "
            drop = f"DROP INDEX {how}{quoted(self._outbox, self._outbox.schema, name)};"
        return f"{drop}\n{self.create_index(index)}"

    def set_options(self, table: str, options: Mapping[str, str]) -> str:
        """Set storage parameters; existing rows keep their pages until a VACUUM FULL."""
        if "engine" in options:
            return self.set_engine(table, options["engine"])
        settings = ", ".join(f"{name} = {value}" for name, value in options.items())
        return self._alter(table, f"SET ({settings})")

    def set_engine(self, table: str, engine: str) -> str:
        """Move a table to another engine."""
        return self._alter(table, f"ENGINE = {engine}")

    def _change(self, table: str, name: str, column: Column, how: str) -> str:
        if self._sqlite:
            return _IN_PLACE
        if self._mysql:
            # MODIFY takes the whole column. The index of a UNIQUE exists already.
            return self._alter(table, f"MODIFY COLUMN {column.ddl.replace(' UNIQUE', '')}")
        return self._alter(table, f"ALTER COLUMN {quoted(self._outbox, name)} {how}")

    def _alter(self, table: str, how: str) -> str:
        return f"ALTER TABLE {self._table(table)} {how};"

    def _table(self, name: str) -> str:
        return quoted(self._outbox, self._outbox.schema, name)
