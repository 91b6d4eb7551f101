"""``relaybox reconcile``."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaybox.cli.options import (
    DOCUMENT_SOURCE,
    DocumentRate,
    IndexName,
    Json,
    SearchDestination,
    actor,
    options,
    parse_document_rate,
)
from relaybox.cli.output import plain, print_json
from relaybox.core.commands import command

if TYPE_CHECKING:
    from relaybox.search.results import Difference, Reconciled

EXIT_STATUS = """Exit status: 0 the index has what the database has; 1 something is missing, stale or orphaned
(also where --repair has emitted events for it), or nothing could be compared because all of it is under way,
or it was interrupted; 2 wrong usage, a wrong setting, a --repair that would empty the index, or the database
or the search engine refused: one line on standard error says why."""

MEANINGS = {
    "documents": "in the database",
    "matched": "the same in the index",
    "missing": "not in the index",
    "stale": "in the index with other fields",
    "orphaned": "in the index, but not in the database",
    "in_flight": "different, but their events are under way",
    "blocked": "of those that differ, behind a failed event",
    "repaired": "emitted again",
}
ALWAYS = ("documents", "matched", "missing", "stale", "orphaned")


def reconcile(
    context: typer.Context,
    destination: SearchDestination,
    source: Annotated[str, DOCUMENT_SOURCE],
    index: IndexName = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Emit an event for each difference, through the outbox.")
    ] = False,
    rate: DocumentRate = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="With --repair: only say how many there are.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Also where the source is empty: delete all of the index.")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit-report", min=0, help="Show at most so many differences of each kind.")
    ] = 20,
    as_json: Json = False,
) -> None:
    """Compare a search index with the database, document by document.

    Documents whose events are under way are told apart, and no difference counts that is gone at a second
    look, so that it can run beside live traffic.
    """
    from relaybox.cli.application import open_outbox
    from relaybox.cli.progress import with_bar
    from relaybox.cli.signals import run_interruptible
    from relaybox.search._reconcile import areconcile
    from relaybox.search.source import load_source

    outbox = open_outbox(options(context))
    documents = load_source(source)

    how: dict[str, Any] = {
        "index": index,
        "repair": repair,
        "allow_empty": yes,
        "dry_run": dry_run,
        "rate": parse_document_rate(rate),
        "examples": limit,
        "actor": actor(),
    }

    def compare(progress: Callable[[int], None]) -> Awaitable[Reconciled]:
        return areconcile(outbox, destination, documents, progress=progress, **how)

    result = run_interruptible(lambda: with_bar(None, "compare", compare))
    if as_json:
        print_json(document(result))
    else:
        show(result)
        if repair and dry_run and result.differences:
            typer.echo(f"would have emitted {result.differences - result.blocked:,} events")
    if result.differences or not result.compared:
        raise typer.Exit(1)


def document(result: Reconciled) -> dict[str, Any]:
    """Return the result for ``--json``."""
    return {**result.figures(), "examples": [asdict(one) for one in result.examples]}


def show(result: Reconciled) -> None:
    """Print the result."""
    figures = result.figures()
    for name, meaning in MEANINGS.items():
        if name in ALWAYS or figures[name]:
            typer.echo(f"{figures[name]:>12,} {name.replace('_', ' '):<10} {meaning}")
    for one in result.examples:
        typer.echo(plain(_described(one)))
    if result.blocked:
        typer.echo(
            f"{result.blocked:,} wait behind a failed event: {_look_at(result)}, then retry or discard it"
        )
    if not result.compared:
        typer.echo("nothing could be compared: all that differs is under way; does a relay run?")
    typer.echo(f"{result.destination} consistency {result.consistency:.2f} %")


def _look_at(result: Reconciled) -> str:
    """Return the command that says why the event failed, with its id if only one is named."""
    known = {one.failed for one in result.examples if one.blocked}
    return command(f"why {known.pop() if len(known) == 1 else 'ID'}")


def _described(one: Difference) -> str:
    text = f"{one.kind} {one.id}"
    if one.fields:
        text += f": {', '.join(one.fields)}"
    if one.refused is not None:
        text += f": {one.refused}"
    if one.failed is not None:
        text += f"; its event failed: see {command(f'why {one.failed}')}"
    return text
