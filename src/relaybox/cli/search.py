"""``relaybox backfill``, ``reindex`` and ``reconcile``: fill, rebuild and check a search index."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from relaybox.cli.logs import configure
from relaybox.cli.options import Json, Yes, actor, flag, option, options
from relaybox.cli.output import complain, confirm, note, plain, print_json, tell
from relaybox.core.commands import command
from relaybox.core.values import parse_duration, parse_rate
from relaybox.errors import ConfigError, RelayboxError, UnknownDestination

if TYPE_CHECKING:
    from relaybox.outbox import Outbox
    from relaybox.search.results import Backfilled, Reconciled, Reindexed

T = TypeVar("T")

EXIT_STATUS = {
    "backfill": """\
Exit status: 0 all documents are emitted; 1 it was interrupted, and the same command goes on
from there, or some documents were refused, or with --dry-run would be; 2 wrong usage, a wrong setting,
another process is at it, or the database refused: one line on standard error says why.""",
    "reindex": """\
Exit status: 0 the new index serves; 1 it does not, and the old one goes on serving: one line
on standard error says why; 2 wrong usage, a wrong setting, or the database refused.""",
    "reconcile": """\
Exit status: 0 the index has what the database has; 1 something is missing, stale or orphaned
(also where --repair has emitted events for it), or nothing could be compared because all of it is under way,
or it was interrupted; 2 wrong usage, a wrong setting, a --repair that would empty the index, or the database
or the search engine refused: one line on standard error says why.""",
}

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

Destination: TypeAlias = Annotated[
    str, option("NAME", "A destination that is a search index.", "--destination")
]
Index: TypeAlias = Annotated[
    str | None, option("NAME", "Which index, where the destination has several.", "--index")
]
Rate: TypeAlias = Annotated[str | None, option("NUMBER[/s]", "No more than so many documents a second.")]
Batch: TypeAlias = Annotated[int, typer.Option(min=1, help="Documents in one transaction.")]
SOURCE: Any = typer.Option(
    "--source", metavar="MODULE:NAME", help="A Source, select, QuerySet, iterable, or a function of one."
)


def backfill(
    context: typer.Context,
    destination: Annotated[str, option("NAME", "Where the events go, and nowhere else.")],
    source: Annotated[str, option("MODULE:NAME", "A Source, a select, a QuerySet, an iterable.")],
    rate: Rate = None,
    batch: Batch = 500,
    max_pending: Annotated[
        int, typer.Option(min=0, help="Wait while more deliveries than that wait there; 0: never.")
    ] = 10_000,
    aggregate_type: Annotated[str | None, typer.Option(help="Instead of the source's.")] = None,
    event_type: Annotated[str | None, typer.Option(help="Instead of the source's.")] = None,
    dry_run: Annotated[bool, flag("Only count, and try the first page.", "--dry-run")] = False,
    restart: Annotated[bool, flag("Begin at the first document again.", "--restart")] = False,
    as_json: Json = False,
) -> None:
    """Emit an event of every document that there is, to one destination, beside the live ones.

    One that was interrupted goes on where it was: run the same command again. Documents that cannot be events
    are passed over and named, and the status is 1.
    """
    from relaybox.cli.application import check_tables
    from relaybox.cli.progress import backfill_progress
    from relaybox.cli.signals import stop_requested
    from relaybox.core.event_loop import run
    from relaybox.search._backfill import abackfill
    from relaybox.search.source import load_source

    given = options(context)
    how: dict[str, Any] = {"rate": _parse_rate(rate), "batch": batch, "max_pending": max_pending or None}
    outbox = given.outbox()
    types = {"aggregate_type": aggregate_type, "event_type": event_type}
    own_types: Any = {field: value for field, value in types.items() if value is not None}
    documents = replace(load_source(source), **own_types)
    check_tables(outbox.settings, given)
    configure()

    async def work() -> Backfilled:
        with stop_requested() as stop, backfill_progress() as progress:
            how.update(progress=progress, stop=stop, dry_run=dry_run, resume=not restart, actor=actor())
            return await abackfill(outbox, destination, documents, **how)

    done = run(work())
    if as_json:
        print_json(_backfilled_document(destination, source, done, dry_run))
    else:
        _show_backfilled(destination, done, dry_run)
    _note_refused(done)
    if done.stopped:
        complain(f"stopped after {_count(done)}; the same command goes on from there, --restart begins again")
    if done.refused:
        raise typer.Exit(1)


def _parse_rate(text: str | None) -> float | None:
    """Return documents a second, from ``500``, ``500/s``, ``600/m`` or ``10/h``."""
    if text is None:
        return None
    return parse_rate(f"{text}/s" if text.replace(".", "", 1).isdecimal() else text, "--rate")


def _count(done: Backfilled) -> str:
    total = f" of about {done.total:,}" if done.stopped and done.total is not None else ""
    return f"{done.done:,}{total} documents"


def _from(done: Backfilled) -> str:
    return f"after id {done.resumed_from}" if done.by_id else f"after the first {done.resumed_from:,}"


def _show_backfilled(destination: str, done: Backfilled, dry_run: bool) -> None:
    if not dry_run:
        skipped = f", skipped {done.skipped:,}" if done.skipped else ""
        resumed = "" if done.resumed_from is None else f" (went on {_from(done)})"
        typer.echo(f"emitted {_count(done)} to {destination}{skipped}{resumed}")
        return
    total = done.total or 0
    if done.resumed_from is None:
        typer.echo(f"would emit {total:,} documents to {destination}")
    else:
        rest = max(0, total - done.done - done.skipped)
        would = f"would emit {rest:,} of {total:,} documents to {destination}: goes on {_from(done)}"
        typer.echo(f"{would}, where one was interrupted; --restart begins again")
    if (call := done.example) is not None:
        typer.echo(plain(f"first: {call.event_type} of {call.aggregate_type} {call.aggregate_id}"))
        if (payload := _payload(done)) is not None:
            typer.echo(payload)


def _note_refused(done: Backfilled) -> None:
    for one in done.refused:
        what = "would be refused by the destination" if one.at_destination else "cannot be an event"
        note(f"the document {one.id} {what}: {one.reason}")
    if done.refusals > len(done.refused):
        note(f"and {done.refusals - len(done.refused):,} more")


def _payload(done: Backfilled) -> str | None:
    from relaybox.wire.codec import Limits, encode_payload

    assert done.example is not None
    first = done.example.aggregate_id
    if any(one.id == first and not one.at_destination for one in done.refused):
        return None
    return encode_payload(done.example.payload, Limits(max_bytes=1 << 40))[0] or ""


def _backfilled_document(destination: str, source: str, done: Backfilled, dry_run: bool) -> dict[str, Any]:
    call, first = done.example, None
    if call is not None:
        payload = _payload(done)
        first = {name: getattr(call, name) for name in ("event_type", "aggregate_type", "aggregate_id")}
        first["payload"] = None if payload is None else json.loads(payload)
    names = ("operation", "done", "skipped", "total", "resumed_from", "stopped")
    return {
        "destination": destination,
        "source": source,
        **{name: getattr(done, name) for name in names},
        "refused": [{"id": one.id, "reason": one.reason} for one in done.refused],
        "dry_run": dry_run,
        **({"first": first} if dry_run else {}),
    }


def reindex(
    context: typer.Context,
    destination: Destination,
    source: Annotated[str | None, SOURCE] = None,
    index: Index = None,
    like: Annotated[
        str | None, option("NAME", "An index whose settings the new one gets; else those of the old.")
    ] = None,
    rate: Rate = None,
    batch: Batch = 500,
    patience: Annotated[str, option("DURATION", "Give up when nothing has arrived for so long.")] = "10m",
    every: Annotated[
        str | None, option("DURATION", "Do it again and again, so long after each beginning.")
    ] = None,
    abort: Annotated[
        bool, flag("Only end the one that runs, and clear away what it leaves.", "--abort")
    ] = False,
    dry_run: Annotated[
        bool, flag("Only say what would be built, or with --abort cleared away.", "--dry-run")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Build a new search index beside the one that serves, and let it take its place when it is complete.

    A relay has to run. Whatever fails, the old index goes on serving.
    """
    from relaybox.cli.application import open_outbox
    from relaybox.search._reindex import alook, areindex
    from relaybox.search.source import load_source

    outbox = open_outbox(options(context))

    def say(text: str) -> None:
        typer.echo(plain(text), err=as_json)

    if abort:
        _abort(outbox, destination, as_json, index=index, dry_run=dry_run, actor=actor(), tell=say)
        return
    if source is None:
        raise ConfigError("--source: say where the documents are, such as --source shop.search:documents")
    documents = load_source(source)
    which: dict[str, Any] = {"index": index, "like": like}
    how: Any = {"rate": _parse_rate(rate), "batch": batch, "patience": parse_duration(patience, "--patience")}
    rebuild = partial(areindex, outbox, destination, documents, tell=say, actor=actor(), **which, **how)
    if every is not None and not dry_run:
        pause = parse_duration(every, "--every")
        _run(lambda: _again(rebuild, pause, as_json))
        return
    if dry_run or not yes:
        # Fails as the rebuild itself would, before the question.
        name, number = _run(lambda: alook(outbox, destination, documents, **which))
        many = "an unknown number of" if number is None else f"{number:,}"
        if dry_run:
            document = {"destination": destination, "index": name, "documents": number, "dry_run": True}
            tell(as_json, document, f"would have rebuilt {name} from {many} documents")
            return
        confirm(f"rebuild the index {name} of {destination} from {many} documents?")
    _show_reindexed(_run(rebuild), as_json)


