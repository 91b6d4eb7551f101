"""Fields, indexes and a migration operation, which uses the statements of ``relaybox migrate``."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID
from zoneinfo import ZoneInfo

import sqlalchemy as sa
from django.apps import AppConfig
from django.core.serializers.json import DjangoJSONEncoder
from django.db import DatabaseError, Error, NotSupportedError, connections, models, router
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations import CreateModel
from django.db.migrations.operations.base import Operation
from django.db.models.fields.json import JSONExact
from django.db.models.lookups import Exact
from django.utils import timezone

from relaybox.contrib.django.databases import connection_of, dialect_of, get_tables
from relaybox.core.commands import Program
from relaybox.database.migrations import ALREADY_THERE, MIGRATIONS, NEWEST, Outbox, drop
from relaybox.database.schema import JSON
from relaybox.database.statements.server import NEWEST_MIGRATION
from relaybox.errors import ConfigError, SchemaError, StoreError

ALREADY_GONE = {1051}
"""MySQL's error for a table that does not exist."""

MODEL = "OutboxEvent"
"""The model that routers decide on, for all tables."""


class OutboxUUIDField(models.UUIDField):  # type: ignore[misc]
    """A UUID, as text except on PostgreSQL: MariaDB's own type does not sort version 7 UUIDs by time."""

    def db_type(self, connection: Any) -> str:
        """Return the column's type; foreign keys use it too."""
        if connection.vendor == "mysql":
            return "char(32) CHARACTER SET ascii COLLATE ascii_bin"
        return str(super().db_type(connection))

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return a UUID, or its digits."""
        value = self.to_python(value)
        return value if value is None or connection.vendor == "postgresql" else value.hex

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> UUID | None:
        """Return a UUID; some backends return one already."""
        return UUID(value) if isinstance(value, str) else value


class UTCDateTimeField(models.DateTimeField):  # type: ignore[misc]
    """A time in UTC, aware even without ``USE_TZ``; naive values are in ``settings.TIME_ZONE``."""

    def get_prep_value(self, value: Any) -> datetime | None:
        """Return an aware time."""
        value = super().get_prep_value(value)
        if value is None or timezone.is_aware(value):
            return value  # type: ignore[no-any-return]
        return timezone.make_aware(value, timezone.get_default_timezone())  # type: ignore[no-any-return]

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return the time as the outbox's own statements write it."""
        value = value if prepared else self.get_prep_value(value)
        return None if value is None else dialect_of(connection).to_time(value)

    def from_db_value(self, value: datetime | None, expression: Any, connection: Any) -> datetime | None:
        """Return the time in UTC."""
        if value is None:
            return None
        if connection.vendor != "postgresql":
            # Django may have added the zone that it assumes for the column.
            return value.replace(tzinfo=UTC)
        if timezone.is_naive(value):
            # Without USE_TZ, the value is in the session's zone.
            value = value.replace(tzinfo=ZoneInfo(connection.timezone_name))
        return value.astimezone(UTC)


class OutboxJSONField(models.JSONField):  # type: ignore[misc]
    """A JSON document, formatted as the outbox writes it: databases without a JSON type compare its text."""

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Return Django's value; text without spaces and escapes."""
        adapted = super().get_db_prep_value(value, connection, prepared)
        if not isinstance(adapted, str):
            return adapted
        return json.dumps(json.loads(adapted), separators=(",", ":"), ensure_ascii=False)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return the document."""
        # SQLite stores a bare number as a number.
        if isinstance(value, int | float):
            return value
        return super().from_db_value(value, expression, connection)


@OutboxJSONField.register_lookup
class SameDocument(JSONExact):  # type: ignore[misc]
    """``payload={…}``: MariaDB stores JSON as text, and Django's functions would change its spacing."""

    def as_mysql(self, compiler: Any, connection: Any) -> tuple[str, Any]:
        """Compare the two texts."""
        if not connection.mysql_is_mariadb:
            sql, params = self.as_sql(compiler, connection)
            return sql, params
        column, column_params = compiler.compile(self.lhs)
        value, value_params = Exact.process_rhs(self, compiler, connection)
        return f"{column} = {value}", [*column_params, *value_params]


