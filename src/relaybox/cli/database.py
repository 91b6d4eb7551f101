"""``relaybox migrate``, ``sql`` and ``debezium``: set up the database, or print how."""

from __future__ import annotations

import json
from collections.abc import Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from relaybox.cli.options import Json, Prefix, Schema, flag, options
from relaybox.cli.output import print_json
from relaybox.core.values import mask_url

if TYPE_CHECKING:
    from relaybox.database.migrations import DialectName

DIALECT = """Else the configured database's. A MySQL URL may lead to MariaDB as well, so that server is
asked; --dialect avoids that."""

Dialect = StrEnum("Dialect", ("postgresql", "mysql", "mariadb", "sqlite"))
"""The databases that ``--dialect`` accepts."""


def migrate(
    context: typer.Context, schema: Schema = None, prefix: Prefix = None, as_json: Json = False
) -> None:
    """Create the tables, or bring them up to date. Safe to repeat, and to run in several places at once."""
    from relaybox.database import migrations

    given = options(context)
    settings = given.settings(schema=schema, prefix=prefix)
    applied = migrations.migrate(settings.database, schema=settings.schema, prefix=settings.prefix)
    version = migrations.current_version(settings.database, schema=settings.schema, prefix=settings.prefix)
    if as_json:
        database = mask_url(settings.database)
        print_json({"database": database, "applied": applied, "version": version}, compact=True)
        return
    where = given.shown_database(settings)
    for migration in migrations.MIGRATIONS:
        if migration.number in applied:
            typer.echo(f"{where}: applied {migration.number} ({migration.title})")
    if not applied:
        typer.echo(f"{where}: up to date (version {version})")


def sql(
    context: typer.Context,
    dialect: Annotated[Dialect | None, typer.Option(help=DIALECT)] = None,
    grants: Annotated[bool, flag("Print the roles instead.", "--grants")] = False,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Print the SQL that makes the tables, or the roles, for review and for psql, mariadb or sqlite3."""
    from relaybox.database.migrations import ddl, server_dialect
    from relaybox.database.roles import grants as roles

    settings = options(context).settings(schema=schema, prefix=prefix)
    name = cast("DialectName", dialect.value) if dialect else server_dialect(settings.database)
    place: dict[str, Any] = {"schema": settings.schema, "prefix": settings.prefix}
    handed_over = any(one.handed_over for one in settings.destinations)
    _print_sql(roles(name, **place, handed_over=handed_over) if grants else ddl(name, **place))


def debezium(
    context: typer.Context,
    destination: Annotated[
        str | None, typer.Argument(help="One whose sink is debezium:; may be left out where it is the only.")
    ] = None,
    sql: Annotated[
        bool, flag("Print the role, the publication and the slot it reads instead.", "--sql")
    ] = False,
) -> None:
    """Print the configuration of the Debezium connector that sends a destination's events, as JSON.

    Run the SQL of --sql before the first event: what is committed before the slot exists is not read.
    """
    from relaybox.database.debezium import connector, find, statements

    settings = options(context).settings()
    found = find(settings, destination)
    if sql:
        _print_sql(statements(settings, found))
    else:
        typer.echo(json.dumps(connector(settings, found), indent=2))


def _print_sql(statements: Iterable[str]) -> None:
    for statement in statements:
        typer.echo(statement if statement.startswith("--") else f"{statement};")