def _run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run ``work``; exit with status 1 if the rebuild fails."""
    from relaybox.cli.signals import run_interruptible
    from relaybox.search.reindex_operation import ReindexFailed

    try:
        return run_interruptible(work)
    except ReindexFailed as error:
        complain(" ".join(str(error).split()))


async def _again(rebuild: Callable[[], Coroutine[Any, Any, Reindexed]], pause: float, as_json: bool) -> None:
    """Rebuild until interrupted; report failures and go on, except for a wrong setting in the first turn."""
    import asyncio

    for turn in itertools.count():
        began = time.monotonic()
        try:
            _show_reindexed(await rebuild(), as_json)
        except RelayboxError as error:
            if turn == 0 and isinstance(error, ConfigError | UnknownDestination):
                raise
            note(" ".join(str(error).split()))
        await asyncio.sleep(max(0.0, began + pause - time.monotonic()))


def _abort(outbox: Outbox, destination: str, as_json: bool, *, dry_run: bool, **how: Any) -> None:
    from relaybox.search._reindex import aabort

    ended = _run(lambda: aabort(outbox, destination, dry_run=dry_run, **how))
    done = "would be ended" if dry_run else "ended, nothing is left of a build"
    document = {"destination": destination, "ended": ended, "dry_run": dry_run}
    tell(as_json, document, f"{destination}: {ended} {done}")


def _show_reindexed(done: Reindexed, as_json: bool) -> None:
    repaired = f", {done.repaired:,} of them repaired" if done.repaired else ""
    text = f"{done.index} serves {done.documents:,} documents{repaired}, after {done.seconds:.1f} s"
    tell(as_json, {**asdict(done), "seconds": round(done.seconds, 3)}, text)


def reconcile(
    context: typer.Context,
    destination: Destination,
    source: Annotated[str, SOURCE],
    index: Index = None,
    repair: Annotated[
        bool, flag("Emit an event for each difference, through the outbox.", "--repair")
    ] = False,
    rate: Rate = None,
    dry_run: Annotated[bool, flag("With --repair: only say how many there are.", "--dry-run")] = False,
    yes: Annotated[
        bool, flag("Also where the source is empty: delete all of the index.", "--yes", "-y")
    ] = False,
    limit: Annotated[
        int, typer.Option("--limit-report", min=0, help="Show at most so many differences of each kind.")
    ] = 20,
    as_json: Json = False,
) -> None:
    """Compare a search index with the database, document by document.

    Documents whose events are under way are counted apart, and a difference counts only if a second look
    finds it too, so that it can run beside live traffic.
    """
    from relaybox.cli.application import open_outbox
    from relaybox.cli.progress import with_bar
    from relaybox.cli.signals import run_interruptible
    from relaybox.search._reconcile import areconcile
    from relaybox.search.source import load_source

    outbox = open_outbox(options(context))
    documents = load_source(source)
    how: dict[str, Any] = {"index": index, "repair": repair, "allow_empty": yes, "dry_run": dry_run}
    how |= {"rate": _parse_rate(rate), "examples": limit, "actor": actor()}
    compare = partial(areconcile, outbox, destination, documents, **how)
    result = run_interruptible(lambda: with_bar(None, "compare", lambda done: compare(progress=done)))
    if as_json:
        print_json({**result.figures(), "examples": [asdict(one) for one in result.examples]})
    else:
        _show_reconciled(result)
        if repair and dry_run and result.differences:
            typer.echo(f"would have emitted {result.differences - result.blocked:,} events")
    if result.differences or not result.compared:
        raise typer.Exit(1)


def _show_reconciled(result: Reconciled) -> None:
    figures = result.figures()
    for name, meaning in MEANINGS.items():
        if name in ALWAYS or figures[name]:
            typer.echo(f"{figures[name]:>12,} {name.replace('_', ' '):<10} {meaning}")
    for one in result.examples:
        parts = [f"{one.kind} {one.id}", ", ".join(one.fields) or None, one.refused]
        text = ": ".join(part for part in parts if part is not None)
        if one.failed is not None:
            text += f"; its event failed: see {command(f'why {one.failed}')}"
        typer.echo(plain(text))
    if result.blocked:
        # Name the id only if there is just one.
        failed = {one.failed for one in result.examples if one.blocked}
        why = command(f"why {failed.pop() if len(failed) == 1 else 'ID'}")
        typer.echo(f"{result.blocked:,} wait behind a failed event: {why}, then retry or discard it")
    if not result.compared:
        typer.echo("nothing could be compared: all that differs is under way; does a relay run?")
    typer.echo(f"{result.destination} consistency {result.consistency:.2f} %")
