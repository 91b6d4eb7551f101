"""The tables as Django handles them: their columns and indexes, the operation that creates them, and a check.

Models and migrations are written with these fields and indexes. The tables themselves are created by the
statements of ``relaybox migrate``.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

from django.apps import AppConfig
from django.db import DatabaseError, Error, NotSupportedError, connections, models, router
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import CreateModel
from django.db.migrations.operations.base import Operation
from django.db.models.fields.json import JSONExact
from django.db.models.lookups import Exact
from django.utils import timezone

from relaybox.contrib.django.databases import connection_of, dialect_of
from relaybox.core.commands import Program
from relaybox.database.migrations import ALREADY_THERE, MIGRATIONS, NEWEST, Outbox, drop
from relaybox.database.statements.server import NEWEST_MIGRATION
from relaybox.errors import ConfigError, SchemaError, StoreError

ALREADY_GONE = {1051}
"""MySQL's error for a table that does not exist."""

MODEL = "OutboxEvent"
"""The model that routers are asked about: the tables go together."""


class OutboxUUIDField(models.UUIDField):  # type: ignore[misc]
    """A UUID: PostgreSQL's type, and 32 hexadecimal digits elsewhere.

    Django uses MariaDB's own type where there is one. It sorts UUIDs of version 7 in another order than time.
    """

    def db_type(self, connection: Any) -> str:
        """Return the column's type, which a foreign key to it takes over."""
        if connection.vendor == "mysql":
            return "char(32) CHARACTER SET ascii COLLATE ascii_bin"
        return str(super().db_type(connection))

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return a UUID, or its digits."""
        value = self.to_python(value)
        return value if value is None or connection.vendor == "postgresql" else value.hex

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> UUID | None:
        """Return a UUID; some of Django's backends made it already."""
        return UUID(value) if isinstance(value, str) else value


class UTCDateTimeField(models.DateTimeField):  # type: ignore[misc]
    """A moment: aware and in UTC in Python, also where USE_TZ is off; UTC in the database.

    A naive value that is written or looked for is taken to be in the zone of ``settings.TIME_ZONE``.
    """

    def get_prep_value(self, value: Any) -> datetime | None:
        """Return an aware moment."""
        value = super().get_prep_value(value)
        if value is None or timezone.is_aware(value):
            return value  # type: ignore[no-any-return]
        return timezone.make_aware(value, timezone.get_default_timezone())  # type: ignore[no-any-return]

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return the moment as the outbox's own statements write it."""
        value = value if prepared else self.get_prep_value(value)
        return None if value is None else dialect_of(connection).to_time(value)

    def from_db_value(self, value: datetime | None, expression: Any, connection: Any) -> datetime | None:
        """Return the moment in UTC."""
        if value is None:
            return None
        if connection.vendor != "postgresql":
            # Django's backend may have given it the zone that it supposes the column to be in.
            return value.replace(tzinfo=UTC)
        if timezone.is_naive(value):
            # Without USE_TZ it is the wall time of the session's zone.
            value = value.replace(tzinfo=ZoneInfo(connection.timezone_name))
        return value.astimezone(UTC)


