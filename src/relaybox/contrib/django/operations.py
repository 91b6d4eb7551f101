"""The tables' way into a database through Django's migrations."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from django.apps import AppConfig
from django.db import NotSupportedError, connections, router
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.operations.base import Operation
from django.db.utils import DatabaseError

from relaybox.contrib.django.databases import dialect_of
from relaybox.errors import ConfigError
from relaybox.migrations import ALREADY_THERE, MIGRATIONS, NEWEST, Outbox, drop

ALREADY_GONE = {1051}
"""MySQL's error for a table that does not exist."""

MODEL = "OutboxEvent"
"""The model that routers are asked about: the tables go together."""


class CreateOutboxTables(Operation):  # type: ignore[misc]
    """Brings the tables to a version with the statements of ``relaybox migrate``.

    Backwards the first one drops the tables; the others leave them: the version before runs on them too.
    Where somebody ran ``relaybox migrate`` before, there is nothing left to do.
    """

    reduces_to_sql = True

    def __init__(self, version: int) -> None:
        self.version = version

    def state_forwards(self, app_label: str, state: Any) -> None:
        """The models stand in operations of their own."""

    def database_forwards(self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any) -> None:
        """Create what is not there."""
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
        """What ``migrate --plan`` says."""
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
    """Where the project has turned the app's migrations off, Django would make the tables of the models.

    They would lack the constraints, the defaults and the positions. It leaves alone what is there already.
    """
    if MigrationLoader.migrations_module(sender.label)[0] is not None:
        return
    if router.allow_migrate_model(using, sender.get_model(MODEL)):
        with connections[using].schema_editor() as schema_editor:
            create_tables(schema_editor)


def outbox_of(connection: Any) -> Outbox:
    """Which statements the connection's database understands."""
    try:
        return Outbox(dialect_of(connection).name)  # type: ignore[arg-type]
    except ConfigError as error:
        fix = "let a database router keep the app off it"
        raise NotSupportedError(f"{error}; {fix}") from None


def recorded_version(connection: Any) -> int | None:
    """The highest version recorded, 0 for none; ``None`` where there is no table of migrations."""
    with connection.cursor() as cursor:
        if "outbox_migration" not in connection.introspection.table_names(cursor):
            return None
        cursor.execute("SELECT max(version) FROM outbox_migration")
        return cursor.fetchone()[0] or 0


def _execute(schema_editor: Any, statements: Iterable[str], passed_over: Container[int]) -> None:
    """MySQL commits every DDL statement by itself: what was cut short is run again."""
    resuming = schema_editor.connection.vendor == "mysql"
    for statement in statements:
        try:
            # None: a percent sign is no placeholder.
            schema_editor.execute(statement, params=None)
        except DatabaseError as error:
            if not resuming or error.args[0] not in passed_over:
                raise
