"""``relaybox backfill``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaybox.cli.indexed import Rate, rate_of
from relaybox.cli.options import Json, Options, options

if TYPE_CHECKING:
    from relaybox.indexing.backfilled import Backfilled, Progress
    from relaybox.indexing.source import Source

EXIT_STATUS = """Exit status: 0 all documents are emitted; 1 it was interrupted, and the same command goes on
from there, or some documents were refused, or with --dry-run would be; 2 wrong usage, a wrong setting,
another process is at it, or the database refused: one line on standard error says why."""

EVERY = 10.0
"""Seconds between two lines that say how far it is, where there is no terminal."""


def backfill(
    context: typer.Context,
    destination: Annotated[str, typer.Option(metavar="NAME", help="Where the events go, and nowhere else.")],
    source: Annotated[
        str, typer.Option(metavar="MODULE:NAME", help="A Source, a select, a QuerySet, an iterable.")
    ],
    rate: Rate = None,
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
        "rate": rate_of(rate),
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
        from relaybox.cli.output import complain

        complain(f"stopped after {_count(done)}; the same command goes on from there, --restart begins anew")
    if done.refused:
        raise typer.Exit(1)


def _run(
    given: Options, destination: str, name: str, types: dict[str, str | None], how: dict[str, Any]
) -> Backfilled:
    from relaybox.cli import logs
    from relaybox.cli.application import check_tables
    from relaybox.cli.levels import LogFormat, LogLevel
    from relaybox.cli.output import actor
    from relaybox.indexing.backfill import abackfill
    from relaybox.parts import run

    outbox = given.outbox()
    source = _source(name, types)
    check_tables(outbox.settings, given)
    logs.configure(LogLevel.warning, LogFormat.text)

    async def work() -> Backfilled:
        with _signals() as stop, _shown() as progress:
            return await abackfill(
                outbox, destination, source, progress=progress, stop=stop, actor=actor(), **how
            )

    return run(work())


def _source(name: str, types: dict[str, str | None]) -> Source:
    from relaybox.indexing.source import load_source

    given = {field: value for field, value in types.items() if value is not None}
    return replace(load_source(name), **given)  # type: ignore[arg-type]


@contextmanager
def _signals() -> Iterator[Callable[[], bool]]:
    """Whether to stop: after the first SIGINT or SIGTERM. The second ends the process at once."""
    import asyncio
    import os
    import signal
    import threading

    asked: list[int] = []
    loop = asyncio.get_running_loop()

    def ask(number: signal.Signals) -> None:
        if asked:
            os._exit(128 + number)
        asked.append(number)

    # Only the main thread can listen to signals.
    listens = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGTERM, signal.SIGINT) if listens else ()
    for number in numbers:
        loop.add_signal_handler(number, ask, number)
    try:
        yield lambda: bool(asked)
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@contextmanager
def _shown() -> Iterator[Callable[[Progress], None]]:
    """How far it is: a bar on a terminal, else a line from time to time."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("backfill", total=None)

        def update(progress: Progress) -> None:
            completed = progress.done + progress.skipped
            # It was counted at the beginning; there may be more by now.
            total = None if progress.total is None else max(progress.total, completed)
            bars.update(task, completed=completed, total=total, description=_state(progress))

        yield update


class _Lines:
    """Writes a line when it waits, and from time to time."""

    def __init__(self) -> None:
        self._told_at = time.monotonic()
        self._waited = False

    def __call__(self, progress: Progress) -> None:
        waits = progress.waiting is not None
        now = time.monotonic()
        if now - self._told_at < EVERY and not (waits and not self._waited):
            return
        self._told_at, self._waited = now, waits
        total = "" if progress.total is None else f" of about {progress.total:,}"
        typer.echo(f"{_state(progress)}: {progress.done + progress.skipped:,}{total}", err=True)


def _state(progress: Progress) -> str:
    if progress.waiting is None:
        return "backfill"
    return f"waits, {progress.waiting - 1:,} deliveries or more are pending: does a relay run?"


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
        from relaybox.cli.output import plain

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
    from relaybox.cli.output import plain

    for one in done.refused:
        what = "would be refused by the destination" if one.at_destination else "cannot be an event"
        typer.echo(plain(f"relaybox: the document {one.id} {what}: {one.reason}"), err=True)
    if done.refusals > len(done.refused):
        typer.echo(f"relaybox: and {done.refusals - len(done.refused):,} more", err=True)


def _payload(done: Backfilled) -> str | None:
    """The first document as JSON, if it is any."""
    from relaybox.codec import Limits, encode_payload

    assert done.example is not None
    first = done.example.aggregate_id
    if any(one.id == first and not one.at_destination for one in done.refused):
        return None
    return encode_payload(done.example.payload, Limits(max_bytes=1 << 40))[0] or ""


def _print_document(destination: str, source: str, done: Backfilled, dry_run: bool) -> None:
    import json

    from relaybox.cli.output import print_json

    call = done.example
    example: dict[str, Any] | None = None
    if call is not None:
        text = _payload(done)
        payload = None if text is None else json.loads(text)
        example = {"event_type": call.event_type, "aggregate_type": call.aggregate_type}
        example |= {"aggregate_id": call.aggregate_id, "payload": payload}
    print_json(
        {
            "destination": destination,
            "source": source,
            "operation": None if done.operation is None else str(done.operation),
            "done": done.done,
            "skipped": done.skipped,
            "total": done.total,
            "resumed_from": done.resumed_from,
            "stopped": done.stopped,
            "refused": [{"id": one.id, "reason": one.reason} for one in done.refused],
            "dry_run": dry_run,
            **({"first": example} if dry_run else {}),
        }
    )