class NamedIndex(models.Index):  # type: ignore[misc]
    """An index with a name of up to 63 characters; Django allows 30, which only Oracle needs."""

    max_name_length = 63


FIELDS: dict[type[Any], Callable[..., models.Field]] = {
    sa.BigInteger: models.BigIntegerField,
    sa.DateTime: UTCDateTimeField,
    sa.Double: models.FloatField,
    sa.Integer: models.IntegerField,
    sa.LargeBinary: models.BinaryField,
    sa.String: models.CharField,
    sa.Text: models.TextField,
    sa.Uuid: OutboxUUIDField,
    type(JSON): partial(OutboxJSONField, encoder=DjangoJSONEncoder),
}
"""The field for each type of column in the schema."""

NAMES = {
    "attempt": ("failed attempt", "failed attempts", "delivery_id"),
    "audit": ("operator's action", "operator's actions", "id"),
    "destination": ("destination", "destinations", "name"),
    "event": ("outbox event", "outbox events", "id"),
    "idempotency": ("idempotency key", "idempotency keys", "idempotency_key"),
    "inbox": ("processed message", "processed messages", "message_id"),
    "leader": ("leader", "leaders", "name"),
    "operation": ("operation", "operations", "id"),
    "relay": ("relay", "relays", "name"),
    "sample": ("sample of a destination", "samples of destinations", "minute"),
    "setting": ("setting of a destination", "settings of destinations", "relay"),
    "stats": ("minute of a destination", "minutes of destinations", "minute"),
}
"""By table, the names of the model and its primary key: of several key columns, the most selective one."""

EVENT_PERMISSIONS = tuple(
    (f"{verb}_outboxevent", f"Can {verb} outbox event") for verb in ("retry", "replay", "discard")
)
EVENT_INDEXES = {
    "idx_outbox_event_aggregate": None,
    "idx_outbox_event_delivered": models.Q(status="delivered"),
    "idx_outbox_event_failed": models.Q(status="failed"),
    "idx_outbox_event_key_head": models.Q(status__in=["pending", "failed"], ordering_key__isnull=False),
    "idx_outbox_event_pending_next_attempt": models.Q(status="pending"),
}
"""The conditions of the event's indexes. The other indexes are MySQL's, which has no partial ones."""


def indexes_of(name: str) -> list[NamedIndex]:
    """Return the indexes of a table of the schema."""
    indexes = sorted(getattr(get_tables(), name).indexes, key=lambda index: str(index.name))
    named = [one for one in indexes if name != "event" or one.name in EVENT_INDEXES]
    return [
        NamedIndex(fields=list(one.columns.keys()), name=one.name, condition=EVENT_INDEXES.get(one.name))
        for one in named
    ]


def state_of(name: str, own: Mapping[str, models.Field] | None = None, **options: Any) -> CreateModel:
    """Return the operation that adds a table to Django's state; ``CreateOutboxTables`` creates it.

    ``own`` has fields that the schema cannot describe. As in ``relaybox.database.migrations``, versions only
    add tables so far. For the first new column, see "A new column" in ``docs/explanation/architecture.md``.
    """
    table: sa.Table = getattr(get_tables(), name)
    verbose_name, verbose_name_plural, key = NAMES[name]
    columns = [column.name for column in table.primary_key]
    unique = models.UniqueConstraint(fields=columns, name=f"{table.name}_pkey")
    # Some columns exist only on MySQL.
    common = [column for column in table.columns if "postgresql" not in column.info.get("ddl", ())]
    fields = {column.name: _field(column, column.name == key) for column in common} | dict(own or {})
    described = {
        "db_table": table.name,
        "verbose_name": verbose_name,
        "verbose_name_plural": verbose_name_plural,
        "default_permissions": ("view",),
        "constraints": [unique] if len(columns) > 1 else [],
        "indexes": indexes_of(name),
        **options,
    }
    return CreateModel(table.name.title().replace("_", ""), list(fields.items()), described)


