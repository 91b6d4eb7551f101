"""Draw the screen of ``relaybox top``, and react to keys."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relaybox.cli.output import plain
from relaybox.cli.signals import on_signals
from relaybox.cli.status import oldest, shown_name
from relaybox.core.text import age, plural, short_lag
from relaybox.errors import RelayboxError
from relaybox.operate.admin import Admin, DestinationStats, Series, Stats
from relaybox.operate.documents import counted
from relaybox.operate.why import is_alive, is_leader, last_error
from relaybox.sinks.sink import describe
from relaybox.stores.ledger import Entry, Filter, Relay

HOURS = 0.5

FAILURES = 5
RELAYS = 5
DESTINATIONS = 50
"""How many of each are queried, and shown if there is room."""

PATIENCE = 10.0
"""Seconds for one refresh; after that the screen says that the database does not answer."""

UP, DOWN = "\x1b[A", "\x1b[B"
_ALSO = {"k": UP, "j": DOWN, "\x1bOA": UP, "\x1bOB": DOWN}

WAITING = ("due", "scheduled", "parked")
BARS = "▁▂▃▄▅▆▇█"
STYLES = {"ok": "", "retrying": "", "debezium": "", "paused": "yellow"}
"""Colours of destinations by state; any other state is red."""


class Frame(NamedTuple):
    """The data of one refresh."""

    at: datetime
    stats: Stats
    whole: Series
    rates: Mapping[str, Series]
    failures: Sequence[Entry]


@dataclass(slots=True)
class View:
    """What is on the screen: the last frame, and the operator's selection and question."""

    where: str
    frame: Frame | None = None
    trouble: str | None = None
    selected: str | None = None
    question: str | None = None
    notice: str | None = None
    keys: bool = False

    def destinations(self) -> Sequence[DestinationStats]:
        """Return the destinations to show, by name."""
        return () if self.frame is None else self.frame.stats.destinations[:DESTINATIONS]


async def collect(admin: Admin) -> Frame:
    """Query everything; the queries read only roll-ups and capped counts."""
    stats = await admin.stats()
    rates = {
        one.name: await admin.series(HOURS, one.name)
        for one in stats.destinations[:DESTINATIONS]
        if one.configured
    }
    page = await admin.events(Filter(status="failed"), limit=FAILURES)
    return Frame(datetime.now(UTC), stats, await admin.series(HOURS), rates, page.entries)


def draw(view: View, width: int, height: int | None) -> RenderableType:
    """Draw the screen; if ``height`` is None, show every row."""
    frame = view.frame
    at = "" if frame is None else f"{frame.at:%H:%M:%S} UTC  "
    parts: list[RenderableType] = [_line(f"relaybox top  {at}{view.where}", "bold", width)]
    if view.trouble is not None:
        parts.append(_line(f"no answer from the database: {view.trouble}; trying again", "bold red", width))
    if frame is None:
        parts.append(_line("waiting for the first answer …", "dim", width))
        return Group(*parts, _footer(view, width))
    parts += [_totals(frame, width), Text()]
    relays = list(_relays(frame.stats.relays, width))
    failures = list(_failures(frame, width))
    room = None if height is None else height - len(parts) - len(relays) - len(failures) - 4
    parts.append(_table(view, frame, width, room))
    parts += [Text(), *relays, *failures]
    if view.keys or view.question or view.notice:
        parts.append(_footer(view, width))
    return Group(*parts)


def _line(text: str, style: str, width: int) -> Text:
    line = Text(plain(text), style=style, no_wrap=True, overflow="ellipsis")
    line.truncate(width, overflow="ellipsis")
    return line


def _footer(view: View, width: int) -> Text:
    if view.question is not None:
        return _line(f"{view.question} y/n", "bold yellow", width)
    keys = "q quit   ↑ ↓ choose   p pause or resume"
    return _line(f"{view.notice}   {keys}" if view.notice else keys, "dim", width)


def _totals(frame: Frame, width: int) -> Text:
    total, points = frame.stats.total, frame.whole.points
    emitted = [point.emitted for point in points if point.emitted is not None]
    parts = [
        f"delivered {_rate(frame.whole, frame.at)}",
        f"emitted {emitted[-1]:,.1f}/s" if emitted else "",
        f"waiting {counted(total, *WAITING)}",
        f"sending {total.sending:,}",
        f"failed {counted(total, 'failed')}",
        f"oldest {oldest(total)}",
    ]
    text = "  ".join(part for part in parts if part)
    bars = spark([point.delivered for point in points])
    return _line(f"{text}  {bars}" if len(text) + len(bars) + 2 <= width else text, "", width)


