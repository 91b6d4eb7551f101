"""``manage.py outbox``: Relaybox's command line, with an alias of ``DATABASES`` and ``OUTBOX``."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NoReturn, TypeVar

import typer
from django.conf import settings as django_settings
from django.core.management.base import BaseCommand, CommandError, CommandParser

from relaybox.cli.commands import EXIT_STATUS, Group, add_commands, make_app
from relaybox.cli.database import DIALECT, Dialect
from relaybox.cli.database import sql as print_sql
from relaybox.cli.options import Json, Options, options
from relaybox.cli.output import print_json
from relaybox.cli.relay import Patience, relay, run_drain, run_prune
from relaybox.cli.relay import drained_document as document
from relaybox.cli.relay import show_drained as show
from relaybox.cli.relay import show_removed as tell_removed
from relaybox.contrib.django.beat import register, unregister
from relaybox.contrib.django.conf import get_settings
from relaybox.contrib.django.databases import connection_of
from relaybox.contrib.django.outbox import ask, get_outbox
from relaybox.contrib.django.private import is_typed, stream_of
from relaybox.contrib.django.tables import check_tables
from relaybox.core.commands import Program
from relaybox.core.settings import Settings
from relaybox.errors import ConfigError, RelayboxError
from relaybox.operate.admin import Admin
from relaybox.operate.observers.count import Count
from relaybox.outbox import Outbox

if TYPE_CHECKING:
    from relaybox.cli.progress import DrainProgress

T = TypeVar("T")
PROGRAM = "manage.py outbox"


class ProjectGroup(Group):
    """The commands; their errors become Django's."""

    anywhere = ("--using",)

    def fail(self, message: str) -> NoReturn:
        """Raise ``CommandError``, as Django's commands do."""
        raise CommandError(message, returncode=2) from None


@dataclass(frozen=True, slots=True)
class ProjectOptions(Options):
    """Options that take the settings from the project."""

    database: str | None = None
    config: str | None = None
    using: str | None = None

    no_destinations: ClassVar[str] = (
        "no destinations are configured: add one to OUTBOX['DESTINATIONS'], or write a handler with "
        "@outbox_handler in an app's outbox_handlers.py"
    )
    no_server: ClassVar[str] = "start it, or fix settings.DATABASES"

    @property
    def alias(self) -> str:
        """Return the chosen alias, or the first one with an outbox."""
        return self.using or get_settings().DATABASES[0]

    def outbox(self) -> Outbox:
        """Return the project's outbox."""
        return get_outbox(self.alias)

    def settings(self, **flags: str | None) -> Settings:
        """Return the settings of the project's outbox; flags do not change them."""
        return self.outbox().settings

    def read(self) -> Settings:
        """Return default settings: a project has no file."""
        return Settings()

    def file(self) -> Path | None:
        """Return None: a project has no file."""
        return None

    def database_source(self) -> str | None:
        """Return None: the project's settings name the database."""
        return None

    def origin(self, settings: Settings) -> str:
        """Return where settings come from."""
        return "the project"

    def sources(self, outbox: Outbox) -> str:
        """Return what was read."""
        return f"OUTBOX in {django_settings.SETTINGS_MODULE}, database {self.alias!r}"

    def shown_database(self, settings: Settings) -> str:
        """Return the database by its alias."""
        return f"database {self.alias!r}"

    def ask(self, actor: str, work: Callable[[Admin], Awaitable[T]]) -> T:
        """Run the work with the admin service on Django's connection."""
        check_tables(self.alias)
        return ask(self.alias, actor, work, interruptibly=True)


app = make_app(ProjectGroup, completion=False)


@app.callback()
def outbox(
    context: typer.Context,
    using: Annotated[
        str | None,
        typer.Option(metavar="ALIAS", help="The database. Default: the first of OUTBOX['DATABASES']."),
    ] = None,
) -> None:
    """Deliver and manage the events of the outbox.

    --using may come before or after the command. Destinations, routes and handlers are those of the project.
    """
    context.obj = ProjectOptions(using=using)


def migrate() -> None:
    """Name the command that creates the tables: Django's own migrate."""
    raise ConfigError(f"Django creates the tables: run `{Program.migrate}`")


def sql(
    context: typer.Context,
    dialect: Annotated[Dialect | None, typer.Option(help=DIALECT)] = None,
    grants: Annotated[bool, typer.Option("--grants", help="Print the roles instead.")] = False,
) -> None:
    """Print the SQL that creates the tables, or the roles, for review and for psql, mariadb or sqlite3."""
    print_sql(context, dialect, grants)


def drain(context: typer.Context, patience: Patience = "30s", as_json: Json = False) -> None:
    """Deliver what is due now, then exit: the sweep, for cron.

    It sweeps the database of --using, else every one of OUTBOX['DATABASES']. Deliveries that wait without a
    reason are made due. Failed ones keep the time of their next attempt. Failures go to standard error.
    """
    drained: dict[str, DrainProgress] = {}
    wrong: dict[str, None] = {}
    for alias, given in _each(context):
        try:
            drained[alias] = _drain(given, patience)
        except RelayboxError as error:
            # Sweep the other databases anyway.
            wrong[str(error)] = None
            continue
        if drained[alias].interrupted:
            break
    if drained:
        _tell(drained, as_json)
    if wrong:
        raise ConfigError("; ".join(wrong))
    if any(one.interrupted for one in drained.values()):
        raise typer.Exit(1)


