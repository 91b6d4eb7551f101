"""``relaybox events``, ``why``, ``failures`` and ``dead-letters``."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, TypeAlias

import typer

from relaybox.cli.options import Cursor, Json, Limit, bundled, option, parse_id, run
from relaybox.cli.output import answer, complain, documents, plain, print_json, print_page, print_table
from relaybox.core.commands import command
from relaybox.core.text import age, at, binary

if TYPE_CHECKING:
    from uuid import UUID

    from relaybox.operate.admin import Admin, Detail, Failures
    from relaybox.stores.ledger import Entry, Filter, Page

INTERVAL = 1.0
"""Seconds between two queries for new events."""

AT_ONCE = 1_000
"""Most new events that one query can find."""

Id: TypeAlias = Annotated[str, typer.Argument(metavar="ID", help="Of an event, or of one of its deliveries.")]


@bundled
def list_events(
    context: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False, *, filter: Any
) -> None:
    """List deliveries, newest first."""
    start = None if cursor is None else parse_id(cursor)
    page = run(context, lambda admin: admin.events(filter, limit=limit, cursor=start))
    answer(page, as_json, lambda page: documents().events(page, page.cursor), _show_page)


def show(context: typer.Context, id_: Id, as_json: Json = False) -> None:
    """Show everything about an event: its deliveries, payload, headers and failed attempts."""
    wanted = parse_id(id_)
    details = run(context, lambda admin: admin.event(wanted)) or _unknown(wanted, as_json)
    if as_json:
        print_json(_with_binary(details))
    else:
        typer.echo("\n\n".join(_described(detail, shared=len(details) > 1) for detail in details))


@bundled
def tail(
    context: typer.Context,
    limit: Annotated[int | None, typer.Option(min=1, help="End after so many. Else Ctrl-C ends it.")] = None,
    as_json: Json = False,
    *,
    filter: Any,
) -> None:
    """Print new deliveries as they are committed, one a line."""

    def say(entry: Entry) -> None:
        if as_json:
            print_json(documents().made(documents().EventDocument, entry), compact=True)
        else:
            typer.echo(_line(entry))

    try:
        run(context, lambda admin: _follow(admin, filter, limit, say))
    except KeyboardInterrupt:
        raise typer.Exit(0) from None


def why(context: typer.Context, id_: Id, as_json: Json = False) -> None:
    """Say in one sentence where an event is, and why."""
    wanted = parse_id(id_)
    reasons = run(context, lambda admin: admin.why(wanted)) or _unknown(wanted, as_json)
    if as_json:
        print_json(documents().reasons(reasons))
        return
    for reason in reasons:
        entry = reason.entry
        where = f" for {entry.destination}" if entry.destination else ""
        typer.echo(plain(f"{entry.id} ({entry.event_type}{where}) {reason.text}."))


def failures(
    context: typer.Context,
    destination: Annotated[str | None, option("NAME", "Of this destination.")] = None,
    limit: Limit = 50,
    as_json: Json = False,
) -> None:
    """Show failed deliveries by what went wrong; `retry --fingerprint` and `discard` take one of them."""
    found = run(context, lambda admin: admin.failures(destination, limit=limit))
    answer(found, as_json, lambda found: documents().failures(found), _show_failures)


def dead_letters(
    context: typer.Context, limit: Limit = 50, cursor: Cursor = None, as_json: Json = False
) -> None:
    """List what destinations gave up and left to their dead-letter destination, newest first, with why."""
    start = None if cursor is None else parse_id(cursor)
    found = run(context, lambda admin: admin.dead_letters(limit, start))
    if as_json:
        print_json(documents().dead_letters(found, found.cursor))
        return
    rows = [
        [row.entry.id, at(row.entry.created_at), row.origin or "-", row.entry.event_type, row.reason or "-"]
        for row in found.rows
    ]
    headings = ["DELIVERY", "CREATED", "FROM", "TYPE", "REASON"]
    print_page(headings, rows, range(3), found.cursor, "no dead letter")


def _unknown(id_: UUID, as_json: bool) -> NoReturn:
    if as_json:
        print_json({"deliveries": []})
    complain(f"no event and no delivery has the id {id_}; it may have been pruned, or never committed")


def _with_binary(details: Sequence[Detail]) -> Any:
    """Return the document of the API, and with it the binary payloads, which the API hides."""
    from msgspec import to_builtins

    document = to_builtins(documents().deliveries(details), builtin_types=(datetime,))
    for shown, detail in zip(document["deliveries"], details, strict=True):
        if detail.content is not None and (data := detail.content.payload_data) is not None:
            shown["payload_data"] = base64.b64encode(data).decode()
    return document


async def _follow(admin: Admin, filter: Filter, limit: int | None, say: Callable[[Entry], None]) -> None:
    import asyncio

    page = await admin.events(filter, limit=AT_ONCE)
    typer.echo("following new events; Ctrl-C ends it", err=True)
    # Rows below a full page are old: they may move up into the page when others are pruned.
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
    headings = ["DELIVERY", "STATE", "AGE", "DESTINATION", "TYPE", "AGGREGATE"]
    rows = [
        [
            *(entry.id, entry.state, age((entry.seen_at - entry.created_at).total_seconds())),
            *(entry.destination, entry.event_type, f"{entry.aggregate_type} {entry.aggregate_id}"),
        ]
        for entry in page.entries
    ]
    print_page(headings, rows, range(3), page.cursor, "no delivery matches")
    if any(entry.status == "failed" for entry in page.entries):
        retry = command("retry DELIVERY --destination DESTINATION")
        typer.echo(f"one that failed: {retry}, or discard", err=True)


def _line(entry: Entry) -> str:
    aggregate = f"{entry.aggregate_type} {entry.aggregate_id}"
    what = f"{entry.event_type} ({aggregate}) for {entry.destination}: {entry.state}"
    return plain(f"{at(entry.created_at)} {entry.id} {what}")


def _described(detail: Detail, *, shared: bool) -> str:
    from relaybox.core.rollout import is_shadow
    from relaybox.operate.why import advice

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
        size = binary(content.payload_data, content.payload_encoding)
        lines += [("payload", size if content.payload is None else content.payload)]
        lines += [("headers", content.headers)]
    return "\n".join(f"{name:<13}{plain(value)}" for name, value in lines if value is not None)


def _show_failures(found: Failures) -> None:
    if not found.groups:
        typer.echo("no delivery has failed")
        return
    rows = [
        [one.fingerprint, f"{one.count:,}", one.destination, at(one.last_at), one.error_class, one.message]
        for one in found.groups
    ]
    print_table(["FINGERPRINT", "COUNT", "DESTINATION", "LAST", "CLASS", "MESSAGE"], rows, range(4))
    for group in found.groups:
        if group.message not in group.error:
            typer.echo(plain(f"{group.fingerprint}, delivery {group.example}: {group.error}"))
    if found.capped:
        typer.echo(f"of the newest {found.looked_at:,}; there may be more", err=True)
    typer.echo(f"one of them: {command('retry --fingerprint FINGERPRINT')}, or discard", err=True)
