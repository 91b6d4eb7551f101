"""What the commands about search indexes share: their options, and how their work is run and interrupted."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from relaybox.cli.options import Options

if TYPE_CHECKING:
    from relaybox.app import Outbox
    from relaybox.indexing.source import Source

T = TypeVar("T")

DestinationName: TypeAlias = Annotated[
    str, typer.Option("--destination", metavar="NAME", help="A destination that is a search index.")
]
SourceName: TypeAlias = Annotated[
    str,
    typer.Option(
        "--source", metavar="MODULE:NAME", help="A Source, select, QuerySet, iterable, or a function of one."
    ),
]
IndexName: TypeAlias = Annotated[
    str | None,
    typer.Option("--index", metavar="NAME", help="Which index, where the destination has several."),
]
Rate: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NUMBER[/s]", help="No more than so many documents a second.")
]


def open_outbox(given: Options) -> Outbox:
    """The outbox that the options lead to, with its tables."""
    from relaybox.cli.application import check_tables

    outbox = given.outbox()
    check_tables(outbox.settings, given)
    return outbox


def rate_of(text: str | None) -> float | None:
    """Documents a second, of ``500``, ``500/s``, ``600/m`` or ``10/h``."""
    from relaybox.setting import parse_rate

    if text is None:
        return None
    return parse_rate(f"{text}/s" if text.replace(".", "", 1).isdecimal() else text, "--rate")


def source_of(text: str) -> Source:
    """The source of that name."""
    from relaybox.indexing.source import load_source

    return load_source(text)


def interruptible(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Do the work; SIGINT and SIGTERM cancel it, so that it clears up, and the status is 1 then."""
    import asyncio
    import signal
    import threading

    from relaybox.cli.output import complain
    from relaybox.parts import run

    async def main() -> T:
        task = asyncio.current_task()
        assert task is not None
        loop = asyncio.get_running_loop()
        # Only the main thread can listen to signals.
        listens = threading.current_thread() is threading.main_thread()
        for number in (signal.SIGTERM, signal.SIGINT) if listens else ():
            loop.add_signal_handler(number, task.cancel)
        return await work()

    try:
        return run(main())
    except asyncio.CancelledError:
        complain("interrupted")
        raise
