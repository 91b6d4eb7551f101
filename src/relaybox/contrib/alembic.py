"""Create and migrate the outbox's tables from Alembic revisions.

    from relaybox.contrib.alembic import downgrade as drop_outbox, upgrade as upgrade_outbox

    def upgrade() -> None:
        upgrade_outbox(op, version=1)  # in a later revision: version=2, after=1; it needs no downgrade

    def downgrade() -> None:
        drop_outbox(op)

In ``env.py``, ``context.configure(..., include_name=include_name, include_object=include_object)`` makes
autogenerate ignore the tables. Pass ``schema`` and ``prefix`` to both filters with ``functools.partial``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from relaybox.database.migrations import MIGRATIONS, NEWEST, Outbox, create_schema, drop
from relaybox.database.schema import make_tables, server


def upgrade(
    op: Any, *, version: int | None = None, after: int = 0, schema: str | None = None, prefix: str = ""
) -> None:
    """Apply the unrecorded migrations up to ``version``; with ``--sql``, print those above ``after``."""
    outbox, offline = _outbox(op, schema, prefix), op.get_context().as_sql
    applied = after if offline else _recorded(op, outbox)
    last = NEWEST if version is None else version
    pending = [migration for migration in MIGRATIONS if applied < migration.number <= last]
    statements = [statement for migration in pending for statement in migration.statements(outbox)]
    if statements and (offline or not sa.inspect(op.get_bind()).has_schema(schema)):
        statements = [*create_schema(outbox), *statements]
    _execute(op, statements)


def downgrade(op: Any, *, schema: str | None = None, prefix: str = "") -> None:
    """Drop the tables and all their rows; there is no downgrade to an earlier version."""
    _execute(op, drop(_outbox(op, schema, prefix)))


def include_name(
    name: str | None,
    type_: str,
    parent_names: Mapping[str, str | None],
    *,
    schema: str | None = None,
    prefix: str = "",
) -> bool:
    """Return False for the outbox's tables, so that Alembic does not read them from the database."""
    return type_ != "table" or not _ours(name, parent_names.get("schema_name"), schema, prefix)


def include_object(
    object_: Any,
    name: str | None,
    type_: str,
    reflected: bool,
    compare_to: Any,
    *,
    schema: str | None = None,
    prefix: str = "",
) -> bool:
    """Return False for the outbox's tables, so that Alembic does not compare them."""
    return type_ != "table" or not _ours(name, object_.schema, schema, prefix)


def _ours(name: str | None, found_in: str | None, schema: str | None, prefix: str) -> bool:
    metadata = sa.MetaData()
    make_tables(metadata, prefix=prefix)
    # SQLite's position counter is not in the metadata.
    return found_in == schema and name in {*metadata.tables, f"{prefix}outbox_position"}


def _outbox(op: Any, schema: str | None, prefix: str) -> Outbox:
    # A dialect registered under another name is not supported.
    return Outbox(server(op.get_context().dialect), schema, prefix)  # type: ignore[arg-type]


def _recorded(op: Any, outbox: Outbox) -> int:
    table = outbox.tables().migration
    if not sa.inspect(op.get_bind()).has_table(table.name, schema=table.schema):
        return 0
    return op.get_bind().scalar(sa.select(sa.func.max(table.c.version))) or 0


def _execute(op: Any, statements: list[str]) -> None:
    for statement in statements:
        # ``text()`` reads a colon as the start of a parameter.
        op.execute(sa.text(statement.replace(":", "\\:")))
