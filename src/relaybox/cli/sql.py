"""``relaybox sql``."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from relaybox.cli.options import Prefix, Schema, options

if TYPE_CHECKING:
    from relaybox.migrations import DialectName

DIALECT = """Else the configured database's. A MySQL URL may lead to MariaDB as well, so that server is
asked; --dialect avoids that."""


class Dialect(StrEnum):
    """The databases whose SQL can be printed."""

    postgresql = "postgresql"
    mysql = "mysql"
    mariadb = "mariadb"
    sqlite = "sqlite"


def sql(
    context: typer.Context,
    dialect: Annotated[Dialect | None, typer.Option(help=DIALECT)] = None,
    grants: Annotated[bool, typer.Option("--grants", help="Print the roles instead.")] = False,
    schema: Schema = None,
    prefix: Prefix = None,
) -> None:
    """Print the SQL that makes the tables, or the roles, for review and for psql, mariadb or sqlite3."""
    from relaybox.grants import grants as roles
    from relaybox.migrations import ddl, server_dialect

    settings = options(context).settings(schema=schema, prefix=prefix)
    name: DialectName = dialect.value if dialect else server_dialect(settings.database)
    for statement in (roles if grants else ddl)(name, schema=settings.schema, prefix=settings.prefix):
        typer.echo(statement if statement.startswith("--") else f"{statement};")