def spark(values: Sequence[float]) -> str:
    """Return a sparkline, scaled to the highest value."""
    highest = max(values, default=0.0) or 1.0
    return "".join(BARS[round((len(BARS) - 1) * value / highest)] for value in values)


def _rate(series: Series | None, now: datetime) -> str:
    """Return deliveries a second over the last whole minute and the current one."""
    if series is None or len(series.points) < 2:
        return "-"
    over, going_on = series.points[-2:]
    whole = series.step.total_seconds()
    begun = min(max((now - going_on.at).total_seconds(), 1.0), whole)
    return f"{(over.delivered * whole + going_on.delivered * begun) / (whole + begun):,.1f}/s"


def _lag(series: Series | None) -> str:
    """Return p50 and p99 of the last minute that has deliveries."""
    for point in reversed(series.points if series else ()):
        if point.p50 is not None and point.p99 is not None:
            return f"{short_lag(point.p50)} / {short_lag(point.p99)}"
    return "-"


COLUMNS: dict[str, tuple[int, Callable[[DestinationStats, Series | None, datetime], str]]] = {
    "DESTINATION": (0, lambda one, *_: shown_name(one)),
    "STATE": (0, lambda one, *_: one.state),
    "WAITING": (0, lambda one, *_: counted(one.counts, *WAITING)),
    "SENDING": (70, lambda one, *_: f"{one.counts.sending:,}"),
    "FAILED": (40, lambda one, *_: counted(one.counts, "failed")),
    "RATE": (52, lambda _, series, now: _rate(series, now)),
    "OLDEST": (60, lambda one, *_: oldest(one.counts)),
    "LAG P50 / P99": (90, lambda _, series, now: _lag(series)),
    "LAST 30 MIN": (
        110,
        lambda _, series, now: spark([point.delivered for point in series.points] if series else []),
    ),
}
"""The columns: the least width of the terminal at which each is shown, and the text of its cells."""


