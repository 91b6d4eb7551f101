"""Show the progress of a command: a bar or a line on a terminal, else a line now and then."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from uuid import UUID

import typer
from rich.console import Console

from relaybox.operate.observers.count import Counter
from relaybox.stores.store import Settlement

if TYPE_CHECKING:
    from relaybox.search.results import Progress

T = TypeVar("T")

REDRAW_SECONDS = 0.1

LINE_SECONDS = 10.0

_CLEAR = "\r\x1b[K"


async def with_bar(total: int | None, label: str, work: Callable[[Callable[[int], None]], Awaitable[T]]) -> T:
    """Run ``work`` with a bar on a terminal; it calls its argument with the number done so far."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return await work(lambda count: None)
    from rich.progress import Progress as Bars

    with Bars(console=console, transient=True) as bars:
        task = bars.add_task(label, total=total)
        return await work(lambda count: bars.update(task, completed=count))


def reading_bar(stream: BinaryIO) -> Any:
    """Return a context manager of the stream that shows on a terminal how much is read."""
    from rich.progress import wrap_file

    console = Console(stderr=True)
    size = os.fstat(stream.fileno()).st_size if console.is_terminal else 0
    if not size:
        return nullcontext(stream)
    return wrap_file(stream, size, description="reading", console=console, transient=True)


class DrainProgress(Counter):
    """Count the deliveries of a drain by destination, and show the total on one line of a terminal."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self.names = names
        self.interrupted = False
        """True if a signal ended the drain."""
        self._shows = sys.stderr.isatty()
        self._shown = 0.0
        self._began = time.monotonic()

    def settled(self, destination: str, settlements: Sequence[Settlement], lost: frozenset[UUID]) -> None:
        """Count the settlements, and update the line."""
        super().settled(destination, settlements, lost)
        now = time.monotonic()
        if not self._shows or now - self._shown < REDRAW_SECONDS:
            return
        self._shown = now
        total = self.total
        rate = total.delivered / max(now - self._began, REDRAW_SECONDS)
        text = f"delivered {total.delivered:,} ({rate:,.0f}/s)"
        if total.retried or total.failed:
            text += f", retried {total.retried:,}, failed {total.failed:,}"
        typer.echo(f"{_CLEAR}{text}", nl=False, err=True)

    def stopped(self) -> None:
        """Clear the line."""
        self.make_room()

    def make_room(self, _: Any = None) -> bool:
        """Clear the line; return True, so that this works as a logging filter."""
        if self._shows:
            typer.echo(_CLEAR, nl=False, err=True)
        return True


@contextmanager
def backfill_progress() -> Iterator[Callable[[Progress], None]]:
    """Yield a callback that shows the progress of a backfill."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _backfill_lines()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("backfill", total=None)

        def update(progress: Progress) -> None:
            completed = progress.done + progress.skipped
            # The total was counted at the start; there may be more by now.
            total = None if progress.total is None else max(progress.total, completed)
            bars.update(task, completed=completed, total=total, description=_backfill_state(progress))

        yield update


def _backfill_lines() -> Callable[[Progress], None]:
    """Return a callback that writes a line every ``LINE_SECONDS``, and when the backfill starts to wait."""
    written_at, waited = time.monotonic(), False

    def write(progress: Progress) -> None:
        nonlocal written_at, waited
        now, waits = time.monotonic(), progress.waiting is not None
        if now - written_at < LINE_SECONDS and (waited or not waits):
            return
        written_at, waited = now, waits
        total = "" if progress.total is None else f" of about {progress.total:,}"
        typer.echo(f"{_backfill_state(progress)}: {progress.done + progress.skipped:,}{total}", err=True)

    return write


def _backfill_state(progress: Progress) -> str:
    if progress.waiting is None:
        return "backfill"
    return f"waits, {progress.waiting - 1:,} deliveries or more are pending: does a relay run?"
