"""The commands that every face of the command line has, whatever it is called there."""

from __future__ import annotations

import typer

from relaybox.cli.actions import discard, move, pause, replay, resume, retry, send_test
from relaybox.cli.backfill import EXIT_STATUS as BACKFILL_STATUS
from relaybox.cli.backfill import backfill
from relaybox.cli.config import check
from relaybox.cli.config import show as show_config
from relaybox.cli.debezium import debezium
from relaybox.cli.doctor import EXIT_STATUS as DOCTOR_STATUS
from relaybox.cli.doctor import doctor
from relaybox.cli.events import list_events, show, tail
from relaybox.cli.failures import audit, dead_letters, failures
from relaybox.cli.group import Group
from relaybox.cli.reconcile import EXIT_STATUS as RECONCILE_STATUS
from relaybox.cli.reconcile import reconcile
from relaybox.cli.reindex import EXIT_STATUS as REINDEX_STATUS
from relaybox.cli.reindex import reindex
from relaybox.cli.status import status
from relaybox.cli.top import top
from relaybox.cli.verify import EXIT_STATUS as VERIFY_STATUS
from relaybox.cli.verify import verify
from relaybox.cli.why import why

EXIT_STATUS = """Exit status: 0 done; 1 stopped half-way (interrupted, or the output was closed), or an ID
that is unknown or not in a state for it, or a fingerprint that is unknown, or verify found a difference or
nothing to compare, or doctor found an error; 2 wrong usage, a wrong setting, or the database refused: one
line on standard error says why."""


def make_app(group: type[Group], *, completion: bool) -> typer.Typer:
    """An empty command line. Its help is plain: at hand in half the time of rich, and without colours."""
    return typer.Typer(
        cls=group,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        add_completion=completion,
        epilog=EXIT_STATUS,
    )


def add_commands(app: typer.Typer) -> None:
    """Add what operators do."""
    config = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="Show or check the configuration.")
    config.command("show", epilog=EXIT_STATUS)(show_config)
    config.command("check", epilog=EXIT_STATUS)(check)
    app.add_typer(config, name="config")
    for command in (status, why, failures, retry, replay, discard, move, pause, resume, audit, debezium, top):
        app.command(epilog=EXIT_STATUS)(command)
    app.command("send-test", epilog=EXIT_STATUS)(send_test)
    app.command("dead-letters", epilog=EXIT_STATUS)(dead_letters)
    app.command(epilog=VERIFY_STATUS)(verify)
    app.command(epilog=DOCTOR_STATUS)(doctor)
    app.command(epilog=BACKFILL_STATUS)(backfill)
    app.command(epilog=RECONCILE_STATUS)(reconcile)
    app.command(epilog=REINDEX_STATUS)(reindex)
    events = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help="List, show or follow deliveries.")
    for name, look in (("list", list_events), ("show", show), ("tail", tail)):
        events.command(name, epilog=EXIT_STATUS)(look)
    app.add_typer(events, name="events")
