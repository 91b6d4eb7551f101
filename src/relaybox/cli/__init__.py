"""The command ``relaybox``.

Nothing here imports a database: what a command needs, it imports when it runs, so that ``--help`` answers
at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from relaybox.cli.group import Group
from relaybox.cli.migrate import migrate
from relaybox.cli.options import Options
from relaybox.cli.sql import sql

EXIT_STATUS = """Exit status: 0 done; 1 stopped half-way (interrupted, or the output was closed);
2 wrong usage, a wrong setting, or the database refused: one line on standard error says why."""

# Plain help, without rich: it is in the reader's hands in half the time, and has no colours to turn off.
app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    epilog=EXIT_STATUS,
)
app.command(epilog=EXIT_STATUS)(migrate)
app.command(epilog=EXIT_STATUS)(sql)


def print_version(wanted: bool) -> None:
    """Answer ``--version``."""
    if wanted:
        from importlib.metadata import version

        typer.echo(f"relaybox {version('relaybox')}")
        raise typer.Exit


@app.callback()
def relaybox(
    context: typer.Context,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The database, env:NAME or file:PATH. Else RELAYBOX_DATABASE, else the file's, else "
            "DATABASE_URL, else sqlite:///relaybox.db.",
        ),
    ] = None,
    config: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="The configuration. Else relaybox.toml or pyproject.toml, where it is run."
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """A transactional outbox: events leave when their transaction commits.

    --database and --config may stand before or after the command.
    """
    context.obj = Options(database, config)


def main() -> None:
    """Run the command."""
    app(prog_name="relaybox")
