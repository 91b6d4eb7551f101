"""``relaybox demo``."""

from __future__ import annotations

from typing import Annotated

import typer


def demo(
    seconds: Annotated[
        float, typer.Option(min=4, max=600, metavar="N", help="How long orders are placed.")
    ] = 16,
) -> None:
    """Show it: orders, a receiver that goes down, a relay that is killed, and a comparison of what arrived.

    Needs the extra demo. Everything runs on this machine, on loopback and in temporary directories. The last
    line is JSON; the exit status is 1 if anything was lost, made up or out of order.
    """
    from relaybox.demo import run

    raise typer.Exit(run(seconds))
