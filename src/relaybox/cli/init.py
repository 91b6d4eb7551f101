"""``relaybox init``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from relaybox.cli.options import options
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TEMPLATE = """\
# Relaybox: where events go. `relaybox config check` says whether all of this is right.

[relaybox]
# Where the tables are: a URL, env:NAME or file:PATH. Keep passwords out of this file.
database = {database}
# Where the application's Outbox is, if it has one: its handlers then run in the relay.
# app = "shop.outbox:outbox"

# A destination is a sink and its policy. This one prints each event on the relay's standard output.
[destinations.console]
sink = "console:"

# Webhooks, signed, retried, and in order for each aggregate:
# [destinations.runner]
# sink = "https://runner.example/events"
# secret = "env:RUNNER_SECRET"
# ordered = true
# max_attempts = 5
# timeout = "30s"
# backoff = {{ base = "1s", cap = "1h" }}

# Which events go where; * stands for any run of characters.
[[routes]]
events = ["*"]
to = ["console"]
"""


def init(
    context: typer.Context,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Write a relaybox.toml to begin with, whose one destination prints events on the terminal."""
    from pathlib import Path

    from relaybox.core.values import mask_url

    given = options(context)
    path = given.path() or Path("relaybox.toml")
    database = _database(given.database)
    _check_place(path, force)
    _write(path, TEMPLATE.format(database=_quoted(database)), force)
    typer.echo(f"wrote {path}")
    if mask_url(database) != database and not database.startswith(("env:", "file:")):
        typer.echo("The database's URL is in it as you gave it; --database env:DATABASE_URL keeps it out.")
    config = f" --config {path}" if given.config else ""
    typer.echo(
        f"\nNext:\n"
        f"  relaybox migrate{config}        create the tables in {mask_url(database)}\n"
        f"  relaybox config check{config}   see whether everything is in place\n"
        f"  relaybox relay{config}          deliver: events appear on the terminal"
    )


def _database(given: str | None) -> str:
    """Return what the file says; a reference is kept as it is, and its value may not exist yet."""
    import os

    from relaybox.core.settings import DEFAULT_DATABASE, normalize_url
    from relaybox.core.values import parse_secret

    if given is None:
        return "env:DATABASE_URL" if os.environ.get("DATABASE_URL") else DEFAULT_DATABASE
    parse_secret(given, "database")
    return given if given.startswith(("env:", "file:")) else normalize_url(given)


def _check_place(path: Path, force: bool) -> None:
    from relaybox.core.settings import find_file

    if path.name == "pyproject.toml":
        raise ConfigError(f"{path} holds more than this: write a [tool.relaybox] table there by hand")
    if force:
        return
    other = find_file(None, {})
    if other is not None and other.name == "pyproject.toml" and path.name == "relaybox.toml":
        fix = "relaybox.toml would go before it; --force writes it all the same"
        raise ConfigError(f"pyproject.toml has a [tool.relaybox] table already: {fix}")


def _write(path: Path, text: str, force: bool) -> None:
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists already; --force overwrites it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


def _quoted(text: str) -> str:
    """Return a TOML string: JSON's, with the one character escaped that JSON leaves as it is."""
    import json

    return json.dumps(text).replace("\x7f", "\\u007f")
