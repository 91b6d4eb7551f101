"""The tables in Alembic's hands.

In a revision:

    from relaybox.contrib.alembic import downgrade as drop_outbox, upgrade as upgrade_outbox

    def upgrade() -> None:
        upgrade_outbox(op, version=1)

    def downgrade() -> None:
        drop_outbox(op)

In a later one, when a release says that it needs version 2; there is no way back, and none is needed:

    def upgrade() -> None:
        upgrade_outbox(op, version=2, after=1)

In ``env.py``, so that autogenerate leaves the tables to these revisions:

    context.configure(..., include_name=include_name, include_object=include_object)

Both filters take ``schema`` and ``prefix`` through ``functools.partial``.
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
    """Apply the versions up to ``version`` (all, if left out) that the database has not recorded.

    Offline (``alembic upgrade --sql``) there is no database to ask, and every version up to it is printed
    that comes ``after`` the one of the revisions before.
    """
    outbox, offline = _outbox(op, schema, prefix), op.get_context().as_sql
    applied = after if offline else _recorded(op, outbox)
    last = NEWEST if version is None else version
    pending = [migration for migration in MIGRATIONS if applied < migration.number <= last]
    statements = [statement for migration in pending for statement in migration.statements(outbox)]
    if statements and (offline or not sa.inspect(op.get_bind()).has_schema(schema)):
        statements = [*create_schema(outbox), *statements]
    _execute(op, statements)


def downgrade(op: Any, *, schema: str | None = None, prefix: str = "") -> None:
    """Drop the tables with everything in them: there is no way back from one version to the one before."""
    _execute(op, drop(_outbox(op, schema, prefix)))


def include_name(
    name: str | None,
    type_: str,
    parent_names: Mapping[str, str | None],
    *,
    schema: str | None = None,
    prefix: str = "",
) -> bool:
    """Alembic's filter of what it reads from the database: not our tables."""
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
    """Alembic's filter of what it compares: not our tables, in the database or in the metadata."""
    return type_ != "table" or not _ours(name, object_.schema, schema, prefix)


def _ours(name: str | None, found_in: str | None, schema: str | None, prefix: str) -> bool:
    metadata = sa.MetaData()
    make_tables(metadata, prefix=prefix)
    # SQLite's counter of positions is no table of the metadata.
    return found_in == schema and name in {*metadata.tables, f"{prefix}outbox_position"}


def _outbox(op: Any, schema: str | None, prefix: str) -> Outbox:
    # A dialect that an application registered under another name is none that the tables are made for.
    return Outbox(server(op.get_context().dialect), schema, prefix)  # type: ignore[arg-type]


def _recorded(op: Any, outbox: Outbox) -> int:
    table = outbox.tables().migration
    if not sa.inspect(op.get_bind()).has_table(table.name, schema=table.schema):
        return 0
    return op.get_bind().scalar(sa.select(sa.func.max(table.c.version))) or 0


def _execute(op: Any, statements: list[str]) -> None:
    for statement in statements:
        # A colon would begin a parameter.
        op.execute(sa.text(statement.replace(":", "\\:")))
