"""Generates SQL for roles with only the privileges they need, to review and run after migrating."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields

import sqlalchemy as sa

from relaybox.core.values import identifier
from relaybox.database.migrations import DialectName, Outbox, quoted
from relaybox.database.schema import MYSQL, Tables
from relaybox.database.statements.delivery import FINAL, INSERTED

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
    consumer: str = "relaybox_consumer",
    handed_over: bool = False,
) -> list[str]:
    """Return statements, safe to repeat, that create four roles.

    ``emitter`` only inserts events, ``relay`` delivers them and serves operators, ``viewer`` reads,
    ``consumer`` uses the inbox. With ``handed_over``, the emitter may also write the final rows that Debezium
    reads. Without a ``schema`` no USAGE is granted: everyone may use ``public``.
    """
    outbox = Outbox(dialect_name, schema, prefix)
    roles = {"emitter": emitter, "relay": relay, "viewer": viewer, "consumer": consumer}
    names = [quoted(outbox, identifier(name, f"role {role}")) for role, name in roles.items()]
    if outbox.dialect == "sqlite":
        return [NO_ROLES]
    tables = outbox.tables()
    every = [getattr(tables, field.name) for field in fields(Tables)]
    create = "CREATE ROLE IF NOT EXISTS {role}" if outbox.dialect in MYSQL else CREATE_ROLE
    return [
        *(create.replace("{role}", name) for name in names),
        *_use_schema(outbox, names),
        *_earlier(outbox, tables, names),
        *_emitter(outbox, names[0], (*INSERTED, *FINAL) if handed_over else INSERTED),
        *(_grant(outbox, of_relay(tables, table), table, names[1]) for table in every),
        *(_grant(outbox, "SELECT", table, names[2]) for table in every),
        _consumer(outbox, names[3]),
    ]


def of_relay(tables: Tables, table: sa.Table) -> str:
    """Return the privileges of a relay: it does not migrate, and only adds to the audit."""
    return {tables.migration: "SELECT", tables.audit: "SELECT, INSERT"}.get(table, CHANGE)


def _earlier(outbox: Outbox, tables: Tables, roles: list[str]) -> list[str]:
    """Revoke what earlier releases granted; MariaDB and MySQL cannot revoke what may not be granted."""
    if outbox.dialect in MYSQL:
        return []
    audit, event = (quoted(outbox, table.schema, table.name) for table in (tables.audit, tables.event))
    return [f"REVOKE INSERT ON {event} FROM {roles[0]}", f"REVOKE UPDATE, DELETE ON {audit} FROM {roles[1]}"]


def _use_schema(outbox: Outbox, roles: list[str]) -> list[str]:
    if outbox.schema is None or outbox.dialect in MYSQL:
        return []
    return [f"GRANT USAGE ON SCHEMA {quoted(outbox, outbox.schema)} TO {', '.join(roles)}"]


def _consumer(outbox: Outbox, role: str) -> str:
    # To prune, a consumer locks rows, which needs UPDATE on one column. For MariaDB see ``_emitter``.
    update = "consumer, message_id" if outbox.dialect in MYSQL else "processed_at"
    rights = f"SELECT, INSERT (consumer, message_id), UPDATE ({update}), DELETE"
    return _grant(outbox, rights, outbox.tables().inbox, role)


def _emitter(outbox: Outbox, role: str, columns: Sequence[str]) -> Iterator[str]:
    tables = outbox.tables()
    yield _grant(outbox, f"INSERT ({', '.join(columns)})", tables.event, role)
    # MySQL has no DO NOTHING: a duplicate key sets event_id to itself. MariaDB then requires UPDATE on every
    # column that the INSERT names.
    update = ", UPDATE (event_type, idempotency_key, event_id)" if outbox.dialect in MYSQL else ""
    yield _grant(outbox, f"SELECT, INSERT{update}", tables.idempotency, role)
    yield _grant(outbox, "SELECT", tables.migration, role)


def _grant(outbox: Outbox, privileges: str, table: sa.Table, role: str) -> str:
    return f"GRANT {privileges} ON {quoted(outbox, table.schema, table.name)} TO {role}"
