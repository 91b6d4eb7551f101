"""``relaybox relay``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from relaybox.cli.options import LogFormat, LogLevel, options

if TYPE_CHECKING:
    from relaybox.app import Outbox
    from relaybox.relay.relay import Relay

Patience = Annotated[
    str, typer.Option(metavar="DURATION", help="How long to wait for what is being sent, when it stops.")
]


def relay(
    context: typer.Context,
    once: Annotated[
        bool, typer.Option("--once", help="One round: claim, send and settle a batch of each, then leave.")
    ] = False,
    patience: Patience = "30s",
    listen: Annotated[
        str | None,
        typer.Option(
            metavar="[HOST:]PORT",
            help="Serve /metrics, /livez and /readyz there, on the loopback unless HOST says otherwise.",
        ),
    ] = None,
    log_level: Annotated[LogLevel, typer.Option(help="The least important messages.")] = LogLevel.info,
    log_format: Annotated[LogFormat, typer.Option(help="Lines, or JSON objects.")] = LogFormat.text,
) -> None:
    """Deliver what is committed, until SIGTERM or Ctrl-C. Any number of relays may run.

    Before it starts, everything is checked, as by `config check`. The first signal finishes what is being
    sent, and the status is 0; a second leaves at once, and the status is 130 or 143. The log goes to
    standard error.
    """
    from relaybox.cli import logs
    from relaybox.cli.checks import check_all
    from relaybox.cli.signals import run_relay
    from relaybox.errors import ConfigError
    from relaybox.setting import parse_duration

    seconds = parse_duration(patience, "--patience")
    if once and listen is not None:
        raise ConfigError(f"--listen = {listen!r}: leave it out with --once, which is over at once")
    outbox = check_all(options(context))
    monitored = None if listen is None else _Monitored(outbox, listen)
    logs.configure(log_level, log_format)
    started = outbox.relay(patience=seconds, observers=monitored.observers if monitored else ())
    _tell_start(outbox, started)
    if monitored is not None:
        run_relay(started, lambda: monitored.run(started), seconds)
    else:
        run_relay(started, started.run_once if once else lambda: started.run(signals=False), seconds)


class _Monitored:
    """A relay that tells of itself over HTTP; what keeps it from doing so is found before it starts."""

    def __init__(self, outbox: Outbox, address: str) -> None:
        from relaybox.cli.listen import Monitor, listen

        self._monitor = Monitor(outbox)
        self._socket = listen(address)
        self.observers = self._monitor.observers

    async def run(self, relay: Relay) -> None:
        import logging

        host, port = self._socket.getsockname()[:2]
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        logging.getLogger("relaybox.relay").info(
            "serving /metrics, /livez and /readyz at http://%s",
            at,
            extra={"relay": {"event": "listening", "address": at}},
        )
        async with self._monitor.serving(self._socket, relay):
            await relay.run(signals=False)


def _tell_start(outbox: Outbox, relay: Relay) -> None:
    import logging
    from importlib.metadata import version

    from relaybox.cli.checks import sink_name
    from relaybox.setting import mask_url

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
