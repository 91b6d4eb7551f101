"""The command ``relaybox``. Commands import what they need when they run, to keep ``--help`` fast."""

from __future__ import annotations

from typing import Annotated

import typer

from relaybox.cli.commands import EXIT_STATUS, Group, add_commands, make_app
from relaybox.cli.config import init
from relaybox.cli.database import migrate, sql
from relaybox.cli.options import Options, option
from relaybox.cli.relay import drain, prune, relay, web

GLOBAL_OPTIONS = "Every command also takes --app, --config and --database: see relaybox --help."


def demo(seconds: Annotated[float, option("N", "How long orders are placed.", min=4, max=600)] = 16) -> None:
    """Show it: orders, a receiver that goes down, a relay that is killed, and a comparison of what arrived.

    Needs the extra demo. Everything runs on this machine, on loopback and in temporary directories. The last
    line is JSON; the exit status is 1 if anything was lost, made up or out of order.
    """
    from relaybox.demo import run

    raise typer.Exit(run(seconds))


app = make_app(Group, completion=True)
for work in (demo, migrate, sql, init, relay, drain, prune, web):
    app.command(epilog=EXIT_STATUS)(work)
add_commands(app)
for part in (app, *(group.typer_instance for group in app.registered_groups)):
    for registered in part.registered_commands if part else ():
        registered.epilog = f"{registered.epilog}\n\n{GLOBAL_OPTIONS}"


def print_version(wanted: bool) -> None:
    """Print the version and exit, for ``--version``."""
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
        option("PATH", "The configuration. Else RELAYBOX_CONFIG, else relaybox.toml or pyproject.toml here."),
    ] = None,
    application: Annotated[
        str | None,
        option(
            "MODULE:NAME",
            "Where the application's Outbox is; its settings and handlers count. Else the file's app.",
            "--app",
        ),
    ] = None,
    version: Annotated[
        bool,
        typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and leave."),
    ] = False,
) -> None:
    """Run a transactional outbox: events leave when their transaction commits.

    --database, --config and --app may stand before or after the command.
    """
    context.obj = Options(database, config, application)


def main() -> None:
    """Run the command line; the entry point of the package."""
    app(prog_name="relaybox")
