"""Creates and updates the tables with numbered migrations that only go forward.

Two releases may share a schema, so a higher version is not an error. MySQL commits each DDL statement, so an
interrupted migration runs again there and skips whatever exists.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Literal, TypeAlias, TypeVar, get_args

import sqlalchemy as sa
from sqlalchemy.engine.mock import MockConnection

from relaybox.core.commands import Program, command
from relaybox.core.settings import normalize_url
from relaybox.core.values import choice, mask_url, wrong
from relaybox.database.connect import connected, denied, in_memory
from relaybox.database.schema import MYSQL, Tables, make_tables
from relaybox.database.statements.delivery import Query
from relaybox.database.steps import Steps, drive
from relaybox.errors import ConfigError, SchemaError, StoreError

T = TypeVar("T")
DialectName: TypeAlias = Literal["postgresql", "mysql", "mariadb", "sqlite"]

LOCK = 0x52454C4159424F58
"""One lock for all outboxes of a PostgreSQL database: ``None`` and ``public`` may be the same schema."""

PATIENCE = 600

ALREADY_THERE = {1050, 1060, 1061}
"""MySQL's errors for a table, column or index that already exists."""


@dataclass(frozen=True, slots=True)
class Outbox:
    """The tables of one outbox: kind of database, schema and prefix."""

    dialect: DialectName
    schema: str | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        choice(DialectName)(self.dialect, "dialect")
        self.tables()
        if self.schema and self.dialect == "sqlite":
            raise wrong("schema", self.schema, "SQLite has no schemas; leave it out, or use a prefix")

    def metadata(self) -> sa.MetaData:
        """Return the MetaData that holds only these tables."""
        return self.tables().event.metadata

    def tables(self) -> Tables:
        """Return the tables."""
        return _tables(self.schema, self.prefix)


@lru_cache(maxsize=16)
def _tables(schema: str | None, prefix: str) -> Tables:
    return make_tables(sa.MetaData(), schema=schema, prefix=prefix)


@dataclass(frozen=True, slots=True)
class Migration:
    """One step forward; its last statement records its number.

    A released migration never changes. ``schema.py`` generates the statements while versions only add tables.
    For the first new column, see "A new column" in ``docs/explanation/architecture.md``.
    """

    number: int
    title: str
    statements: Callable[[Outbox], list[str]]


def _create_tables(version: int, outbox: Outbox) -> list[str]:
    metadata = outbox.metadata()
    tables = [table for table in metadata.tables.values() if table.info.get("version", 1) == version]
    statements = rendered(
        outbox.dialect, lambda engine: metadata.create_all(engine, tables=tables, checkfirst=False)
    )
    return [
        statement
        for indexes, group in itertools.groupby(statements, lambda text: text.startswith("CREATE INDEX"))
        for statement in (sorted(group) if indexes else group)
    ]


MIGRATIONS = (
    Migration(1, "the tables", partial(_create_tables, 1)),
    Migration(2, "samples and operations", partial(_create_tables, 2)),
    Migration(3, "settings", partial(_create_tables, 3)),
)
NEWEST = MIGRATIONS[-1].number


def ddl(dialect_name: DialectName, *, schema: str | None = None, prefix: str = "") -> list[str]:
    """Return every statement that sets up an empty database, in order."""
    outbox = Outbox(dialect_name, schema, prefix)
    migrations = [statement for migration in MIGRATIONS for statement in migration.statements(outbox)]
    return [*create_schema(outbox), *migrations]


def create_schema(outbox: Outbox) -> list[str]:
    """Return CREATE SCHEMA for PostgreSQL; on MySQL a schema is another database, which must exist."""
    if outbox.schema is None or outbox.dialect != "postgresql":
        return []
    create = sa.schema.CreateSchema(outbox.schema, if_not_exists=True)
    return rendered(outbox.dialect, lambda engine: engine.execute(create))


def drop(outbox: Outbox) -> list[str]:
    """Return the statements that drop the tables of any version, with their rows."""
    statements = rendered(outbox.dialect, lambda engine: outbox.metadata().drop_all(engine, checkfirst=False))
    return [re.sub(r"^DROP TABLE ", "DROP TABLE IF EXISTS ", statement) for statement in statements]


def migrate(database: str, *, schema: str | None = None, prefix: str = "") -> list[int]:
    """Bring the tables up to date and return the versions applied now; safe to repeat and to run in parallel.

    PostgreSQL creates a missing ``schema``; on MariaDB and MySQL it names a database that must exist.
    """
    if in_memory(normalize_url(database)):
        fix = "it is in memory, so the tables would be lost at once; name a file, as in sqlite:///relaybox.db"
        raise ConfigError(f"database = {mask_url(database)!r}: {fix}")
    try:
        return _run(database, lambda dialect: _migrating(Outbox(dialect, schema, prefix)))
    except StoreError as error:
        if not denied(error.__cause__):
            raise
        fix = f"run it as the owner, or review {command('sql')}"
        raise StoreError(f"{error}; {fix}") from error.__cause__


def current_version(database: str, *, schema: str | None = None, prefix: str = "") -> int:
    """Return the version of the tables, or 0 if they do not exist."""
    return _run(database, lambda dialect: _recorded(Outbox(dialect, schema, prefix)), create=False) or 0


def check(database: str, *, schema: str | None = None, prefix: str = "") -> None:
    """Raise SchemaError if the tables are missing, or older than this release needs."""
    version = current_version(database, schema=schema, prefix=prefix)
    if version == 0:
        raise SchemaError(f"the tables are missing: run `{Program.migrate}`")
    if version < NEWEST:
        raise SchemaError(
            f"the tables are at version {version} and this release needs {NEWEST}: run `{Program.migrate}`"
        )


