"""``relaybox debezium``."""

from __future__ import annotations

from typing import Annotated

import typer

from relaybox.cli.options import options


def debezium(
    context: typer.Context,
    destination: Annotated[
        str | None, typer.Argument(help="One whose sink is debezium:; may be left out where it is the only.")
    ] = None,
    sql: Annotated[
        bool, typer.Option("--sql", help="Print the role, the publication and the slot it reads instead.")
    ] = False,
) -> None:
    """Print the configuration of the Debezium connector that sends a destination's events, as JSON.

    Run the SQL of --sql before the first event: what is committed before the slot exists is not read.
    """
    import json

    from relaybox.debezium import connector, find, statements

    settings = options(context).settings()
    found = find(settings, destination)
    if not sql:
        typer.echo(json.dumps(connector(settings, found), indent=2))
        return
    for statement in statements(settings, found):
        typer.echo(statement if statement.startswith("--") else f"{statement};")
