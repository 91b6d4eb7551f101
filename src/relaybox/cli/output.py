"""How commands print and ask: tables, notes on standard error, JSON documents whose keys do not change."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer

from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.operate.admin import Audits, DeadLetters, DestinationStats, Detail, Failures, Stats
    from relaybox.operate.why import Reason
    from relaybox.stores.ledger import Counts, Entry, Page, Place

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


def ago(length: float) -> str:
    """Return seconds in their largest unit, such as ``5m``."""
    seconds = max(0, int(length))
    for size, unit in ((86_400, "d"), (3_600, "h"), (60, "m")):
        if seconds >= size:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


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


def stats_document(stats: Stats) -> dict[str, Any]:
    """Return the counts of every destination, and the relays, for ``--json``."""
    return {
        **_counts(stats.total),
        "destinations": [_destination(one) for one in stats.destinations],
        "relays": [asdict(relay) for relay in stats.relays],
    }


def page_document(page: Page) -> dict[str, Any]:
    """Return a page of deliveries."""
    return {"events": [entry_document(entry) for entry in page.entries], "cursor": page.cursor}


def entry_document(entry: Entry) -> dict[str, Any]:
    """Return a delivery."""
    return {**asdict(entry), "state": str(entry.state)}


def detail_document(detail: Detail) -> dict[str, Any]:
    """Return a delivery with its payload, headers and failed attempts."""
    content = detail.content
    document = entry_document(detail.entry)
    if content is not None:
        data = content.payload_data
        document |= {
            "payload": None if content.payload is None else _parsed(content.payload),
            "payload_data": None if data is None else base64.b64encode(data).decode(),
            "payload_encoding": content.payload_encoding,
            "headers": _parsed(content.headers),
        }
    return {**document, "failed_attempts": [asdict(attempt) for attempt in detail.attempts]}


def _parsed(text: str) -> Any:
    """Return the JSON value, or the text if it is not valid JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def reason_document(reason: Reason) -> dict[str, Any]:
    """Return why a delivery is where it is."""
    entry = reason.entry
    return {
        "id": entry.id,
        "event_id": entry.event_id,
        "destination": entry.destination,
        "state": str(entry.state),
        "why": reason.kind,
        "text": reason.text,
        "until": reason.until,
        "behind": None if reason.behind is None else reason_document(reason.behind),
    }


def failures_document(failures: Failures) -> dict[str, Any]:
    """Return failed deliveries, grouped by what went wrong."""
    return {
        "failures": [asdict(group) for group in failures.groups],
        "looked_at": failures.looked_at,
        "capped": failures.capped,
    }


def dead_letters_document(letters: DeadLetters) -> dict[str, Any]:
    """Return a page of dead letters."""
    rows = [{**entry_document(row.entry), "origin": row.origin, "reason": row.reason} for row in letters.rows]
    return {"dead_letters": rows, "cursor": letters.cursor}


def audits_document(audits: Audits) -> dict[str, Any]:
    """Return a page of what operators did."""
    return {"audits": [asdict(row) for row in audits.rows], "cursor": audits.cursor}


def _counts(counts: Counts) -> dict[str, Any]:
    """Return the counts; ``pending`` is all that waits, and ``capped`` names those that may be higher."""
    waiting = {"due": counts.due, "scheduled": counts.scheduled, "parked": counts.parked}
    capped = {{"delivered": "completed"}.get(name, name) for name in counts.capped}
    return {
        "pending": sum(waiting.values()),
        "processing": counts.sending,
        "completed": counts.delivered,
        "failed": counts.failed,
        **waiting,
        "oldest_pending": counts.oldest_pending,
        "oldest_pending_seconds": counts.oldest_seconds,
        "capped": sorted(capped | ({"pending"} if capped & waiting.keys() else set())),
    }


def _destination(one: DestinationStats) -> dict[str, Any]:
    about = {"name": one.name, "configured": one.configured, "handed_over": one.handed_over}
    return {**about, **_counts(one.counts), "retrying": one.counts.retrying, **_place(one.place)}


def _place(place: Place | None) -> dict[str, Any]:
    if place is None:
        return {"paused": None, "circuit": {"state": "closed", "until": None, "reason": None}}
    paused = {
        "at": place.paused_at,
        "until": place.paused_until,
        "by": place.paused_by,
        "reason": place.pause_reason,
    }
    circuit = {"state": place.circuit, "until": place.circuit_until, "reason": place.circuit_reason}
    return {"paused": paused if place.paused else None, "circuit": circuit}