def _each(context: typer.Context) -> Iterator[tuple[str, ProjectOptions]]:
    given = options(context)
    assert isinstance(given, ProjectOptions)
    for alias in (given.using,) if given.using else get_settings().DATABASES:
        yield alias, replace(given, using=alias)


def _drain(given: ProjectOptions, patience: str) -> DrainProgress:
    if connection_of(given.alias).in_atomic_block:
        fix = "call it outside atomic(); in a TestCase, use relaybox.contrib.django.drain.drain()"
        raise ConfigError(
            f"database {given.alias!r} is in a transaction, and a relay would not see what it wrote: {fix}"
        )
    return run_drain(given, patience)


def _tell(drained: dict[str, DrainProgress], as_json: bool) -> None:
    if as_json:
        total = sum((one.total for one in drained.values()), Count())
        print_json({**asdict(total), "databases": {alias: document(one) for alias, one in drained.items()}})
        return
    for number, (alias, one) in enumerate(drained.items()):
        if len(drained) > 1:
            typer.echo(("\n" if number else "") + f"{alias}:")
        show(one)


def prune(context: typer.Context, as_json: Json = False) -> None:
    """Remove rows older than OUTBOX['RETENTION_HOURS'], for cron: only needed without Celery's beat.

    It prunes the database of --using, else every one of OUTBOX['DATABASES']. While a relay leads, the relay
    prunes, and this does nothing.
    """
    tell_removed({alias: run_prune(given) for alias, given in _each(context)}, as_json)


def schedule(
    remove: Annotated[bool, typer.Option("--remove", help="Remove the entries instead.")] = False,
) -> None:
    """Add the sweep and the clean-up to the schedule of django-celery-beat. Safe to repeat."""
    if remove:
        typer.echo(f"removed {unregister()}")
        return
    for name, every in register().items():
        typer.echo(f"{name}: every {every:g} s")


for command in (relay, drain, prune, schedule, migrate, sql):
    app.command(epilog=EXIT_STATUS)(command)
add_commands(app)


class Command(BaseCommand):  # type: ignore[misc]
    """The command; from Python, write ``call_command("outbox", "drain", "--json")``."""

    help = "Deliver and manage the events of the outbox."
    # Each command checks what it needs, and reports it in one line.
    requires_system_checks = ()

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        """Return a parser that leaves ``--help`` to the command line."""
        return super().create_parser(prog_name, subcommand, add_help=False, **options)

    def add_arguments(self, parser: CommandParser) -> None:
        """Pass everything after the first word to the command line."""
        parser.add_argument("-h", "--help", action="store_true", dest="wants_help")
        parser.add_argument("--using", metavar="ALIAS")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Answer ``manage.py help outbox``."""
        self.handle(arguments=["--help"])

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command. From Python, raise ``CommandError`` if its status is not 0."""
        arguments = ["--help"] if options.get("wants_help") else without_djangos(options["arguments"])
        if (using := options.get("using")) is not None:
            arguments = ["--using", using, *arguments]
        if is_typed(self):
            run(arguments)
        out = options.get("stdout") or stream_of(self.stdout)
        err = options.get("stderr") or stream_of(self.stderr)
        with redirect_stdout(out), redirect_stderr(err), logging_kept():
            try:
                run(arguments)
            except SystemExit as end:
                if end.code not in (None, 0):
                    text = f"outbox {' '.join(arguments)} ended with status {end.code}"
                    raise CommandError(text, returncode=end.code) from None


def run(arguments: list[str]) -> None:
    """Run the command line. Raise ``SystemExit`` at the end, or ``CommandError`` on failure."""
    # Calling the Typer object would replace the process's excepthook.
    typer.main.get_command(app)(arguments, prog_name=PROGRAM)


def without_djangos(arguments: list[str]) -> list[str]:
    """Remove the options that all Django commands take; Django has handled them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--settings", "--pythonpath", "--verbosity"):
        parser.add_argument(option)
    for flag in ("--traceback", "--no-color", "--force-color", "--skip-checks"):
        parser.add_argument(flag, action="store_true")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_known_args(arguments[:end])[1] + arguments[end:]


@contextmanager
def logging_kept() -> Iterator[None]:
    """Restore the caller's logging at the end of the block."""
    loggers = [logging.getLogger(name) for name in ("relaybox", "psycopg", None)]
    before = [(logger, list(logger.handlers), logger.propagate, logger.level) for logger in loggers]
    raises = logging.raiseExceptions
    try:
        yield
    finally:
        for logger, handlers, propagate, level in before:
            logger.handlers[:], logger.propagate = handlers, propagate
            logger.setLevel(level)
        logging.raiseExceptions = raises
