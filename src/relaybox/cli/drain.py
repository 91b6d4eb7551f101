"""``relaybox drain``."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from relaybox.cli.options import Json, Options, options
from relaybox.cli.relay import Patience

if TYPE_CHECKING:
    from relaybox.observers.count import Counter


class Drained(NamedTuple):
    """What a drain did, for which destinations, and whether a signal ended it."""

    counter: Counter
    names: list[str]
    stopped: bool


def drain(context: typer.Context, patience: Patience = "30s", as_json: Json = False) -> None:
    """Deliver what is due now, then leave: for cron, deployments and tests.

    What failed and is to be tried again later stays for later. Failures are told on standard error.
    """
    from relaybox.cli.output import print_json

    drained = run_drain(options(context), patience)
    if as_json:
        print_json(document(drained))
    else:
        show(drained)
    if drained.stopped:
        raise typer.Exit(1)


def run_drain(given: Options, patience: str) -> Drained:
    """Deliver what is due, and make due what waits without a reason."""
    from relaybox.cli import logs
    from relaybox.cli.checks import check_all
    from relaybox.cli.options import LogFormat, LogLevel
    from relaybox.cli.progress import DrainProgress
    from relaybox.cli.signals import run_relay
    from relaybox.setting import parse_duration

    seconds = parse_duration(patience, "--patience")
    outbox = check_all(given)
    progress = DrainProgress()
    logs.configure(LogLevel.warning, LogFormat.text).addFilter(progress.make_room)
    relay = outbox.relay(patience=seconds, observers=[progress])
    _, stopped = run_relay(relay, lambda: relay.drain(sweep=True), seconds)
    return Drained(progress, [one.name for one in outbox.settings.destinations], stopped)


def document(drained: Drained) -> dict[str, Any]:
    """What it did, for programs."""
    counts = _counts(drained)
    held = drained.counter.held
    about = {
        name: {**count, "held": held[name].why if name in held else None} for name, count in counts.items()
    }
    return {**asdict(drained.counter.total), "destinations": about}


def show(drained: Drained) -> None:
    """Print what it did, for people."""
    from relaybox.cli.output import plain, print_table

    counts = _counts(drained)
    rows = [[name, *(f"{number:,}" for number in count.values())] for name, count in counts.items()]
    print_table(["DESTINATION", "DELIVERED", "RETRIED", "FAILED"], rows, range(4))
    for name, why in drained.counter.held.items():
        if name in counts:
            state = "paused" if why.why == "paused" else "circuit open"
            typer.echo(plain(f"{name}: {state}{': ' + why.reason if why.reason else ''}"))


def _counts(drained: Drained) -> dict[str, dict[str, int]]:
    return {name: asdict(drained.counter.counts[name]) for name in drained.names}
