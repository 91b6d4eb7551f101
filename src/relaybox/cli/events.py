"""``relaybox events``, ``why``, ``failures`` and ``dead-letters``: what there is, and where it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaybox.cli.options import Cursor, Json, Limit, filtered, parse_id, run
from relaybox.cli.output import (
    ago,
    complain,
    dead_letters_document,
    detail_document,
    entry_document,
    failures_document,
    page_document,
    plain,
    print_json,
    print_table,
    reason_document,
)
from relaybox.core.commands import command

if TYPE_CHECKING:
    from uuid import UUID

    from relaybox.operate.admin import Admin, DeadLetters, Detail, Failures
    from relaybox.operate.why import Reason
    from relaybox.stores.ledger import Entry, Filter, Page

INTERVAL = 1.0
"""Seconds between two looks for new events."""

AT_ONCE = 1_000
"""How many new events one look can show."""


@filtered
def list_events(
    context: typer.Context,
    filter: Any,
    limit: Limit = 50,
    cursor: Cursor = None,
    as_json: Json = False,
) -> None:
    """List deliveries, newest first."""
    start = None if cursor is None else parse_id(cursor)
    page = run(context, lambda admin: admin.events(filter, limit=limit, cursor=start))
    if as_json:
        print_json(page_document(page))
    else:
        _show_page(page)


def show(
    context: typer.Context,
    id_: Annotated[str, typer.Argument(metavar="ID", help="Of an event, or of one of its deliveries.")],
    as_json: Json = False,
) -> None:
    """Show everything about an event: its deliveries, payload, headers and failed attempts."""
    wanted = parse_id(id_)
    details = run(context, lambda admin: admin.event(wanted))
    if as_json:
        print_json([detail_document(detail) for detail in details])
    if not details:
        complain(f"no event and no delivery has the id {wanted}; it may have been pruned, or never committed")
    if not as_json:
        for number, detail in enumerate(details):
            typer.echo(("\n" if number else "") + _described(detail, shared=len(details) > 1))


@filtered
def tail(
    context: typer.Context,
    filter: Any,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many. Else Ctrl-C ends it.")] = None,
    as_json: Json = False,
) -> None:
    """Print new deliveries as they are committed, one a line."""

    def say(entry: Entry) -> None:
        if as_json:
            print_json(entry_document(entry), compact=True)
        else:
            typer.echo(_line(entry))

    try:
        run(context, lambda admin: _follow(admin, filter, limit, say))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def why(
    context: typer.Context,
    id_: Annotated[str, typer.Argument(metavar="ID", help="Of an event, or of one of its deliveries.")],
    as_json: Json = False,
) -> None:
    """Say in one sentence where an event is, and why."""
    wanted = parse_id(id_)
    reasons = run(context, lambda admin: admin.why(wanted))
    if as_json:
        print_json([reason_document(reason) for reason in reasons])
    if not reasons:
        complain(f"no event and no delivery has the id {wanted}; it may have been pruned, or never committed")
    if not as_json:
        for reason in reasons:
            typer.echo(_sentence(reason))


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


async def _follow(admin: Admin, filter: Filter, limit: int | None, say: Callable[[Entry], None]) -> None:
    import asyncio

    page = await admin.events(filter, limit=AT_ONCE)
    typer.echo("following new events; Ctrl-C ends it", err=True)
    # What is older than a full page was there before, whatever was pruned from the page since.
    floor: UUID | None = None
    said = 0
    while True:
        seen = {entry.id for entry in page.entries}
        if len(page.entries) == AT_ONCE:
            floor = page.entries[-1].id
        await asyncio.sleep(INTERVAL)
        page = await admin.events(filter, limit=AT_ONCE)
        for entry in reversed(page.entries):
            if entry.id in seen or (floor is not None and entry.id <= floor):
                continue
            say(entry)
            said += 1
            if said == limit:
                return


def _show_page(page: Page) -> None:
    if page.entries:
        headings = ["DELIVERY", "STATE", "AGE", "DESTINATION", "TYPE", "AGGREGATE"]
        print_table(headings, [_cells(entry) for entry in page.entries], range(3))
        if any(entry.status == "failed" for entry in page.entries):
            retry = command("retry DELIVERY --destination DESTINATION")
            typer.echo(f"one that failed: {retry}, or discard", err=True)
    else:
        typer.echo("no such event" if page.cursor is None else "nothing so far, but that was not all")
    if page.cursor is not None:
        typer.echo(f"more: --cursor {page.cursor}")


def _cells(entry: Entry) -> list[object]:
    return [
        entry.id,
        entry.state,
        ago((entry.seen_at - entry.created_at).total_seconds()),
        entry.destination,
        entry.event_type,
        f"{entry.aggregate_type} {entry.aggregate_id}",
    ]


def _line(entry: Entry) -> str:
    from relaybox.operate.why import at

    moment = at(entry.created_at)
    aggregate = f"{entry.aggregate_type} {entry.aggregate_id}"
    what = f"{entry.event_type} ({aggregate}) for {entry.destination}: {entry.state}"
    return plain(f"{moment} {entry.id} {what}")


def _described(detail: Detail, *, shared: bool) -> str:
    from relaybox.core.shadow import is_shadow
    from relaybox.operate.why import advice, at

    entry, content = detail.entry, detail.content
    shadow = " in shadow: nothing was sent" if content is not None and is_shadow(content.headers) else ""
    lines = [
        ("delivery", entry.id),
        ("event", entry.event_id),
        ("type", entry.event_type),
        ("aggregate", f"{entry.aggregate_type} {entry.aggregate_id}"),
        ("destination", entry.destination or "(unrouted)"),
        ("state", entry.state),
        ("key", entry.ordering_key),
        ("position", entry.position),
        ("attempts", f"{entry.attempts} of {entry.max_attempts}"),
        ("crashes", entry.crashes or None),
        ("created", at(entry.created_at)),
        ("last attempt", entry.last_attempt_at and at(entry.last_attempt_at)),
        ("next attempt", entry.next_attempt_at and at(entry.next_attempt_at)),
        ("leased", entry.leased_until and f"by {entry.lease_owner} until {at(entry.leased_until)}"),
        ("delivered", entry.delivered_at and at(entry.delivered_at) + shadow),
        ("error", entry.error_message),
        ("what to do", advice(entry, shared=shared) if entry.status == "failed" else None),
        *((f"attempt {one.attempt}", f"{at(one.failed_at)}, {one.relay}: {one.error_message}")
          for one in detail.attempts),
    ]  # fmt: skip
    if content is not None:
        size = f"{len(content.payload_data or b''):,} bytes of {content.payload_encoding}"
        lines += [("payload", size if content.payload is None else content.payload)]
        lines += [("headers", content.headers)]
    return "\n".join(f"{name:<13}{plain(value)}" for name, value in lines if value is not None)


def _sentence(reason: Reason) -> str:
    entry = reason.entry
    where = f" for {entry.destination}" if entry.destination else ""
    return plain(f"{entry.id} ({entry.event_type}{where}) {reason.text}.")


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
