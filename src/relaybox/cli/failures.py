"""``relaybox failures``, ``dead-letters`` and ``audit``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from relaybox.cli.options import Cursor, Json, Limit, parse_id, run
from relaybox.cli.output import (
    audits_document,
    dead_letters_document,
    failures_document,
    plain,
    print_json,
    print_table,
)
from relaybox.core.commands import command

if TYPE_CHECKING:
    from relaybox.operate.admin import Audits, DeadLetters, Failures


def failures(
    context: typer.Context,
    destination: Annotated[str | None, typer.Option(metavar="NAME", help="Of this destination.")] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Show failed deliveries by what went wrong; `retry --fingerprint` and `discard` take one of them."""
    found = run(context, lambda admin: admin.failures(destination, limit=limit))
    if as_json:
        print_json(failures_document(found))
    else:
        _show_failures(found)


def dead_letters(
    context: typer.Context,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List what destinations gave up and left to their dead-letter destination, newest first, with why."""
    start = None if cursor is None else parse_id(cursor)
    found = run(context, lambda admin: admin.dead_letters(limit, start))
    if as_json:
        print_json(dead_letters_document(found))
    else:
        _show_dead_letters(found)


def audit(
    context: typer.Context,
    limit: Limit = 50,
    cursor: Annotated[
        int | None, typer.Option(min=1, metavar="NUMBER", help="Go on where the last page ended.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List what operators did, newest first."""
    found = run(context, lambda admin: admin.audits(limit, cursor))
    if as_json:
        print_json(audits_document(found))
    else:
        _show_audits(found)


def _show_failures(found: Failures) -> None:
    from relaybox.operate.why import at

    if not found.groups:
        typer.echo("no delivery has failed")
        return
    rows = [
        [
            group.fingerprint,
            f"{group.count:,}",
            group.destination,
            at(group.last_at),
            group.error_class,
            group.message,
        ]
        for group in found.groups
    ]
    headings = ["FINGERPRINT", "COUNT", "DESTINATION", "LAST", "CLASS", "MESSAGE"]
    print_table(headings, rows, range(4))
    for group in found.groups:
        if group.message not in group.error:
            typer.echo(plain(f"{group.fingerprint}, delivery {group.example}: {group.error}"))
    if found.capped:
        typer.echo(f"of the newest {found.looked_at:,}; there may be more", err=True)
    typer.echo(f"one of them: {command('retry --fingerprint FINGERPRINT')}, or discard", err=True)


def _show_dead_letters(found: DeadLetters) -> None:
    from relaybox.operate.why import at

    if found.rows:
        rows = [
            [
                row.entry.id,
                at(row.entry.created_at),
                row.origin or "-",
                row.entry.event_type,
                row.reason or "-",
            ]
            for row in found.rows
        ]
        print_table(["DELIVERY", "CREATED", "FROM", "TYPE", "REASON"], rows, range(3))
    else:
        typer.echo("no dead letter" if found.cursor is None else "nothing so far, but that was not all")
    if found.cursor is not None:
        typer.echo(f"more: --cursor {found.cursor}")


def _show_audits(found: Audits) -> None:
    from relaybox.operate.why import at

    if found.rows:
        rows = [
            [
                row.id,
                at(row.at),
                row.actor,
                row.action,
                f"{row.affected:,}",
                json.dumps(row.details, ensure_ascii=False),
            ]
            for row in found.rows
        ]
        print_table(["ID", "AT", "WHO", "ACTION", "ROWS", "DETAILS"], rows, range(5))
    else:
        typer.echo("nobody has done anything")
    if found.cursor is not None:
        typer.echo(f"more: --cursor {found.cursor}")
