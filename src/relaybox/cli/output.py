"""How commands print and ask: tables, notes on standard error, JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

import typer

from relaybox.core.text import largest
from relaybox.errors import ConfigError

T = TypeVar("T")

NOBODY = "nobody is here to confirm this: add --yes, or --dry-run to see what it would do"


def confirm(question: str, otherwise: str = NOBODY) -> None:
    """Ask on a terminal; without one, raise ``otherwise``, which names ``--yes``."""
    if not sys.stdin.isatty():
        raise ConfigError(otherwise)
    if not typer.confirm(question):
        raise typer.Exit(1)


def complain(message: str) -> NoReturn:
    """Print one line on standard error, and end the command with the status 1."""
    note(message)
    raise typer.Exit(1)


def note(message: str) -> None:
    """Print one line on standard error."""
    typer.echo(plain(f"relaybox: {message}"), err=True)


def answer(found: T, as_json: bool, document: Callable[[T], Any], show: Callable[[T], None]) -> None:
    """Print what was found: its document as JSON, or as text for people."""
    if as_json:
        print_json(document(found))
    else:
        show(found)


def tell(as_json: bool, document: Any, text: str) -> None:
    """Print what was done: as JSON, or in one line for people."""
    if as_json:
        print_json(document)
    else:
        typer.echo(text)


def print_json(document: Any, *, compact: bool = False) -> None:
    """Print a document of dicts, lists, texts, numbers, ids and times."""
    typer.echo(json.dumps(document, ensure_ascii=False, indent=None if compact else 2, default=in_json))


def in_json(value: Any) -> str:
    """Return an id or a time as JSON has it."""
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)


def plain(text: object) -> str:
    """Replace what is not printable, so that the text moves no cursor and changes no colour."""
    return "".join(character if character.isprintable() else "�" for character in str(text))


def ago(seconds: float) -> str:
    """Return seconds in their largest unit, such as ``5m``."""
    count, unit = largest(seconds)
    return f"{count}{unit[0]}"


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], whole: Sequence[int]) -> None:
    """Print a table that fits the terminal; columns in ``whole`` are never cut.

    A file or a pipe gets everything.
    """
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


def print_page(
    headings: Sequence[str], rows: Sequence[Sequence[object]], whole: Sequence[int], cursor: object, none: str
) -> None:
    """Print a page as a table, or ``none`` if there is nothing, and how to see the next page."""
    if rows:
        print_table(headings, rows, whole)
    else:
        typer.echo(none if cursor is None else "nothing so far, but that was not all")
    if cursor is not None:
        typer.echo(f"more: --cursor {cursor}")
