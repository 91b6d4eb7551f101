"""``relaybox prune``."""

from __future__ import annotations

import typer

from relaybox.cli.options import Json, Options, options


def prune(context: typer.Context, as_json: Json = False) -> None:
    """Remove what was kept long enough: for cron, where no relay runs all the time to see to it.

    Delivered and discarded rows go by their destination's retention, marks of the inbox by its window, and
    with them old idempotency keys, records of attempts, statistics and audits. While a relay leads, there is
    nothing to do.
    """
    tell({"": run_prune(options(context))}, as_json)


def run_prune(given: Options) -> int | None:
    """Remove it; how many rows, None where a relay leads and does so itself."""
    from functools import partial

    from relaybox.cli.checks import check_all
    from relaybox.cli.signals import run_relay

    outbox = check_all(given)
    removed = 0
    while True:
        relay = outbox.relay()
        chores, stopped = run_relay(relay, partial(relay.upkeep, sweep=False), 0)
        if chores.pruned is None:
            return removed or None
        removed += chores.pruned.changed
        if stopped:
            raise typer.Exit(1)
        if chores.pruned.done:
            return removed


def tell(removed: dict[str, int | None], as_json: bool) -> None:
    """Say how many rows were removed, by database where there are several."""
    from relaybox.cli.output import print_json

    if as_json:
        print_json({"removed": sum(filter(None, removed.values()))})
        return
    for name, count in removed.items():
        where = f"{name}: " if len(removed) > 1 else ""
        done = "a relay leads, and sees to it" if count is None else f"removed {count:,}"
        typer.echo(f"{where}{done}")
