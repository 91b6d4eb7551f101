"""The layout of ``relaybox top``: what a frame shows, and how it fits the columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from relaybox.cli.output import ago, plain
from relaybox.cli.status import number, oldest, shown_name, state
from relaybox.operate.admin import Admin, DestinationStats, Series, Stats
from relaybox.operate.why import is_alive
from relaybox.stores.ledger import Entry, Filter, Relay

HOURS = 0.5
"""How far back the rates go: a point for each minute of the last half hour."""

FAILURES = 5
RELAYS = 5
DESTINATIONS = 50
"""How many are asked about, and shown where there is room."""

WAITING = ("due", "scheduled", "parked")
BARS = "▁▂▃▄▅▆▇█"


class Frame(NamedTuple):
    """What the database said at one moment."""

    at: datetime
    stats: Stats
    whole: Series
    rates: Mapping[str, Series]
    failures: Sequence[Entry]


@dataclass(slots=True)
class View:
    """What is on the screen: the last frame, and what the operator is doing."""

    where: str
    frame: Frame | None = None
    trouble: str | None = None
    selected: str | None = None
    question: str | None = None
    notice: str | None = None
    keys: bool = False
    """True if there is a keyboard."""

    def destinations(self) -> Sequence[DestinationStats]:
        """Return those that are shown, by name."""
        return () if self.frame is None else self.frame.stats.destinations[:DESTINATIONS]


async def collect(admin: Admin) -> Frame:
    """Ask for everything; no question reads more than roll-ups and capped counts."""
    stats = await admin.stats()
    rates = {
        one.name: await admin.series(HOURS, one.name)
        for one in stats.destinations[:DESTINATIONS]
        if one.configured
    }
    page = await admin.events(Filter(status="failed"), limit=FAILURES)
    return Frame(datetime.now(UTC), stats, await admin.series(HOURS), rates, page.entries)


def draw(view: View, width: int, height: int | None) -> RenderableType:
    """Draw the whole screen; without a height, all of it."""
    parts: list[RenderableType] = [_header(view, width)]
    if view.trouble is not None:
        parts.append(_line(f"no answer from the database: {view.trouble}; trying again", "bold red", width))
    frame = view.frame
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


def _header(view: View, width: int) -> Text:
    at = "" if view.frame is None else f"{view.frame.at:%H:%M:%S} UTC  "
    return _line(f"relaybox top  {at}{view.where}", "bold", width)


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
        f"waiting {number(total, *WAITING)}",
        f"sending {total.sending:,}",
        f"failed {number(total, 'failed')}",
        f"oldest {oldest(total)}",
    ]
    text = "  ".join(part for part in parts if part)
    bars = spark([point.delivered for point in points])
    return _line(f"{text}  {bars}" if len(text) + len(bars) + 2 <= width else text, "", width)


def spark(values: Sequence[float]) -> str:
    """Return bars of the values, the highest as high as a line."""
    highest = max(values, default=0.0)
    if not highest:
        return BARS[0] * len(values)
    last = len(BARS) - 1
    return "".join(BARS[round(last * value / highest)] for value in values)


def _rate(series: Series | None, now: datetime) -> str:
    """Return deliveries a second since the beginning of the last whole minute."""
    if series is None or len(series.points) < 2:
        return "-"
    over, going_on = series.points[-2:]
    whole = series.step.total_seconds()
    begun = min(max((now - going_on.at).total_seconds(), 1.0), whole)
    return f"{(over.delivered * whole + going_on.delivered * begun) / (whole + begun):,.1f}/s"


def _lag(series: Series | None) -> str:
    """Return p50 and p99 of the last minute in which something was delivered."""
    for point in reversed(series.points if series else ()):
        if point.p50 is not None and point.p99 is not None:
            return f"{_span(point.p50)} / {_span(point.p99)}"
    return "-"


def _span(seconds: float) -> str:
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms"
    return f"{seconds:.1f}s" if seconds < 60 else ago(seconds)


COLUMNS = {
    "DESTINATION": 0,
    "STATE": 0,
    "WAITING": 0,
    "SENDING": 70,
    "FAILED": 40,
    "RATE": 52,
    "OLDEST": 60,
    "LAG P50 / P99": 90,
    "LAST 30 MIN": 110,
}
"""The columns, and how wide the terminal must be for each to be shown."""


def _table(view: View, frame: Frame, width: int, room: int | None) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", width=width)
    shown = [heading for heading, least in COLUMNS.items() if width >= least]
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
        cells = dict(zip(COLUMNS, _cells(one, frame), strict=True))
        style = "reverse" if view.keys and one.name == view.selected else _style(one)
        table.add_row(*(Text(plain(cells[heading])) for heading in shown), style=style)
    return table


def _window(rows: Sequence[DestinationStats], chosen: int, room: int | None) -> Sequence[DestinationStats]:
    """Return as many as there is room for, with the chosen one."""
    if room is None or len(rows) <= room:
        return rows
    start = max(0, chosen - max(room, 1) + 1)
    return rows[start : start + max(room, 1)]


def _cells(one: DestinationStats, frame: Frame) -> list[str]:
    series = frame.rates.get(one.name)
    return [
        shown_name(one),
        state(one),
        number(one.counts, *WAITING),
        f"{one.counts.sending:,}",
        number(one.counts, "failed"),
        _rate(series, frame.at),
        oldest(one.counts),
        _lag(series),
        spark([point.delivered for point in series.points]) if series else "",
    ]


def _style(one: DestinationStats) -> str:
    return {"ok": "", "retrying": "", "debezium": "", "paused": "yellow"}.get(state(one), "red")


def _relays(relays: Sequence[Relay], width: int) -> Iterator[Text]:
    alive = [relay for relay in relays if is_alive(relay)]
    if not alive:
        yield _line("no relay runs", "bold red", width)
        return
    yield _line(f"{len(alive)} relay{'' if len(alive) == 1 else 's'}", "bold", width)
    for relay in alive[:RELAYS]:
        leads = relay.leads_until is not None and relay.leads_until > relay.seen_at
        up = ago((relay.seen_at - relay.started_at).total_seconds())
        yield _line(f"  {relay.name}  {relay.version}  up {up}{'  leads' if leads else ''}", "", width)
    if len(alive) > RELAYS:
        yield _line(f"  and {len(alive) - RELAYS} more", "dim", width)


def _failures(frame: Frame, width: int) -> Iterator[Text]:
    if not frame.failures:
        return
    yield _line("newest failures", "bold", width)
    for entry in frame.failures:
        age = ago((entry.seen_at - entry.updated_at).total_seconds())
        error = " ".join((entry.error_message or "no error on record").split())
        yield _line(f"  {age:>4} {entry.destination}  {entry.event_type}  {error}", "", width)
