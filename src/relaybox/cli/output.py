"""What the commands of operators share: the service behind them, and how they read, ask and answer."""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from relaybox.cli.options import options
from relaybox.errors import ConfigError
from relaybox.program import command

if TYPE_CHECKING:
    from datetime import datetime
    from uuid import UUID

    from relaybox.admin import Admin

T = TypeVar("T")

Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only say how many there are.")]


def run(context: typer.Context, work: Callable[[Admin], Awaitable[T]]) -> T:
    """Do the work with the service that the settings lead to."""
    return options(context).ask(actor(), work)


def actor() -> str:
    """Who is at the keyboard, for the audit."""
    import getpass
    import os
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:200]


def parse_id(text: str) -> UUID:
    """An id as it was typed."""
    from uuid import UUID

    try:
        return UUID(text)
    except ValueError:
        fix = f"write the UUID of an event or a delivery, as {command('events list')} prints it"
        raise ConfigError(f"{text!r} is no id: {fix}") from None


def parse_moment(text: str, setting: str, direction: int) -> datetime:
    """A time, or a duration from now: into the past with -1, into the future with 1."""
    from datetime import UTC, datetime, timedelta

    from relaybox.setting import parse_duration

    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    try:
        if moment is None:
            return datetime.now(UTC) + direction * timedelta(seconds=parse_duration(text, setting))
        return (moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)).astimezone(UTC)
    except (ConfigError, OverflowError):
        fix = "write a duration such as '30m', '1h' or '7d', or a time such as '2026-01-31T12:00:00Z'"
        raise ConfigError(f"{setting} = {text!r}: {fix}") from None


NOBODY = "nobody is here to confirm this: add --yes, or --dry-run to see what it would do"


def confirm(question: str, otherwise: str = NOBODY) -> None:
    """Ask on a terminal; without one, only ``--yes`` will do, and ``otherwise`` says so."""
    if not sys.stdin.isatty():
        raise ConfigError(otherwise)
    if not typer.confirm(question):
        raise typer.Exit(1)


def complain(message: str) -> None:
    """One line on standard error; the command ends with the status 1."""
    typer.echo(f"relaybox: {message}", err=True)
    raise typer.Exit(1)


def print_json(document: Any, *, compact: bool = False) -> None:
    """A document of dicts, lists, texts and numbers."""
    import json

    typer.echo(json.dumps(document, ensure_ascii=False, indent=None if compact else 2))


def plain(text: object) -> str:
    """Text that moves no cursor and changes no colour, whoever wrote it."""
    return "".join(character if character.isprintable() else "�" for character in str(text))


def ago(length: float) -> str:
    """So many seconds in their largest unit."""
    seconds = max(0, int(length))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], whole: Sequence[int]) -> None:
    """A table that fits the terminal; in a file or a pipe nothing is cut. Columns in ``whole`` never are."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=1_000)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, heading in enumerate(headings):
        table.add_column(heading, no_wrap=index in whole, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(plain(cell)) for cell in row))
    console.print(table)


def bulk(
    total: int | None, label: str, work: Callable[[Callable[[int], None]], Awaitable[T]]
) -> Awaitable[T]:
    """Do it with a bar that says how far it is, where there is a terminal to see it."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        return work(lambda count: None)
    return _with_bar(console, total, label, work)


async def _with_bar(
    console: Any, total: int | None, label: str, work: Callable[[Callable[[int], None]], Awaitable[T]]
) -> T:
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bars:
        task = bars.add_task(label, total=total)
        return await work(lambda count: bars.update(task, completed=count))
