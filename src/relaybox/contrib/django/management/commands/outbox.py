"""``manage.py outbox``: everything that the command line of Relaybox does, on the project's outbox."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import Any

import typer
from django.core.management.base import BaseCommand, CommandError, CommandParser

from relaybox.contrib.django.cli import PROGRAM, app


class Command(BaseCommand):  # type: ignore[misc]
    """Hands the arguments on; ``call_command("outbox", "drain", "--json")`` does so from Python."""

    help = "Deliver and look after the events of the outbox."
    # Each command checks what it needs itself, and tells it in one line.
    requires_system_checks = ()

    def create_parser(self, prog_name: str, subcommand: str, **options: Any) -> CommandParser:
        """A parser that leaves ``--help`` to the command line itself."""
        return super().create_parser(prog_name, subcommand, add_help=False, **options)

    def add_arguments(self, parser: CommandParser) -> None:
        """Everything from the first word on is the command's."""
        parser.add_argument("-h", "--help", action="store_true", dest="wants_help")
        parser.add_argument("--using", metavar="ALIAS")
        parser.add_argument("arguments", nargs=argparse.REMAINDER)

    def print_help(self, prog_name: str, subcommand: str) -> None:
        """Answer ``manage.py help outbox``."""
        self.handle(arguments=["--help"])

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the command; from Python, what is not the status 0 raises ``CommandError``."""
        arguments = ["--help"] if options.get("wants_help") else without_djangos(options["arguments"])
        if (using := options.get("using")) is not None:
            arguments = ["--using", using, *arguments]
        if self._called_from_command_line:
            run(arguments)
        with ExitStack() as stack:
            stack.enter_context(redirect_stdout(options.get("stdout") or self.stdout._out))
            stack.enter_context(redirect_stderr(options.get("stderr") or self.stderr._out))
            stack.enter_context(logging_kept())
            try:
                run(arguments)
            except SystemExit as end:
                if end.code not in (None, 0):
                    told = f"outbox {' '.join(arguments)} ended with status {end.code}"
                    raise CommandError(told, returncode=end.code) from None


def run(arguments: list[str]) -> None:
    """Run the command line; it ends with ``SystemExit``, or with ``CommandError`` where it cannot go on."""
    # Not the Typer object itself, whose call takes over the process's excepthook.
    typer.main.get_command(app)(arguments, prog_name=PROGRAM)


def without_djangos(arguments: list[str]) -> list[str]:
    """The arguments without the options that every command of Django takes; they have been seen to."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for option in ("--settings", "--pythonpath", "--verbosity"):
        parser.add_argument(option)
    for flag in ("--traceback", "--no-color", "--force-color", "--skip-checks"):
        parser.add_argument(flag, action="store_true")
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return parser.parse_known_args(arguments[:end])[1] + arguments[end:]


@contextmanager
def logging_kept() -> Iterator[None]:
    """Leave the logging of the process that called as it was."""
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
