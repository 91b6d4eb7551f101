"""Print tables, JSON and notes on standard error, and ask for confirmation."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import typer

from relaybox.core.text import printable
from relaybox.errors import ConfigError

T = TypeVar("T")

NOBODY = "nobody is here to confirm this: add --yes, or --dry-run to see what it would do"


def confirm(question: str, otherwise: str = NOBODY) -> None:
    """Ask on a terminal; without one, raise ``ConfigError`` with the text ``otherwise``."""
    if not sys.stdin.isatty():
        raise ConfigError(otherwise)
    if not typer.confirm(question):
        raise typer.Exit(1)


def complain(message: str) -> NoReturn:
    """Print one line on standard error and exit with status 1."""
    note(message)
    raise typer.Exit(1)


def note(message: str) -> None:
    """Print one line on standard error."""
    typer.echo(plain(f"relaybox: {message}"), err=True)


def answer(found: T, as_json: bool, document: Callable[[T], Any], show: Callable[[T], None]) -> None:
    """Print a result: its document as JSON, or as text with ``show``."""
    if as_json:
        print_json(document(found))
    else:
        show(found)


def tell(as_json: bool, document: Any, text: str) -> None:
    """Print a result that is already made: the document as JSON, or the text."""
    if as_json:
        print_json(document)
    else:
        typer.echo(text)


def documents() -> Any:
    """Return the module that makes the documents of ``--json``; it is imported only when one is needed."""
    from relaybox.operate import documents

    return documents


def print_json(document: Any, *, compact: bool = False) -> None:
    """Print a document as JSON."""
    typer.echo(documents().to_json(document, ensure_ascii=False, indent=None if compact else 2))


def plain(text: object) -> str:
    """Replace unprintable characters, so that the text cannot control the terminal."""
    return printable(str(text), "�")


def print_table(headings: Sequence[str], rows: Sequence[Sequence[object]], whole: Sequence[int]) -> None:
    """Print a table that fits the terminal, or 1,000 columns elsewhere; columns in ``whole`` never wrap."""
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
    """Print a page as a table, or the text ``none`` if it is empty, and the cursor of the next page."""
    if rows:
        print_table(headings, rows, whole)
    else:
        typer.echo(none if cursor is None else "nothing so far, but that was not all")
    if cursor is not None:
        typer.echo(f"more: --cursor {cursor}")
