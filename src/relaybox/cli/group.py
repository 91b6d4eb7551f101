"""What all commands share: where global options may stand, and how an error is told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from relaybox.errors import RelayboxError


class Group(TyperGroup):
    """A group of commands that takes its global options anywhere and tells our errors in one line."""

    anywhere: tuple[str, ...] = ("--database", "--config", "--app")
    """Options of the group itself that may also be written after the command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with the global options moved to the front."""
        return super().parse_args(ctx, global_first(args, self.anywhere))

    def invoke(self, ctx: Any) -> Any:
        """Run the command; an error of ours is one line and the status 2."""
        try:
            with told_warnings():
                return super().invoke(ctx)
        except RelayboxError as error:
            self.fail(" ".join(str(error).split()))
        except Exception as error:
            explain(error, self.anywhere)
            raise

    def fail(self, message: str) -> NoReturn:
        """Tell an error of ours in one line; the status is 2."""
        typer.echo(f"relaybox: {message}", err=True)
        raise typer.Exit(2) from None


@contextmanager
def told_warnings() -> Iterator[None]:
    """Tell warnings about settings in one line, without the place in our code that they come from."""
    with warnings.catch_warnings():
        otherwise = warnings.showwarning

        def show(message: Any, category: type[Warning], *where: Any, **options: Any) -> None:
            from relaybox.config import ConfigWarning

            if issubclass(category, ConfigWarning):
                typer.echo(f"relaybox: warning: {message}", err=True)
            else:
                otherwise(message, category, *where, **options)

        warnings.showwarning = show
        yield


def explain(error: Any, anywhere: Sequence[str]) -> None:
    """Say of an option that a command does not know what it has to do with the global ones.

    The error is told by its attributes: its class is click's, or typer's own copy of that, by version.
    """
    if not (hasattr(error, "option_name") and hasattr(error, "possibilities")):
        return
    if error.option_name in anywhere:
        # With its value it would have been moved to the front.
        error.message = f"Option {error.option_name!r} requires an argument."
    else:
        import difflib

        close = difflib.get_close_matches(error.option_name, anywhere)
        error.possibilities = [*(error.possibilities or ()), *close]


def global_first(args: Sequence[str], anywhere: Sequence[str] = Group.anywhere) -> list[str]:
    """The same arguments with the global options and their values, as ``--database URL``, before all others.

    One without its value stays where it is: in front it would take the command for its value.
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
