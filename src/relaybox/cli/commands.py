"""Assemble the command line: commands, global options, and how errors are shown."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from relaybox.cli import actions, config, database, doctor, events, search, status, verify
from relaybox.core.settings import ConfigWarning
from relaybox.errors import RelayboxError

EXIT_STATUS = """Exit status: 0 done; 1 stopped half-way (interrupted, or the output was closed), or an ID
that is unknown or not in a state for it, or a fingerprint that is unknown, or verify found a difference or
nothing to compare, or doctor found an error; 2 wrong usage, a wrong setting, or the database refused: one
line on standard error says why."""


class Group(TyperGroup):
    """A group that takes global options anywhere and shows errors of Relaybox in one line."""

    anywhere: tuple[str, ...] = ("--database", "--config", "--app")
    """Global options that may also be written after the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Move the global options to the front, then parse."""
        return super().parse_args(ctx, global_first(args, self.anywhere))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error of Relaybox is shown in one line and exits with status 2."""
        try:
            with short_warnings():
                return super().invoke(ctx)
        except RelayboxError as error:
            self.fail(" ".join(str(error).split()))
        except Exception as error:
            explain(error, self.anywhere)
            raise

    def fail(self, message: str) -> NoReturn:
        """Show an error in one line and exit with status 2."""
        typer.echo(f"relaybox: {message}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def short_warnings() -> Iterator[None]:
    """Show warnings about settings in one line, without their place in the code."""
    with warnings.catch_warnings():
        otherwise = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            if issubclass(category, ConfigWarning):
                typer.echo(f"relaybox: warning: {message}", err=True)
            else:
                otherwise(message, category, *where, **options)

        warnings.showwarning = show
        yield


def explain(error: Any, anywhere: Sequence[str]) -> None:
    """Improve the message about an unknown option that is, or resembles, a global one."""
    # Its class is click's, or in some versions typer's copy: recognise it by its attributes.
    if not (hasattr(error, "option_name") and hasattr(error, "possibilities")):
        return
    if error.option_name in anywhere:
        # With a value, it would have been moved to the front.
        error.message = f"Option {error.option_name!r} requires an argument."
    else:
        close = difflib.get_close_matches(error.option_name, anywhere)
        error.possibilities = [*(error.possibilities or ()), *close]


def global_first(args: Sequence[str], anywhere: Sequence[str] = Group.anywhere) -> list[str]:
    """Return the arguments with the global options and their values first.

    An option without a value stays in place: at the front it would consume the command as its value.
    """
    first: list[str] = []
    others: list[str] = []
    rest = iter(args)
    for argument in rest:
        if argument == "--":
            others += [argument, *rest]
        elif argument in anywhere and (value := next(rest, None)) is not None:
            first += [argument, value]
        elif argument.startswith(tuple(f"{option}=" for option in anywhere)):
            first.append(argument)
        else:
            others.append(argument)
    return first + others


def make_app(group: type[Group], *, completion: bool) -> typer.Typer:
    """Return an empty command line. Its help does not use rich, which takes twice the time."""
    return typer.Typer(
        cls=group,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        add_completion=completion,
        epilog=EXIT_STATUS,
    )


def add_commands(app: typer.Typer) -> None:
    """Add the operator commands, which every command line has."""
    _add_group(app, "config", "Show or check the configuration.", show=config.show, check=config.check)
    _add_group(app, "secret", "Make secrets.", new=config.new_secret)
    for command in (
        *(status.status, events.why, events.failures),
        *(actions.retry, actions.replay, actions.discard, actions.move, actions.pause, actions.resume),
        *(actions.audit, database.debezium, status.top, actions.send_test, events.dead_letters),
    ):
        app.command(epilog=EXIT_STATUS)(command)
    app.command(epilog=verify.EXIT_STATUS)(verify.verify)
    app.command(epilog=doctor.EXIT_STATUS)(doctor.doctor)
    for command in (search.backfill, search.reconcile, search.reindex):
        app.command(epilog=search.EXIT_STATUS[command.__name__])(command)
    looks = {"list": events.list_events, "show": events.show, "tail": events.tail}
    _add_group(app, "events", "List, show or follow deliveries.", **looks)


def _add_group(app: typer.Typer, name: str, help: str, **commands: Callable[..., None]) -> None:
    group = typer.Typer(rich_markup_mode=None, no_args_is_help=True, help=help)
    for word, command in commands.items():
        group.command(word, epilog=EXIT_STATUS)(command)
    app.add_typer(group, name=name)
