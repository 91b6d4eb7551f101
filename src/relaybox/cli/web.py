"""``relaybox web``."""

from __future__ import annotations

from typing import Annotated

import typer

from relaybox.cli.options import LogFormat, LogFormatOption, LogLevel, LogLevelOption, options


def web(
    context: typer.Context,
    host: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Where to listen. Else the [web] table's: 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="PORT", help="0 takes a free one. Else the [web] table's: 8811.")
    ] = None,
    require_users: Annotated[
        bool, typer.Option("--require-users", help="Refuse to start without users: behind any proxy.")
    ] = False,
    log_level: LogLevelOption = LogLevel.info,
    log_format: LogFormatOption = LogFormat.text,
) -> None:
    """Serve the dashboard and the HTTP API, until SIGTERM or Ctrl-C.

    Without users in the [web] table it serves this host alone, and refuses to listen elsewhere. Its address
    is printed; the log goes to standard error.
    """
    from relaybox.cli import logs
    from relaybox.cli.application import check_tables
    from relaybox.cli.web_server import listen, serve
    from relaybox.web import dashboard

    given = options(context)
    outbox = given.outbox()
    flags = {name: flag for name, flag in (("host", host), ("port", port)) if flag is not None}
    served = dashboard(outbox, **flags)
    served.settings.check_binding(require_users=require_users)
    check_tables(outbox.settings, given)
    logs.configure(log_level, log_format)
    listener = listen(served.settings.host, served.settings.port)
    typer.echo(f"relaybox web: {_address(served.settings.host, listener.getsockname()[1])}")
    serve(served, listener)


def _address(host: str, port: int) -> str:
    """Return where a browser finds it; an address that stands for all becomes the loopback."""
    everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    name = everywhere.get(host, host)
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"
