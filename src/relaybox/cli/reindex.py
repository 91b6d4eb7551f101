"""``relaybox reindex``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

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
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.outbox import Outbox
    from relaybox.search.results import Reindexed
    from relaybox.search.source import Source

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
    from relaybox.cli.signals import run_interruptible
    from relaybox.core.values import parse_duration
    from relaybox.search.source import load_source

    outbox = open_outbox(options(context))
    if abort:
        _abort(outbox, destination, index, dry_run, as_json)
        return
    if source is None:
        raise ConfigError("--source: say where the documents are, such as --source shop.search:documents")
    documents = load_source(source)
    words: dict[str, Any] = {
        "index": index,
        "rate": parse_document_rate(rate),
        "batch": batch,
        "tell": _teller(as_json),
    }
    words |= {"patience": parse_duration(patience, "--patience"), "like": like, "actor": actor()}
    if dry_run:
        _dry_run(outbox, destination, documents, {"index": index, "like": like}, as_json)
        return
    if every is not None:
        pause = parse_duration(every, "--every")
        run_interruptible(lambda: _again(outbox, destination, documents, words, pause, as_json))
        return
    if not yes:
        name, many = _look(outbox, destination, documents, {"index": index, "like": like})
        confirm(f"rebuild the index {name} of {destination} from {_many(many)} documents?")
    _once(outbox, destination, documents, words, as_json)


def _once(outbox: Outbox, destination: str, source: Source, words: dict[str, Any], as_json: bool) -> None:
    from relaybox.cli.signals import run_interruptible
    from relaybox.search._reindex import areindex
    from relaybox.search.reindex_operation import ReindexFailed

    try:
        done = run_interruptible(lambda: areindex(outbox, destination, source, **words))
    except ReindexFailed as error:
        complain(plain(" ".join(str(error).split())))
    else:
        _show(done, as_json)


async def _again(
    outbox: Outbox,
    destination: str,
    source: Source,
    words: dict[str, Any],
    pause: float,
    as_json: bool,
) -> None:
    """Rebuild again and again until interrupted; report a failure, and go on.

    A setting that is wrong from the beginning ends it.
    """
    import asyncio
    import itertools
    import time

    from relaybox.errors import RelayboxError, UnknownDestination
    from relaybox.search._reindex import areindex

    for turn in itertools.count():
        began = time.monotonic()
        try:
            _show(await areindex(outbox, destination, source, **words), as_json)
        except RelayboxError as error:
            if turn == 0 and isinstance(error, ConfigError | UnknownDestination):
                raise
            note(" ".join(str(error).split()))
        await asyncio.sleep(max(0.0, began + pause - time.monotonic()))


def _abort(outbox: Outbox, destination: str, index: str | None, dry_run: bool, as_json: bool) -> None:
    from relaybox.cli.signals import run_interruptible
    from relaybox.search._reindex import aabort
    from relaybox.search.reindex_operation import ReindexFailed

    words: dict[str, Any] = {"index": index, "dry_run": dry_run, "actor": actor(), "tell": _teller(as_json)}
    try:
        ended = run_interruptible(lambda: aabort(outbox, destination, **words))
    except ReindexFailed as error:
        complain(plain(str(error)))
    else:
        if as_json:
            print_json({"destination": destination, "ended": ended, "dry_run": dry_run})
        elif dry_run:
            typer.echo(f"{destination}: {ended} would be ended")
        else:
            typer.echo(f"{destination}: {ended} ended, nothing is left of a build")


def _look(outbox: Outbox, destination: str, source: Source, words: dict[str, Any]) -> tuple[str, int | None]:
    """Return the index and the number of its documents; fail as the real rebuild would."""
    from relaybox.cli.signals import run_interruptible
    from relaybox.search._reindex import alook
    from relaybox.search.reindex_operation import ReindexFailed

    try:
        return run_interruptible(lambda: alook(outbox, destination, source, **words))
    except ReindexFailed as error:
        complain(plain(" ".join(str(error).split())))
        raise


def _many(documents: int | None) -> str:
    return "an unknown number of" if documents is None else f"{documents:,}"


def _dry_run(outbox: Outbox, destination: str, source: Source, words: dict[str, Any], as_json: bool) -> None:
    name, documents = _look(outbox, destination, source, words)
    if as_json:
        print_json({"destination": destination, "index": name, "documents": documents, "dry_run": True})
    else:
        typer.echo(f"would have rebuilt {name} from {_many(documents)} documents")


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
