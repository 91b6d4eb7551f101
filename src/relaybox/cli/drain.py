"""``relaybox drain``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from relaybox.cli.options import Json, options
from relaybox.cli.relay import Patience

if TYPE_CHECKING:
    from relaybox.observers.count import Counter


def drain(context: typer.Context, patience: Patience = "30s", as_json: Json = False) -> None:
    """Deliver what is due now, then leave: for cron, deployments and tests.

    What failed and is to be tried again later stays for later. Failures are told on standard error.
    """
    from relaybox.cli import logs
    from relaybox.cli.checks import check_all
    from relaybox.cli.levels import LogFormat, LogLevel
    from relaybox.cli.progress import Progress
    from relaybox.cli.running import run_relay
    from relaybox.setting import parse_duration

    seconds = parse_duration(patience, "--patience")
    outbox = check_all(options(context))
    progress = Progress()
    logs.configure(LogLevel.warning, LogFormat.text).addFilter(progress.make_room)
    relay = outbox.relay(patience=seconds, observers=[progress])
    _, stopped = run_relay(relay, relay.drain, seconds)
    _print(progress, [one.name for one in outbox.settings.destinations], as_json)
    if stopped:
        raise typer.Exit(1)


def _print(counter: Counter, names: list[str], as_json: bool) -> None:
    from relaybox.cli.operate import plain, print_json, print_table

    counts = {name: asdict(counter.counts[name]) for name in names}
    held = {name: held for name, held in counter.held.items() if name in counts}
    if as_json:
        about = {
            name: {**count, "held": held[name].why if name in held else None}
            for name, count in counts.items()
        }
        print_json({**asdict(counter.total), "destinations": about})
        return
    rows = [[name, *(f"{number:,}" for number in count.values())] for name, count in counts.items()]
    print_table(["DESTINATION", "DELIVERED", "RETRIED", "FAILED"], rows, range(4))
    for name, why in held.items():
        state = "paused" if why.why == "paused" else "circuit open"
        typer.echo(plain(f"{name}: {state}{': ' + why.reason if why.reason else ''}"))
