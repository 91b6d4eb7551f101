"""``relaybox reindex``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from relaybox.cli.options import (
    DOCUMENT_SOURCE,
    DocumentRate,
    IndexName,
    Json,
    SearchDestination,
    Yes,
    actor,
    options,
    parse_document_rate,
)
from relaybox.cli.output import complain, confirm, note, plain, print_json
from relaybox.core.values import parse_duration
from relaybox.errors import ConfigError, RelayboxError, UnknownDestination

if TYPE_CHECKING:
    from relaybox.outbox import Outbox
    from relaybox.search.results import Reindexed

T = TypeVar("T")

EXIT_STATUS = """Exit status: 0 the new index serves; 1 it does not, and the old one goes on serving: one line
on standard error says why; 2 wrong usage, a wrong setting, or the database refused."""


def reindex(
    context: typer.Context,
    destination: SearchDestination,
    source: Annotated[str | None, DOCUMENT_SOURCE] = None,
    index: IndexName = None,
    like: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An index whose settings the new one gets; else those of the old."),
    ] = None,
    rate: DocumentRate = None,
    batch: Annotated[int, typer.Option(min=1, help="Documents in one transaction.")] = 500,
    patience: Annotated[
        str, typer.Option(metavar="DURATION", help="Give up when nothing has arrived for so long.")
    ] = "10m",
    every: Annotated[
        str | None,
        typer.Option(metavar="DURATION", help="Do it again and again, so long after each beginning."),
    ] = None,
    abort: Annotated[
        bool, typer.Option("--abort", help="Only end the one that runs, and clear away what it leaves.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would be built, or with --abort cleared away.")
    ] = False,
    yes: Yes = False,
    as_json: Json = False,
) -> None:
    """Build a search index anew beside the one that serves, and let it take its place when it is complete.

    A relay has to run. Whatever fails, the old index goes on serving.
    """
    from relaybox.cli.application import open_outbox
    from relaybox.search._reindex import alook, areindex
    from relaybox.search.source import load_source

    outbox = open_outbox(options(context))
    if abort:
        _abort(outbox, destination, index, dry_run, as_json)
        return
    if source is None:
        raise ConfigError("--source: say where the documents are, such as --source shop.search:documents")
    documents = load_source(source)
    which: dict[str, Any] = {"index": index, "like": like}
    how: dict[str, Any] = {
        "rate": parse_document_rate(rate),
        "batch": batch,
        "patience": parse_duration(patience, "--patience"),
        "tell": _teller(as_json),
        "actor": actor(),
    }

    def look() -> tuple[str, int | None]:
        """Return the index and the number of its documents; fail as the real rebuild would."""
        return _run(lambda: alook(outbox, destination, documents, **which))

    def rebuild() -> Coroutine[Any, Any, Reindexed]:
        return areindex(outbox, destination, documents, **which, **how)

    if dry_run:
        _show_plan(destination, *look(), as_json)
    elif every is not None:
        pause = parse_duration(every, "--every")
        _run(lambda: _again(rebuild, pause, as_json))
    else:
        if not yes:
            name, number = look()
            confirm(f"rebuild the index {name} of {destination} from {_many(number)} documents?")
        _show(_run(rebuild), as_json)


def _run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do the work; a rebuild that fails ends the command with the status 1."""
    from relaybox.cli.signals import run_interruptible
    from relaybox.search.reindex_operation import ReindexFailed

    try:
        done = run_interruptible(work)
    except ReindexFailed as error:
        complain(" ".join(str(error).split()))
    return done


async def _again(rebuild: Callable[[], Coroutine[Any, Any, Reindexed]], pause: float, as_json: bool) -> None:
    """Rebuild again and again until interrupted; report a failure, and go on.

    A setting that is wrong from the beginning ends it.
    """
    import asyncio

    for turn in itertools.count():
        began = time.monotonic()
        try:
            _show(await rebuild(), as_json)
        except RelayboxError as error:
            if turn == 0 and isinstance(error, ConfigError | UnknownDestination):
                raise
            note(" ".join(str(error).split()))
        await asyncio.sleep(max(0.0, began + pause - time.monotonic()))


def _abort(outbox: Outbox, destination: str, index: str | None, dry_run: bool, as_json: bool) -> None:
    from relaybox.search._reindex import aabort

    how: dict[str, Any] = {"index": index, "dry_run": dry_run, "actor": actor(), "tell": _teller(as_json)}
    ended = _run(lambda: aabort(outbox, destination, **how))
    if as_json:
        print_json({"destination": destination, "ended": ended, "dry_run": dry_run})
    else:
        done = "would be ended" if dry_run else "ended, nothing is left of a build"
        typer.echo(f"{destination}: {ended} {done}")


def _show_plan(destination: str, index: str, documents: int | None, as_json: bool) -> None:
    if as_json:
        print_json({"destination": destination, "index": index, "documents": documents, "dry_run": True})
    else:
        typer.echo(f"would have rebuilt {index} from {_many(documents)} documents")


def _many(documents: int | None) -> str:
    return "an unknown number of" if documents is None else f"{documents:,}"


def _teller(as_json: bool) -> Any:
    """Return what prints the steps as they come; on standard error if the answer is JSON."""

    def tell(text: str) -> None:
        typer.echo(plain(text), err=as_json)

    return tell


def _show(done: Reindexed, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(done), "seconds": round(done.seconds, 3)})
    else:
        repaired = f", {done.repaired:,} of them repaired" if done.repaired else ""
        typer.echo(f"{done.index} serves {done.documents:,} documents{repaired}, after {done.seconds:.1f} s")