def _table(view: View, frame: Frame, width: int, room: int | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", width=width)
    shown = {heading: cell for heading, (least, cell) in COLUMNS.items() if width >= least}
    for heading in shown:
        table.add_column(
            heading,
            no_wrap=True,
            overflow="ellipsis",
            justify="left" if heading in ("DESTINATION", "STATE", "LAST 30 MIN") else "right",
            ratio=1 if heading == "DESTINATION" else None,
        )
    rows = view.destinations()
    chosen = next((at for at, one in enumerate(rows) if one.name == view.selected), 0)
    for one in _window(rows, chosen, room):
        style = "reverse" if view.keys and one.name == view.selected else STYLES.get(one.state, "red")
        cells = (cell(one, frame.rates.get(one.name), frame.at) for cell in shown.values())
        table.add_row(*(Text(plain(cell)) for cell in cells), style=style)
    return table


def _window(rows: Sequence[DestinationStats], chosen: int, room: int | None) -> Sequence[DestinationStats]:
    """Return as many rows as fit, among them the chosen one."""
    if room is None or len(rows) <= room:
        return rows
    start = max(0, chosen - max(room, 1) + 1)
    return rows[start : start + max(room, 1)]


def _relays(relays: Sequence[Relay], width: int) -> Iterator[Text]:
    alive = [relay for relay in relays if is_alive(relay)]
    if not alive:
        yield _line("no relay runs", "bold red", width)
        return
    yield _line(plural(len(alive), "relay"), "bold", width)
    for relay in alive[:RELAYS]:
        up = age((relay.seen_at - relay.started_at).total_seconds())
        yield _line(
            f"  {relay.name}  {relay.version}  up {up}{'  leads' if is_leader(relay) else ''}", "", width
        )
    if len(alive) > RELAYS:
        yield _line(f"  and {len(alive) - RELAYS} more", "dim", width)


def _failures(frame: Frame, width: int) -> Iterator[Text]:
    if not frame.failures:
        return
    yield _line("newest failures", "bold", width)
    for entry in frame.failures:
        since = age((entry.seen_at - entry.updated_at).total_seconds())
        text = f"  {since:>4} {entry.destination}  {entry.event_type}  {last_error(entry)}"
        yield _line(text, "", width)


class LiveScreen:
    """Refresh the screen until the operator leaves."""

    def __init__(self, admin: Admin, where: str, console: Console, interval: float) -> None:
        self._admin = admin
        self._console = console
        self._interval = interval
        self._view = View(where)
        self._changed = asyncio.Event()
        self._left = False
        self._doing: asyncio.Task[None] | None = None
        """The operator's pause or resume; one at a time."""
        self._asked: tuple[str, bool] | None = None
        """The destination of the question, kept because the selection may change, and True to resume it."""

    async def run(self) -> None:
        """Run until q, the end of the terminal, SIGTERM or cancellation."""
        with ExitStack() as stack:
            self._view.keys = stack.enter_context(_keys(self._press))
            stack.enter_context(on_signals({signal.SIGTERM: self._leave, signal.SIGWINCH: self._changed.set}))
            live = stack.enter_context(Live(console=self._console, screen=True, auto_refresh=False))
            looking = asyncio.create_task(self._look())
            try:
                while not self._left:
                    live.update(draw(self._view, *self._console.size), refresh=True)
                    await self._changed.wait()
                    self._changed.clear()
            finally:
                running = [task for task in (looking, self._doing) if task is not None]
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)

    async def _look(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            begun = clock()
            try:
                async with asyncio.timeout(PATIENCE):
                    self._view.frame = await collect(self._admin)
                self._view.trouble = None
            except (RelayboxError, OSError, TimeoutError) as error:
                self._view.trouble = str(error) or f"none within {PATIENCE:g} s"
            self._choose(0)
            self._changed.set()
            await asyncio.sleep(max(0.0, self._interval - (clock() - begun)))

    def _leave(self) -> None:
        self._left = True
        self._changed.set()

    def _press(self, key: str) -> None:
        """Handle a key; an empty one is the end of the terminal."""
        key = _ALSO.get(key, key)
        if self._view.question is not None and key:
            if key in "yY" and self._asked is not None:
                self._doing = asyncio.create_task(self._pause_or_resume(*self._asked))
            self._view.question = self._asked = None
        elif key in ("q", "Q", ""):
            self._left = True
        elif key in (UP, DOWN):
            self._choose(-1 if key == UP else 1)
        elif key in ("p", "P"):
            self._ask()
        self._changed.set()

    def _choose(self, step: int) -> None:
        names = [one.name for one in self._view.destinations()]
        if not names:
            return
        chosen = self._view.selected
        at = names.index(chosen) if chosen in names else 0
        self._view.selected = names[min(max(at + step, 0), len(names) - 1)]

    def _ask(self) -> None:
        one = next((one for one in self._view.destinations() if one.name == self._view.selected), None)
        if one is None or (self._doing is not None and not self._doing.done()):
            return
        self._view.notice = None
        is_held = one.place is not None and (one.place.paused or one.place.circuit != "closed")
        self._asked = one.name, is_held
        self._view.question = f"{'resume' if is_held else 'pause'} {shown_name(one)}?"

    async def _pause_or_resume(self, name: str, resume: bool) -> None:
        try:
            if resume:
                await self._admin.resume(name)
                self._view.notice = f"resumed {name}"
            else:
                await self._admin.pause(name, "paused in relaybox top")
                self._view.notice = f"paused {name}"
            self._view.frame = await collect(self._admin)
        except (RelayboxError, OSError) as error:
            self._view.notice = describe(error)
        self._changed.set()


@contextmanager
def _keys(press: Callable[[str], None]) -> Iterator[bool]:
    """Call ``press`` with each key, without echo; yield True if there is a keyboard."""
    if not sys.stdin.isatty():
        yield False
        return
    import termios
    import tty

    keyboard = sys.stdin.fileno()
    before = termios.tcgetattr(keyboard)
    loop = asyncio.get_running_loop()

    def read() -> None:
        try:
            text = os.read(keyboard, 64).decode(errors="replace")
        except OSError:
            text = ""
        for key in _split(text):
            press(key)

    tty.setcbreak(keyboard)
    loop.add_reader(keyboard, read)
    try:
        yield True
    finally:
        loop.remove_reader(keyboard)
        # The terminal may be gone.
        with suppress(termios.error):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, before)


def _split(text: str) -> list[str]:
    """Split the text into keys; an arrow is three characters. An empty text is one empty key."""
    return re.findall(r"\x1b[\[O].?|.", text, re.DOTALL) or [""]