def _field(column: sa.Column[Any], is_key: bool) -> models.Field:
    options: dict[str, Any] = {"primary_key": True, "serialize": False} if is_key else {}
    if column.identity is not None:
        return models.BigAutoField("ID", **options) if is_key else models.BigIntegerField(editable=False)
    if isinstance(column.type, sa.JSON) and not column.nullable:
        options["default"] = dict
    if isinstance(column.type, sa.String):
        options["max_length"] = column.type.length
    *words, last = column.name.split("_")
    if last == "id":
        options |= {"verbose_name": " ".join([*words, "ID"]), "editable": bool(words)}
    match column.server_default:
        case sa.DefaultClause(arg=str(text)):
            options["default"] = text
        case sa.DefaultClause(arg=sa.TextClause(text=number)):
            options["default"] = int(number)
    return FIELDS[type(column.type)](null=column.nullable, **options)


class CreateOutboxTables(Operation):  # type: ignore[misc]
    """Bring the tables to a version with the statements of ``relaybox migrate``.

    Reversing version 1 drops the tables. Reversing another does nothing: older releases run on newer tables.
    """

    reduces_to_sql = True

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """Do nothing: separate operations add the models."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Apply the missing versions."""
        if self.allow_migrate_model(
            schema_editor.connection.alias, to_state.apps.get_model(app_label, MODEL)
        ):
            create_tables(schema_editor, self.version)

    def database_backwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Drop the tables and all their rows when reversing the first version."""
        if self.version > 1:
            return
        connection = schema_editor.connection
        if self.allow_migrate_model(connection.alias, to_state.apps.get_model(app_label, MODEL)):
            _execute(schema_editor, drop(outbox_of(connection)), ALREADY_GONE)

    def describe(self) -> str:
        """Return the text for ``migrate --plan``."""
        return f"Create the tables of the outbox, version {self.version}"


def create_tables(schema_editor: Any, version: int = NEWEST) -> None:
    """Apply the versions up to ``version`` that the database has not recorded."""
    connection = schema_editor.connection
    outbox = outbox_of(connection)
    # ``sqlmigrate`` prints one version for each migration.
    recorded = version - 1 if schema_editor.collect_sql else recorded_version(connection)
    pending = [migration for migration in MIGRATIONS if (recorded or 0) < migration.number <= version]
    statements = [statement for migration in pending for statement in migration.statements(outbox)]
    # MySQL: without our table of migrations, which comes first, an existing table is not ours.
    _execute(schema_editor, statements, () if recorded is None else ALREADY_THERE)


def create_tables_without_migrations(sender: AppConfig, using: str, **kwargs: Any) -> None:
    """Create the tables if migrations are off, before Django does so without constraints and defaults."""
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
    """Return the highest recorded version or 0, or None if there is no table of migrations."""
    with connection.cursor() as cursor:
        if "outbox_migration" not in connection.introspection.table_names(cursor):
            return None
        cursor.execute(NEWEST_MIGRATION.format(migration="outbox_migration"))
        return cursor.fetchone()[0] or 0


def _execute(schema_editor: Any, statements: Iterable[str], passed_over: Container[int]) -> None:
    """Execute DDL. MySQL commits each statement, so a rerun skips what an interrupted one created."""
    resuming = schema_editor.connection.vendor == "mysql"
    for statement in statements:
        try:
            # With ``params=None``, a percent sign is not a placeholder.
            schema_editor.execute(statement, params=None)
        except DatabaseError as error:
            if not resuming or error.args[0] not in passed_over:
                raise


def check_tables(using: str) -> None:
    """Raise if the database is unreachable, or its tables are missing or too old."""
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
