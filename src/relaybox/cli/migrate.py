"""``relaybox migrate``."""

from __future__ import annotations

import typer

from relaybox.cli.options import Json, Prefix, Schema, options


def migrate(
    context: typer.Context, schema: Schema = None, prefix: Prefix = None, as_json: Json = False
) -> None:
    """Create the tables, or bring them up to date. Safe to repeat, and to run in several places at once."""
    import json

    from relaybox import migrations
    from relaybox.setting import mask_url

    given = options(context)
    settings = given.settings(schema=schema, prefix=prefix)
    applied = migrations.migrate(settings.database, schema=settings.schema, prefix=settings.prefix)
    version = migrations.current_version(settings.database, schema=settings.schema, prefix=settings.prefix)
    if as_json:
        database = mask_url(settings.database)
        typer.echo(json.dumps({"database": database, "applied": applied, "version": version}))
        return
    where = given.shown_database(settings)
    for migration in migrations.MIGRATIONS:
        if migration.number in applied:
            typer.echo(f"{where}: applied {migration.number} ({migration.title})")
    if not applied:
        typer.echo(f"{where}: up to date (version {version})")
