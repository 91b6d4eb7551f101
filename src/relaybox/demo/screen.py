"""The demo's screen: live on a terminal, plain lines elsewhere, and tables at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from relaybox.demo.verdict import Verdict, milliseconds

PLAIN_WIDTH = 100
LINE_EVERY = 2.0
"""Seconds between two lines of progress without a terminal."""
NAME_WIDTH, BAR_WIDTH = 7, 20
STYLES = {"good": "green", "bad": "bold red", "waiting": "yellow"}


@dataclass(frozen=True, slots=True)
class PartState:
    """The current state of a part; ``mood`` is good, bad or waiting. ``arrived`` is a destination's."""

    name: str
    state: str
    mood: str
    arrived: int | None = None
    duplicates: int = 0


class Lines:
    """Plain lines, for logs and pipes."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._next = 0.0

    def say(self, elapsed: float, text: str, mood: str = "") -> None:
        """Print a line."""
        self._console.print(f"{elapsed:5.1f} s  {text}", markup=False, highlight=False, soft_wrap=True)

    def update(self, elapsed: float, doing: str, committed: int, parts: Sequence[PartState]) -> None:
        """Print a line of progress every ``LINE_EVERY`` seconds."""
        if elapsed < self._next:
            return
        self._next = elapsed + LINE_EVERY
        arrived = ", ".join(f"{part.name} {part.arrived}" for part in parts if part.arrived is not None)
        self.say(elapsed, f"    {committed} events committed; arrived: {arrived}")


class Dashboard:
    """A picture that is redrawn, for terminals."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._happened: list[Text] = []
        self._picture: RenderableType = ""

    def say(self, elapsed: float, text: str, mood: str = "") -> None:
        """Add a line below the picture."""
        self._happened.append(Text.assemble((f"{elapsed:5.1f} s  ", "dim"), (text, STYLES.get(mood, ""))))
        self._draw()

    def update(self, elapsed: float, doing: str, committed: int, parts: Sequence[PartState]) -> None:
        """Draw the picture."""
        title = Text.assemble(("relaybox demo", "bold"), f" · {doing} · {elapsed:.1f} s")
        lines = _lines([part for part in parts if part.arrived is None])
        picture = Group(lines, _bars([part for part in parts if part.arrived is not None], committed))
        self._picture = Panel(picture, title=title, title_align="left", padding=(0, 1))
        self._draw()

    def _draw(self) -> None:
        self._live.update(Group(self._picture, *self._happened), refresh=True)


Screen: TypeAlias = Lines | Dashboard


def make_console() -> Console:
    """Return standard output, with a fixed width if it is not a terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


@contextmanager
def open_screen(console: Console) -> Iterator[Screen]:
    """Yield the screen that fits the console."""
    if not console.is_terminal:
        yield Lines(console)
        return
    with Live(console=console, auto_refresh=False) as live:
        yield Dashboard(live)


def _lines(lines: Sequence[PartState]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=NAME_WIDTH, style="bold")
    for line in lines:
        grid.add_row(line.name, Text(line.state, STYLES[line.mood]))
    return grid


def _bars(bars: Sequence[PartState], committed: int) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(min_width=NAME_WIDTH, style="bold")
    grid.add_column()
    grid.add_column(justify="right")
    for bar in bars:
        arrived = bar.arrived or 0
        style = "red" if bar.mood == "bad" else "green" if arrived >= committed else "yellow"
        progress = ProgressBar(
            total=max(committed, 1),
            completed=arrived,
            width=BAR_WIDTH,
            complete_style=style,
            finished_style=style,
        )
        again = f"; {bar.duplicates} twice" if bar.duplicates else ""
        state = Text(bar.state + again, STYLES[bar.mood])
        grid.add_row(bar.name, progress, f"{arrived}/{committed}", state)
    return grid


def result_table(verdicts: Mapping[str, Verdict], total: Verdict) -> Table:
    """Return a table of what arrived at each destination."""
    table = _table("What arrived, compared with what the database holds")
    for name in ("committed", "delivered", "lost", "phantom", "out of\norder", "duplicates"):
        table.add_column(name, justify="right")
    for name, verdict in {**verdicts, "all": total}.items():
        faults = (verdict.lost, verdict.phantom, verdict.out_of_order)
        table.add_row(
            name,
            str(verdict.committed),
            str(verdict.delivered),
            *(Text(str(fault), style="bold red" if fault else "green") for fault in faults),
            str(verdict.duplicates),
            style="bold" if verdict is total else "",
        )
    return table


def latency_table(verdicts: Mapping[str, Verdict], total: Verdict) -> Table:
    """Return a table of latencies, inside and outside outages."""
    table = _table("Milliseconds from commit to acknowledgement")
    for name in ("p50", "p99", "outside\noutages", "\np50", "\np99", "in an\noutage", "\np50", "\np99"):
        table.add_column(name, justify="right")
    for name, verdict in {**verdicts, "all": total}.items():
        table.add_row(
            name,
            *_percentiles((*verdict.calm, *verdict.disturbed)),
            *(str(len(verdict.calm)), *_percentiles(verdict.calm)),
            *(str(len(verdict.disturbed)), *_percentiles(verdict.disturbed)),
            style="bold" if verdict is total else "",
        )
    return table


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.ROUNDED)
    table.add_column("destination")
    return table


def _percentiles(latencies: Sequence[float]) -> Iterator[str]:
    return (_number(milliseconds(latencies, part)) for part in (0.5, 0.99))


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
