"""``relaybox backfill``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaybox.cli.options import (
    DocumentRate,
    Json,
    LogFormat,
    LogLevel,
    Options,
    actor,
    options,
    parse_document_rate,
)
from relaybox.cli.output import complain, note, plain, print_json

if TYPE_CHECKING:
    from relaybox.search.results import Backfilled

EXIT_STATUS = """Exit status: 0 all documents are emitted; 1 it was interrupted, and the same command goes on
from there, or some documents were refused, or with --dry-run would be; 2 wrong usage, a wrong setting,
another process is at it, or the database refused: one line on standard error says why."""


def backfill(
    context: typer.Context,
    destination: Annotated[str, typer.Option(metavar="NAME", help="Where the events go, and nowhere else.")],
    source: Annotated[
        str, typer.Option(metavar="MODULE:NAME", help="A Source, a select, a QuerySet, an iterable.")
    ],
    rate: DocumentRate = None,
    batch: Annotated[int, typer.Option(min=1, help="Documents in one transaction.")] = 500,
    max_pending: Annotated[
        int, typer.Option(min=0, help="Wait while more deliveries than that wait there; 0: never.")
    ] = 10_000,
    aggregate_type: Annotated[str | None, typer.Option(help="Instead of the source's.")] = None,
    event_type: Annotated[str | None, typer.Option(help="Instead of the source's.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count, and try the first page.")] = False,
    restart: Annotated[bool, typer.Option("--restart", help="Begin anew, not where one was left.")] = False,
    as_json: Json = False,
) -> None:
    """Emit an event of every document that there is, to one destination, beside the live ones.

    One that was interrupted goes on where it was: run the same command again. Documents that cannot be events
    are passed over and named, and the status is 1.
    """
    given = options(context)
    how: dict[str, Any] = {
        "rate": parse_document_rate(rate),
        "batch": batch,
        "max_pending": max_pending or None,
        "dry_run": dry_run,
        "resume": not restart,
    }
    done = _run(given, destination, source, {"aggregate_type": aggregate_type, "event_type": event_type}, how)
    if as_json:
        _print_document(destination, source, done, dry_run)
    else:
        _tell(destination, done, dry_run)
    _tell_refused(done)
    if done.stopped:
        complain(f"stopped after {_count(done)}; the same command goes on from there, --restart begins anew")
    if done.refused:
        raise typer.Exit(1)


def _run(
    given: Options, destination: str, name: str, types: dict[str, str | None], how: dict[str, Any]
) -> Backfilled:
    from relaybox.cli import logs
    from relaybox.cli.application import check_tables
    from relaybox.cli.progress import backfill_progress
    from relaybox.cli.signals import stop_requested
    from relaybox.core.event_loop import run
    from relaybox.search._backfill import abackfill
    from relaybox.search.source import load_source

    outbox = given.outbox()
    given_types: Any = {field: value for field, value in types.items() if value is not None}
    source = replace(load_source(name), **given_types)
    check_tables(outbox.settings, given)
    logs.configure(LogLevel.warning, LogFormat.text)

    async def work() -> Backfilled:
        with stop_requested() as stop, backfill_progress() as progress:
            return await abackfill(
                outbox, destination, source, progress=progress, stop=stop, actor=actor(), **how
            )

    return run(work())


def _count(done: Backfilled) -> str:
    total = f" of about {done.total:,}" if done.stopped and done.total is not None else ""
    return f"{done.done:,}{total} documents"


def _from(done: Backfilled) -> str:
    return f"after id {done.resumed_from}" if done.by_id else f"after the first {done.resumed_from:,}"


def _tell(destination: str, done: Backfilled, dry_run: bool) -> None:
    if not dry_run:
        skipped = f", skipped {done.skipped:,}" if done.skipped else ""
        resumed = "" if done.resumed_from is None else f" (went on {_from(done)})"
        typer.echo(f"emitted {_count(done)} to {destination}{skipped}{resumed}")
        return
    _tell_rest(destination, done)
    if done.example is not None:
        call = done.example
        typer.echo(plain(f"first: {call.event_type} of {call.aggregate_type} {call.aggregate_id}"))
        if (payload := _payload(done)) is not None:
            typer.echo(payload)


def _tell_rest(destination: str, done: Backfilled) -> None:
    total = done.total or 0
    if done.resumed_from is None:
        typer.echo(f"would emit {total:,} documents to {destination}")
        return
    rest = max(0, total - done.done - done.skipped)
    told = f"would emit {rest:,} of {total:,} documents to {destination}: goes on {_from(done)}"
    typer.echo(f"{told}, where one was interrupted; --restart begins anew")


def _tell_refused(done: Backfilled) -> None:
    for one in done.refused:
        what = "would be refused by the destination" if one.at_destination else "cannot be an event"
        note(f"the document {one.id} {what}: {one.reason}")
    if done.refusals > len(done.refused):
        note(f"and {done.refusals - len(done.refused):,} more")


def _payload(done: Backfilled) -> str | None:
    """Return the first document as JSON, or None if it was refused."""
    from relaybox.wire.codec import Limits, encode_payload

    assert done.example is not None
    first = done.example.aggregate_id
    if any(one.id == first and not one.at_destination for one in done.refused):
        return None
    return encode_payload(done.example.payload, Limits(max_bytes=1 << 40))[0] or ""


def _print_document(destination: str, source: str, done: Backfilled, dry_run: bool) -> None:
    call, first = done.example, None
    if call is not None:
        payload = _payload(done)
        first = {name: getattr(call, name) for name in ("event_type", "aggregate_type", "aggregate_id")}
        first["payload"] = None if payload is None else json.loads(payload)
    names = ("operation", "done", "skipped", "total", "resumed_from", "stopped")
    print_json(
        {
            "destination": destination,
            "source": source,
            **{name: getattr(done, name) for name in names},
            "refused": [{"id": one.id, "reason": one.reason} for one in done.refused],
            "dry_run": dry_run,
            **({"first": first} if dry_run else {}),
        }
    )