def server_dialect(database: str) -> DialectName:
    """Return the dialect of a database; ask the server to tell MySQL from MariaDB, which share URLs."""
    scheme = normalize_url(database).partition(":")[0]
    return _run(database, _server) if scheme in MYSQL else _name(scheme)


def rendered(dialect: DialectName, run: Callable[[MockConnection], Any]) -> list[str]:
    """Return the statements that ``run`` executes on such a database, as text."""
    statements: list[str] = []

    def keep(element: Any, *_: Any) -> None:
        text = str(element.compile(dialect=engine.dialect, compile_kwargs={"literal_binds": True}))
        statements.append(re.sub(r" +$", "", text.replace("\t", "    "), flags=re.MULTILINE).strip())

    # Named parameters keep the compiler from doubling percent signs: these texts have no parameters.
    engine = sa.create_mock_engine(f"{dialect}://", keep, paramstyle="named")
    run(engine)
    return statements


def quoted(outbox: Outbox, *names: str | None) -> str:
    """Quote each name for the database and join them with dots."""
    preparer = sa.create_mock_engine(f"{outbox.dialect}://", None).dialect.identifier_preparer
    return ".".join(preparer.quote_identifier(name) for name in names if name)


def _run(database: str, begin: Callable[[DialectName], Steps[T]], *, create: bool = True) -> T:
    """Drive the steps, in one transaction if the database supports transactional DDL."""
    url = normalize_url(database)
    steps = begin(_name(url.partition(":")[0]))
    with connected(url, create=create) as execute:
        # Errors go to the steps, which know whether they matter.
        return drive(steps, lambda queries: [execute(query.sql) for query in queries])


def _name(scheme: str) -> DialectName:
    return next(name for name in get_args(DialectName) if name == scheme)


def _migrating(outbox: Outbox) -> Steps[list[int]]:
    outbox = replace(outbox, dialect=(yield from _server(outbox.dialect)))
    yield from _lock(outbox)
    version = yield from _recorded(outbox)
    # The table of migrations is created first; without it, existing tables are not ours.
    resuming = version is not None and outbox.dialect in MYSQL
    pending = [migration for migration in MIGRATIONS if migration.number > (version or 0)]
    if pending:
        yield from _ensure_schema(outbox)
    for statement in (text for migration in pending for text in migration.statements(outbox)):
        try:
            yield [Query(statement, ())]
        except Exception as error:
            if not resuming or ALREADY_THERE.isdisjoint(error.args[:1]):
                raise
    return [migration.number for migration in pending]


def _server(dialect: DialectName) -> Steps[DialectName]:
    if dialect not in MYSQL:
        return dialect
    [[[version]]] = yield [Query("SELECT VERSION()", ())]
    return "mariadb" if "mariadb" in version.lower() else "mysql"


def _lock(outbox: Outbox) -> Steps[None]:
    """Allow one migration at a time, until the transaction or the connection ends."""
    match outbox.dialect:
        case "postgresql":
            yield [Query(f"SELECT pg_advisory_xact_lock({LOCK})", ())]
        case "sqlite":
            yield [Query("BEGIN IMMEDIATE", ())]
        case _:
            name = sa.func.concat("relaybox.", sa.func.md5(_mysql_database(outbox)))
            [[[locked]]] = yield [_text(outbox, sa.select(sa.func.get_lock(name, PATIENCE)))]
            if locked != 1:
                raise StoreError(f"another migration has been running for {PATIENCE} s; try again later")


def _recorded(outbox: Outbox) -> Steps[int | None]:
    """Return the highest recorded version, 0 if there is none, or ``None`` without a table of migrations."""
    table = outbox.tables().migration
    [found] = yield [_text(outbox, _find(outbox, table))]
    if not found:
        return None
    [[[version]]] = yield [_text(outbox, sa.select(sa.func.max(table.c.version)))]
    return version or 0


def _find(outbox: Outbox, table: sa.Table) -> sa.Select[Any]:
    row = sa.select(sa.literal(1))
    if outbox.dialect == "postgresql":
        # to_regclass follows the search path for an unqualified name, as every statement does.
        name = quoted(outbox, table.schema, table.name)
        return row.where(sa.func.to_regclass(name).is_not(None))
    if outbox.dialect == "sqlite":
        master = _catalog("sqlite_master", "type", "name")
        return row.where(master.c.type == "table", master.c.name == table.name)
    tables = _catalog("tables", "table_schema", "table_name", schema="information_schema")
    in_schema = tables.c.table_schema == _mysql_database(outbox)
    return row.where(in_schema, tables.c.table_name == table.name)


def _catalog(name: str, *columns: str, schema: str | None = None) -> sa.TableClause:
    return sa.table(name, *(sa.column(column, sa.String) for column in columns), schema=schema)


def _ensure_schema(outbox: Outbox) -> Steps[None]:
    """Create the schema only if it is missing: IF NOT EXISTS always needs the privilege to create."""
    if outbox.schema is None or outbox.dialect != "postgresql":
        return
    schemas = _catalog("pg_namespace", "nspname")
    [found] = yield [_text(outbox, sa.select(sa.literal(1)).where(schemas.c.nspname == outbox.schema))]
    if not found:
        yield [Query(create_schema(outbox)[0], ())]


def _mysql_database(outbox: Outbox) -> sa.ColumnElement[Any]:
    return sa.literal(outbox.schema) if outbox.schema else sa.func.coalesce(sa.func.database(), "")


def _text(outbox: Outbox, statement: sa.Select[Any]) -> Query:
    [text] = rendered(outbox.dialect, lambda engine: engine.execute(statement))
    return Query(text, ())
