"""``relaybox status`` and ``relaybox top``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated

import typer

from relaybox.cli.options import Json, actor, flag, option, options, run
from relaybox.cli.output import answer, documents, plain, print_table
from relaybox.core.commands import Program, command
from relaybox.core.text import age, at, circuit_word, stated
from relaybox.core.values import parse_duration
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.core.settings import Destination
    from relaybox.operate.admin import Admin, DestinationStats, Stats
    from relaybox.stores.ledger import Counts

COUNTS = ("due", "scheduled", "parked", "sending", "failed", "delivered")

SHORTEST = 0.2
"""Shortest interval in seconds: more frequent queries would load the database."""

WIDE = 110
"""Width of a frame in a file or a pipe, unless COLUMNS is set."""


def status(context: typer.Context, as_json: Json = False) -> None:
    """Show how many deliveries wait, are sent and failed, for each destination, and what holds it up."""

    async def ask(admin: Admin) -> tuple[Stats, Mapping[str, Destination]]:
        return await admin.stats(), await admin.destinations()

    answer(run(context, ask), as_json, lambda found: documents().stats(*found), lambda found: _show(found[0]))


def _show(stats: Stats) -> None:
    rows = [[shown_name(one), *_cells(one.counts), _in_one_word(one)] for one in stats.destinations]
    if len(rows) > 1:
        rows.append(["total", *_cells(stats.total), ""])
    headings = ["DESTINATION", *(name.upper() for name in COUNTS), "OLDEST", "STATE"]
    print_table(headings, rows, range(1, len(headings)))
    for one in stats.destinations:
        for note in _notes(one):
            typer.echo(plain(f"{shown_name(one)}: {note}"))
    if stats.total.failed:
        typer.echo(f"what failed, and why: {command('failures')}")
    typer.echo(_relays(stats))


def shown_name(one: DestinationStats) -> str:
    """Return the destination's name, or ``(unrouted)``."""
    return one.name or "(unrouted)"


def oldest(counts: Counts) -> str:
    """Return the age of the delivery that has waited longest."""
    return "-" if counts.oldest_seconds is None else age(counts.oldest_seconds)


def _cells(counts: Counts) -> list[str]:
    return [*(documents().counted(counts, name) for name in COUNTS), oldest(counts)]


def _in_one_word(one: DestinationStats) -> str:
    """Return the state; the notes say the rest."""
    return "unknown" if one.state == "no route" else one.state.partition(" ")[0]


def _notes(one: DestinationStats) -> Iterator[str]:
    from relaybox.operate.why import overdue, pause_end

    place = one.place
    if place is not None and place.paused:
        yield f"paused by {place.paused_by} until {pause_end(place)} ({stated(place.pause_reason)})"
    if place is not None and place.circuit != "closed":
        until = "" if place.circuit_until is None else f" until {at(place.circuit_until)}"
        yield f"circuit {circuit_word(place.circuit)}{until} ({stated(place.circuit_reason)})"
    elif one.counts.retrying:
        error = " ".join(one.counts.retrying.split())
        verb = "waits" if one.counts.scheduled == 1 else "wait"
        waiting = documents().counted(one.counts, "scheduled")
        yield f"{waiting} {verb} for a later attempt (the next one: {error})"
    if one.overdue and one.timeout is not None:
        yield f"sending for {age(one.counts.sending_seconds or 0.0)}: {overdue(one.timeout)}"
    if one.handed_over:
        yield (
            "handed to Debezium's reader of the log: written to the WAL with the transaction, "
            "Relaybox does not know when it was read"
        )
    if not one.configured and one.name:
        yield f"no such destination; configure it, or {command(f'move {one.name} NAME')}"
    elif not one.name:
        move = command("move '' NAME")
        yield f"no route takes these; add one, or {move}"


def _relays(stats: Stats) -> str:
    from relaybox.operate.why import is_alive

    alive = [relay for relay in stats.relays if is_alive(relay)]
    if alive:
        return plain(f"relays: {', '.join(sorted(relay.name for relay in alive))}")
    if deliverer := Program.deliverer():
        return f"no relay runs; what is due is claimed by {deliverer}"
    if not stats.relays:
        return f"no relay runs now: start one with {command('relay')}"
    last = stats.relays[0]
    silence = age((last.seen_at - last.last_seen_at).total_seconds())
    return plain(f"no relay is running: {last.name} was seen {silence} ago")


def top(
    context: typer.Context,
    interval: Annotated[str, option("DURATION", "How long to wait between two looks.")] = "2s",
    once: Annotated[bool, flag("Print one frame and leave.", "--once")] = False,
) -> None:
    """Watch rates, backlogs, lag, circuits, relays and the newest failures in the terminal.

    q leaves, the arrow keys choose a destination, p pauses or resumes it, after a question. Without a
    terminal one frame is printed.
    """
    from rich.console import Console

    seconds = parse_duration(interval, "--interval")
    if seconds < SHORTEST:
        raise ConfigError(f"--interval = {interval!r}: use {SHORTEST:g}s or longer")
    given = options(context)
    where = given.shown_database(given.settings())
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console = Console(highlight=False, width=WIDE)
    watching = console.is_terminal and not console.is_dumb_terminal and not once

    async def work(admin: Admin) -> None:
        from relaybox.cli.top import LiveScreen, View, collect, draw

        if watching:
            await LiveScreen(admin, where, console, seconds).run()
            return
        console.print(draw(View(where, await collect(admin)), console.width, None))
        sys.stdout.flush()

    # Ctrl-C is a normal way to leave.
    with suppress(KeyboardInterrupt):
        given.ask(actor(), work)