class OutboxJSONField(models.JSONField):  # type: ignore[misc]
    """A JSON document, written as the outbox writes it.

    Where JSON is text, a whole document is looked for by its text.
    """

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return Django's value; text has no blanks and no escapes."""
        adapted = super().get_db_prep_value(value, connection, prepared)
        if not isinstance(adapted, str):
            return adapted
        return json.dumps(json.loads(adapted), separators=(",", ":"), ensure_ascii=False)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return the document."""
        # SQLite keeps a document that is a bare number as a number.
        if isinstance(value, int | float):
            return value
        return super().from_db_value(value, expression, connection)


@OutboxJSONField.register_lookup
class SameDocument(JSONExact):  # type: ignore[misc]
    """``payload={…}``: MariaDB's JSON is text, of which Django's functions would change the spacing."""

    def as_mysql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        """Compare the two texts."""
        if not connection.mysql_is_mariadb:
            sql, params = self.as_sql(compiler, connection)
            return sql, params
        column, column_params = compiler.compile(self.lhs)
        value, value_params = Exact.process_rhs(self, compiler, connection)
        return f"{column} = {value}", [*column_params, *value_params]


class NamedIndex(models.Index):  # type: ignore[misc]
    """An index with the name it has in the database, as long as all but Oracle allow; Oracle allows 30."""

    max_name_length = 63


def state_of(
    name: str, db_table: str, verbose_name: str, fields: Mapping[str, models.Field], **options: Any
) -> CreateModel:
    """Return the operation that tells Django of a table, which ``CreateOutboxTables`` creates."""
    fixed = {"db_table": db_table, "verbose_name": verbose_name, "default_permissions": ("view",)}
    return CreateModel(name, list(fields.items()), {**fixed, **options})


class CreateOutboxTables(Operation):  # type: ignore[misc]
    """Brings the tables to a version with the statements of ``relaybox migrate``.

    Backwards, the first version drops the tables; the others leave them, as the version before runs on them
    too. After ``relaybox migrate`` there is nothing left to do.
    """

    reduces_to_sql = True

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: the models stand in operations of their own."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Create what is missing."""
        if self.allow_migrate_model(
            schema_editor.connection.alias, to_state.apps.get_model(app_label, MODEL)
        ):
            create_tables(schema_editor, self.version)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop the tables with everything in them, on the way back from the first version."""
        if self.version > 1:
            return
        connection = schema_editor.connection
        if self.allow_migrate_model(connection.alias, to_state.apps.get_model(app_label, MODEL)):
            _execute(schema_editor, drop(outbox_of(connection)), ALREADY_GONE)

    def describe(self) -> str:
        """Return what ``migrate --plan`` prints."""
        return f"Create the tables of the outbox, version {self.version}"


def create_tables(schema_editor: Any, version: int = NEWEST) -> None:
    """Apply the versions up to ``version`` that the database has not recorded."""
    connection = schema_editor.connection
    outbox = outbox_of(connection)
    # What is only printed stands in one migration for each version.
    recorded = version - 1 if schema_editor.collect_sql else recorded_version(connection)
    pending = [migration for migration in MIGRATIONS if (recorded or 0) < migration.number <= version]
    statements = [statement for migration in pending for statement in migration.statements(outbox)]
    # Without the table of migrations, which is made first, whatever else exists is not ours.
    _execute(schema_editor, statements, () if recorded is None else ALREADY_THERE)


def create_tables_without_migrations(sender: AppConfig, using: str, **kwargs: Any) -> None:
    """Create the tables if the project has turned the app's migrations off.

    Django would create them from the models, without the constraints, the defaults and the positions. It
    leaves tables alone that exist already.
    """
    if MigrationLoader.migrations_module(sender.label)[0] is not None:
        return
    if router.allow_migrate_model(using, sender.get_model(MODEL)):
        with connections[using].schema_editor() as schema_editor:
            create_tables(schema_editor)


def outbox_of(connection: Any) -> Outbox:
    """Return the statements for the connection's database."""
    try:
        return Outbox(dialect_of(connection).name)  # type: ignore[arg-type]
    except ConfigError as error:
        fix = "let a database router keep the app off it"
        raise NotSupportedError(f"{error}; {fix}") from None


def recorded_version(connection: Any) -> int | None:
    """Return the highest version recorded, or 0; ``None`` if there is no table of migrations."""
    with connection.cursor() as cursor:
        if "outbox_migration" not in connection.introspection.table_names(cursor):
            return None
        cursor.execute(NEWEST_MIGRATION.format(migration="outbox_migration"))
        return cursor.fetchone()[0] or 0


def _execute(schema_editor: Any, statements: Iterable[str], passed_over: Container[int]) -> None:
    """Execute DDL. MySQL commits every statement by itself, so one that was cut short is run again."""
    resuming = schema_editor.connection.vendor == "mysql"
    for statement in statements:
        try:
            # None: a percent sign is not a placeholder.
            schema_editor.execute(statement, params=None)
        except DatabaseError as error:
            if not resuming or error.args[0] not in passed_over:
                raise


def check_tables(using: str) -> None:
    """Raise if the database cannot be reached, or its tables are missing or too old."""
    connection = connection_of(using)
    fix = f"run `{Program.migrate}{'' if using == 'default' else f' --database {using}'}`"
    try:
        dialect_of(connection)
        version = recorded_version(connection) or 0
    except Error as error:
        raise StoreError(f"database {using!r}: {' '.join(str(error).split())}") from error
    if version == 0:
        raise SchemaError(f"database {using!r}: the tables are missing: {fix}")
    if version < NEWEST:
        needed = f"this release needs {NEWEST}"
        raise SchemaError(f"database {using!r}: the tables are at version {version} and {needed}: {fix}")
