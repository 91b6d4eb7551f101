"""``relaybox top``."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from relaybox.cli.options import actor, options
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from relaybox.operate.admin import Admin

SHORTEST = 0.2
"""Seconds; more often, the looking itself would be a load."""

WIDE = 110
"""Columns of a frame that goes to a file or a pipe, unless COLUMNS says otherwise."""


def top(
    context: typer.Context,
    interval: Annotated[
        str, typer.Option(metavar="DURATION", help="How long to wait between two looks.")
    ] = "2s",
    once: Annotated[bool, typer.Option("--once", help="Print one frame and leave.")] = False,
) -> None:
    """Watch rates, backlogs, lag, circuits, relays and the newest failures in the terminal.

    q leaves, the arrow keys choose a destination, p pauses or resumes it, after a question. Without a
    terminal one frame is printed.
    """
    from relaybox.core.values import parse_duration

    seconds = parse_duration(interval, "--interval")
    if seconds < SHORTEST:
        raise ConfigError(f"--interval = {interval!r}: use {SHORTEST:g}s or longer")
    given = options(context)
    where = given.shown_database(given.settings())
    console = _console()
    watching = console.is_terminal and not console.is_dumb_terminal and not once

    async def work(admin: Admin) -> None:
        if watching:
            from relaybox.cli.top_live import LiveScreen

            await LiveScreen(admin, where, console, seconds).run()
        else:
            await _print_frame(admin, where, console)

    try:
        given.ask(actor(), work)
    except KeyboardInterrupt:
        # It is how one leaves.
        return


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        return Console(highlight=False, width=WIDE)
    return console


async def _print_frame(admin: Admin, where: str, console: Console) -> None:
    from relaybox.cli.top_layout import View, collect, draw

    view = View(where=where, frame=await collect(admin))
    console.print(draw(view, console.width, None))
    sys.stdout.flush()
