"""The command ``relaybox``.

Nothing here imports a database: what a command needs, it imports when it runs, so that ``--help`` answers
at once.
"""

from __future__ import annotations

from typing import Annotated

import typer

from relaybox.cli.act import discard, move, pause, replay, resume, retry
from relaybox.cli.config import check
from relaybox.cli.config import show as show_config
from relaybox.cli.demo import demo
from relaybox.cli.drain import drain
from relaybox.cli.events import list_events, show, tail
from relaybox.cli.group import Group
from relaybox.cli.init import init
from relaybox.cli.migrate import migrate
from relaybox.cli.options import Options
from relaybox.cli.relay import relay
from relaybox.cli.sql import sql
from relaybox.cli.status import status
from relaybox.cli.why import why

EXIT_STATUS = """Exit status: 0 done; 1 stopped half-way (interrupted, or the output was closed), or an ID
that is unknown or not in a state for it; 2 wrong usage, a wrong setting, or the database refused: one line
on standard error says why."""

# Plain help, without rich: it is in the reader's hands in half the time, and has no colours to turn off.
app = typer.Typer(
    cls=Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    epilog=EXIT_STATUS,
)
app.command(epilog=EXIT_STATUS)(demo)
app.command(epilog=EXIT_STATUS)(migrate)
app.command(epilog=EXIT_STATUS)(sql)
for work in (init, relay, drain):
    app.command(epilog=EXIT_STATUS)(work)
config_commands = typer.Typer(
    rich_markup_mode=None, no_args_is_help=True, help="Show or check the configuration."
)
config_commands.command("show", epilog=EXIT_STATUS)(show_config)
config_commands.command("check", epilog=EXIT_STATUS)(check)
app.add_typer(config_commands, name="config")
app.command(epilog=EXIT_STATUS)(status)
app.command(epilog=EXIT_STATUS)(why)
for action in (retry, replay, discard, move, pause, resume):
    app.command(epilog=EXIT_STATUS)(action)
events = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="List, show or follow deliveries.")
for name, look in (("list", list_events), ("show", show), ("tail", tail)):
    events.command(name, epilog=EXIT_STATUS)(look)
app.add_typer(events, name="events")


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
            metavar="PATH",
            help="The configuration. Else RELAYBOX_CONFIG, else relaybox.toml or pyproject.toml here.",
        ),
    ] = None,
    application: Annotated[
        str | None,
        typer.Option(
            "--app",
            metavar="MODULE:NAME",
            help="Where the application's Outbox is; its settings and handlers count. Else the file's app.",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """A transactional outbox: events leave when their transaction commits.

    --database, --config and --app may stand before or after the command.
    """
    context.obj = Options(database, config, application)


def main() -> None:
    """Run the command."""
    app(prog_name="relaybox")
