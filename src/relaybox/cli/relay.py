"""``relaybox relay``, ``drain``, ``prune`` and ``web``: commands that run a relay or a server."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from relaybox.cli.logs import LogFormat, LogFormatOption, LogLevel, LogLevelOption, configure
from relaybox.cli.options import Json, Options, flag, option, options
from relaybox.cli.output import answer, plain, print_json, print_table
from relaybox.core.values import mask_url, parse_duration
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.cli.progress import DrainProgress
    from relaybox.outbox import Outbox
    from relaybox.relay.relay import Relay

Patience = Annotated[str, option("DURATION", "How long to wait for what is being sent, when it stops.")]


def relay(
    context: typer.Context,
    once: Annotated[
        bool, flag("One round: claim, send and settle a batch of each, then leave.", "--once")
    ] = False,
    patience: Patience = "30s",
    listen: Annotated[
        str | None,
        option(
            "[HOST:]PORT",
            "Serve /metrics, /livez and /readyz there, on the loopback unless HOST says otherwise.",
        ),
    ] = None,
    log_level: LogLevelOption = LogLevel.info,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Deliver what is committed, until SIGTERM or Ctrl-C. Any number of relays may run.

    Before it starts, everything is checked, as by `config check`. The first signal finishes what is being
    sent, and the status is 0; a second leaves at once, and the status is 130 or 143. The log goes to
    standard error.
    """
    from relaybox.cli.application import check_all
    from relaybox.cli.signals import run_relay

    seconds = parse_duration(patience, "--patience")
    if once and listen is not None:
        raise ConfigError(f"--listen = {listen!r}: leave it out with --once, which is over at once")
    outbox = check_all(options(context))
    if listen is not None:
        from relaybox.cli.listen import Monitor
        from relaybox.cli.listen import listen as bind

        # Fail before the relay starts.
        monitor, listening = Monitor(outbox), bind(listen)
    configure(log_level, log_format)
    started = outbox.relay(patience=seconds, observers=() if listen is None else monitor.observers)
    _log_start(outbox, started)
    if listen is not None:
        run_relay(started, lambda: monitor.run(listening, started), seconds)
    else:
        run_relay(started, started.run_once if once else lambda: started.run(signals=False), seconds)


def _log_start(outbox: Outbox, relay: Relay) -> None:
    import logging
    from importlib.metadata import version

    from relaybox.cli.application import sink_name

    sinks = {one.name: sink_name(one, outbox) for one in outbox.settings.destinations}
    database = mask_url(outbox.settings.database)
    about = {"version": version("relaybox"), "database": database, "name": relay.name, "destinations": sinks}
    logging.getLogger("relaybox.relay").info(
        "relaybox %s relays from %s to %s, as %s",
        about["version"],
        database,
        ", ".join(f"{name} ({sink})" for name, sink in sinks.items()),
        relay.name,
        extra={"relay": {"event": "started", **about}},
    )


def drain(context: typer.Context, patience: Patience = "30s", as_json: Json = False) -> None:
    """Deliver what is due now, then leave: for cron, deployments and tests.

    What failed and is to be tried again later stays for later. Failures are reported on standard error.
    """
    drained = run_drain(options(context), patience)
    answer(drained, as_json, drained_document, show_drained)
    if drained.interrupted:
        raise typer.Exit(1)


def run_drain(given: Options, patience: str) -> DrainProgress:
    """Make deliveries due that wait without a reason, then deliver all that are due."""
    from relaybox.cli.application import check_all
    from relaybox.cli.progress import DrainProgress
    from relaybox.cli.signals import run_relay

    seconds = parse_duration(patience, "--patience")
    outbox = check_all(given)
    progress = DrainProgress([one.name for one in outbox.settings.destinations])
    configure().addFilter(progress.make_room)
    relay = outbox.relay(patience=seconds, observers=[progress])
    _, progress.interrupted = run_relay(relay, lambda: relay.drain(sweep=True), seconds)
    return progress


def drained_document(drained: DrainProgress) -> dict[str, Any]:
    """Return the result of a drain for ``--json``."""
    held = drained.held
    about = {
        name: {**asdict(drained.counts[name]), "held": held[name].why if name in held else None}
        for name in drained.names
    }
    return {**asdict(drained.total), "destinations": about}


def show_drained(drained: DrainProgress) -> None:
    """Print the result of a drain."""
    rows = [[name, *map("{:,}".format, asdict(drained.counts[name]).values())] for name in drained.names]
    print_table(["DESTINATION", "DELIVERED", "RETRIED", "FAILED"], rows, range(4))
    for name, why in drained.held.items():
        if name in drained.names:
            state = "paused" if why.why == "paused" else "circuit open"
            typer.echo(plain(f"{name}: {state}{': ' + why.reason if why.reason else ''}"))


def prune(context: typer.Context, as_json: Json = False) -> None:
    """Remove what was kept long enough: for cron, where no relay runs all the time to see to it.

    Delivered and discarded rows go by their destination's retention, marks of the inbox by its window, and
    with them old idempotency keys, records of attempts, statistics and audits. While a relay leads, there is
    nothing to do.
    """
    show_removed({"": run_prune(options(context))}, as_json)


def run_prune(given: Options) -> int | None:
    """Prune; return the number of rows, or None if a relay leads and prunes itself."""
    from relaybox.cli.application import check_all
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


def show_removed(removed: dict[str, int | None], as_json: bool) -> None:
    """Print the number of removed rows, by database if there are several."""
    if as_json:
        print_json({"removed": sum(filter(None, removed.values()))})
        return
    for name, count in removed.items():
        where = f"{name}: " if len(removed) > 1 else ""
        done = "a relay leads, and sees to it" if count is None else f"removed {count:,}"
        typer.echo(f"{where}{done}")


def web(
    context: typer.Context,
    host: Annotated[
        str | None, option("ADDRESS", "Where to listen. Else the [web] table's: 127.0.0.1.")
    ] = None,
    port: Annotated[int | None, option("PORT", "0 takes a free one. Else the [web] table's: 8811.")] = None,
    require_users: Annotated[bool, flag("Refuse to start without users.", "--require-users")] = False,
    log_level: LogLevelOption = LogLevel.info,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Serve the dashboard and the HTTP API, until SIGTERM or Ctrl-C.

    Its address is printed; the log goes to standard error. Without users in the [web] table it also prints a
    link to log in with, once, and refuses to listen beyond this host. For scripts, set RELAYBOX_WEB_TOKEN.
    """
    from relaybox.cli.application import check_tables
    from relaybox.cli.web_server import listen, serve
    from relaybox.web import dashboard

    given = options(context)
    outbox = given.outbox()
    flags = {name: flag for name, flag in (("host", host), ("port", port)) if flag is not None}
    served = dashboard(outbox, **flags)
    served.settings.check_binding(require_users=require_users)
    check_tables(outbox.settings, given)
    configure(log_level, log_format)
    listener = listen(served.settings.host, served.settings.port)
    # A browser cannot open a wildcard address: print the loopback instead.
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(served.settings.host, served.settings.host)
    name = f"[{name}]" if ":" in name else name
    address = f"http://{name}:{listener.getsockname()[1]}"
    typer.echo(f"relaybox web: {address}/")
    if (link := served.gate.link) is not None:
        link.address, link.shown = address, True
        typer.echo(f"Log in, once: {link.url()}")
    serve(served, listener)
