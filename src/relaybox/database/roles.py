"""Generates SQL for roles with only the privileges they need, to review and run after migrating."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

import sqlalchemy as sa

from relaybox.core.values import identifier
from relaybox.database.migrations import DialectName, Outbox, quoted
from relaybox.database.schema import MYSQL, Tables

CHANGE = "SELECT, INSERT, UPDATE, DELETE"
NO_ROLES = "-- SQLite has no roles: any process that may write the file may do everything."

CREATE_ROLE = """DO $$ BEGIN
    CREATE ROLE {role} NOLOGIN;
EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL;
END $$"""


def grants(
    dialect_name: DialectName,
    *,
    schema: str | None = None,
    prefix: str = "",
    emitter: str = "relaybox_emitter",
    relay: str = "relaybox_relay",
    viewer: str = "relaybox_viewer",
) -> list[str]:
    """Return statements, safe to repeat, that create three roles.

    ``emitter`` only inserts events, ``relay`` delivers them and serves operators, ``viewer`` reads. Without a
    ``schema`` no USAGE is granted: everyone may use ``public``.
    """
    outbox = Outbox(dialect_name, schema, prefix)
    roles = {"emitter": emitter, "relay": relay, "viewer": viewer}
    names = [quoted(outbox, identifier(name, f"role {role}")) for role, name in roles.items()]
    if outbox.dialect == "sqlite":
        return [NO_ROLES]
    migration = outbox.tables().migration
    tables = [getattr(outbox.tables(), field.name) for field in fields(Tables)]
    create = "CREATE ROLE IF NOT EXISTS {role}" if outbox.dialect in MYSQL else CREATE_ROLE
    return [
        *(create.replace("{role}", name) for name in names),
        *_use_schema(outbox, names),
        *_emitter(outbox, names[0]),
        *(
            _grant(outbox, CHANGE if table is not migration else "SELECT", table, names[1])
            for table in tables
        ),
        *(_grant(outbox, "SELECT", table, names[2]) for table in tables),
    ]


def _use_schema(outbox: Outbox, roles: list[str]) -> list[str]:
    if outbox.schema is None or outbox.dialect in MYSQL:
        return []
    return [f"GRANT USAGE ON SCHEMA {quoted(outbox, outbox.schema)} TO {', '.join(roles)}"]


def _emitter(outbox: Outbox, role: str) -> Iterator[str]:
    tables = outbox.tables()
    yield _grant(outbox, "INSERT", tables.event, role)
    # MySQL has no DO NOTHING: a duplicate key sets event_id to itself. MariaDB then requires UPDATE on every
    # column that the INSERT names.
    update = ", UPDATE (event_type, idempotency_key, event_id)" if outbox.dialect in MYSQL else ""
    yield _grant(outbox, f"SELECT, INSERT{update}", tables.idempotency, role)
    yield _grant(outbox, "SELECT", tables.migration, role)


def _grant(outbox: Outbox, privileges: str, table: sa.Table, role: str) -> str:
    return f"GRANT {privileges} ON {quoted(outbox, table.schema, table.name)} TO {role}"
