"""A frame of ``relaybox top``: what it shows, and how it fits."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from relaybox.cli.top import DOWN, UP, Frame, LiveScreen, View, _split, draw, spark
from relaybox.errors import StoreError
from relaybox.operate.admin import DestinationStats, Point, Series, Stats
from relaybox.stores.ledger import Counts, DestinationState, Entry, Relay
from tests.unit.deliveries import entry

NOW = datetime(2026, 11, 16, 12, 0, 30, tzinfo=UTC)
CLOSED = DestinationState("runner", None, None, None, None, "closed", None, None, NOW)


def point(at: datetime, delivered: float) -> Point:
    return Point(at, 5.0, delivered, 0, 0, 3, 1.0, 0.02, 0.1, 2.5)


def series() -> Series:
    minute = NOW.replace(second=0)
    points = [point(minute - timedelta(minutes=n), 10.0 if n < 2 else 0.0) for n in range(29, -1, -1)]
    return Series(timedelta(minutes=1), tuple(points))


def frame(*destinations: DestinationStats, relays: int = 1) -> Frame:
    relay = Relay("host:1", "host", 1, "0.1.0", NOW - timedelta(hours=2), NOW, NOW + timedelta(hours=1), NOW)
    total = Counts(due=12, failed=10_000, oldest_seconds=90, capped=frozenset({"failed"}))
    rates = {one.name: series() for one in destinations if one.configured}
    return Frame(NOW, Stats(total, destinations, (relay,) * relays), series(), rates, [failure()])


def failure(error: str = "422 Unprocessable\nEntity") -> Entry:
    since = NOW - timedelta(minutes=5)
    return entry(NOW, destination="runner", status="failed", error_message=error, updated_at=since)


RUNNER = DestinationStats("runner", True, Counts(due=12, failed=3, oldest_seconds=90), CLOSED)
PAUSED = DestinationStats("mail", True, Counts(), replace(CLOSED, name="mail", paused_at=NOW))
OPEN = DestinationStats("web", True, Counts(due=1), replace(CLOSED, name="web", circuit="open"))
GONE = DestinationStats("gone", False, Counts(due=1), None)
UNROUTED = DestinationStats("", False, Counts(due=1), None)


def rendered(view: View, width: int = 120, height: int | None = None, *, colour: bool = False) -> str:
    out = StringIO()
    system: Any = "standard" if colour else None
    console = Console(file=out, width=width, force_terminal=colour, highlight=False, color_system=system)
    console.print(draw(view, width, height))
    return out.getvalue()


def test_a_frame_says_where_something_is_tried_again() -> None:
    busy = replace(RUNNER, counts=Counts(scheduled=1, retrying="401 Unauthorized"))
    [line] = [line for line in rendered(View("db", frame(busy))).splitlines() if line.startswith("runner")]
    assert line.split()[1:3] == ["retrying", "1"]


def test_a_frame_shows_rates_backlogs_lag_circuits_relays_and_failures() -> None:
    text = rendered(View("sqlite:///shop.db", frame(RUNNER, PAUSED, OPEN, GONE, UNROUTED)))
    assert text.startswith("relaybox top  12:00:30 UTC  sqlite:///shop.db")
    lines = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert "delivered 10.0/s  emitted 5.0/s  waiting 12  sending 0  failed 10,000+  oldest 1m" in text
    assert lines["runner"].split()[1:9] == ["failing", "12", "0", "3", "10.0/s", "1m", "20ms", "/"]
    assert "2.5s" in lines["runner"]
    assert lines["runner"].rstrip().endswith("██")
    assert "paused" in lines["mail"]
    assert "circuit open" in lines["web"]
    assert "unknown" in lines["gone"]
    assert "(unrouted)" in lines
    assert "host:1  0.1.0  up 2h  leads" in text
    assert "5m runner  order.paid  422 Unprocessable Entity" in text


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 200])
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    long = replace(RUNNER, name="a-destination-with-a-name-that-goes-on-and-on-for-longer-than-anything")
    view = View("postgresql://***@database.example.org/shop", frame(long, PAUSED), trouble="it is away " * 9)
    lines = rendered(view, width).splitlines()
    assert max(map(len, lines)) <= width
    assert any("FAILED" in line for line in lines) == (width >= 40)
    assert any("LAG" in line for line in lines) == (width >= 90)


def test_without_colours_there_is_no_escape_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    view = View("x", frame(RUNNER, OPEN), trouble="away")
    assert "\x1b[" not in rendered(view)
    assert "\x1b[" in rendered(view, colour=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[31m" not in rendered(view, colour=True)
    evil = frame(replace(GONE, name="\x1b[2Jgone"))._replace(failures=[failure("\x1b]0;title\x07")])
    assert "\x1b" not in rendered(View("x", evil)), "text of others moves no cursor"


def test_trouble_is_shown_above_what_was_last_seen() -> None:
    text = rendered(View("x", frame(RUNNER), trouble="connection refused"))
    assert text.splitlines()[1] == "no answer from the database: connection refused; trying again"
    assert "runner" in text
    assert "waiting for the first answer" in rendered(View("x"))
    assert "no relay runs" in rendered(View("x", frame(RUNNER, relays=0)))
    assert "and 3 more" in rendered(View("x", frame(RUNNER, relays=8)))


def test_the_chosen_destination_is_in_sight_though_not_all_are() -> None:
    many = [replace(RUNNER, name=f"runner-{n:02}") for n in range(40)]
    view = View("x", frame(*many), selected="runner-30", keys=True, question="pause runner-30?")
    text = rendered(view, 100, 24)
    assert len(text.splitlines()) <= 24
    assert "runner-30" in text
    assert "runner-39" not in text
    assert text.splitlines()[-1] == "pause runner-30? y/n"


def test_bars_are_as_high_as_the_highest_and_keys_that_come_together_are_separated() -> None:
    assert [spark(values) for values in ([0, 5, 10], [0, 0], [])] == ["▁▅█", "▁▁", ""]
    assert _split(f"{UP}{DOWN}q") == [UP, DOWN, "q"]
    assert _split("") == [""]


class Operator:
    """Records the actions; it has no answer to look at."""

    def __init__(self) -> None:
        self.done: list[str] = []

    async def pause(self, name: str, reason: str) -> None:
        self.done.append(f"pause {name}")
        raise StoreError("away")

    async def resume(self, name: str) -> bool:
        self.done.append(f"resume {name}")
        raise StoreError("away")


@pytest.mark.parametrize("now", [(PAUSED,), (replace(RUNNER, place=replace(CLOSED, circuit="open")), PAUSED)])
async def test_yes_answers_what_was_asked_though_the_screen_changed(
    now: tuple[DestinationStats, ...],
) -> None:
    operator = Operator()
    watch = LiveScreen(operator, "x", Console(file=StringIO()), 1.0)  # type: ignore[arg-type]
    watch._view.frame = frame(RUNNER, PAUSED)
    watch._choose(0)
    watch._press("p")
    assert watch._view.question == "pause runner?"
    watch._view.frame = frame(*now)
    watch._choose(0)
    watch._press("y")
    assert watch._doing is not None
    await watch._doing
    assert operator.done == ["pause runner"]
    assert watch._view.question is None
