"""``relaybox init``, ``config show``, ``config check`` and ``secret new``."""

from __future__ import annotations

import json
import os
import warnings
from base64 import b64encode
from dataclasses import fields
from pathlib import Path
from secrets import token_bytes
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from relaybox.cli.options import Json, Options, flag, options
from relaybox.cli.output import plain, print_json
from relaybox.core.settings import (
    DEFAULT_DATABASE,
    Backoff,
    Destination,
    Route,
    Settings,
    find_file,
    normalize_url,
)
from relaybox.core.values import Secret, Table, is_reference, mask_url, parse_secret, show_duration
from relaybox.errors import ConfigError, RelayboxError

if TYPE_CHECKING:
    from relaybox.outbox import Outbox

DEFAULT = "default"
TABLES = ("destinations", "routes", "web")

DURATIONS = {
    *("timeout", "lease", "poll_interval", "retention", "canary", "base", "cap"),
    *("inbox_window", "idempotency_window"),
}

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

Tables: TypeAlias = dict[str, dict[str, dict[str, str]]]
"""By table and setting: the ``text`` as written in the file, and its ``source``."""


def init(
    context: typer.Context, force: Annotated[bool, flag("Overwrite the file.", "--force")] = False
) -> None:
    """Write a relaybox.toml to begin with, whose one destination prints events on the terminal."""
    given = options(context)
    path = given.path() or Path("relaybox.toml")
    database = _new_database(given.database)
    if path.name == "pyproject.toml":
        raise ConfigError(f"{path} holds more than this: write a [tool.relaybox] table there by hand")
    other = None if force or path.name != "relaybox.toml" else find_file(None, {})
    if other is not None and other.name == "pyproject.toml":
        fix = "relaybox.toml would go before it; --force writes it all the same"
        raise ConfigError(f"pyproject.toml has a [tool.relaybox] table already: {fix}")
    # A JSON string is a TOML string, except that TOML requires DEL to be escaped.
    try:
        with path.open("w" if force else "x", encoding="utf-8") as file:
            file.write(TEMPLATE.format(database=json.dumps(database).replace("\x7f", "\\u007f")))
    except FileExistsError:
        raise ConfigError(f"{path} exists already; --force overwrites it") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(f"wrote {path}")
    if mask_url(database) != database and not is_reference(database):
        typer.echo("The database's URL is in it as you gave it; --database env:DATABASE_URL keeps it out.")
    config = f" --config {path}" if given.config else ""
    typer.echo(
        f"\nNext:\n"
        f"  relaybox migrate{config}        create the tables in {mask_url(database)}\n"
        f"  relaybox config check{config}   see whether everything is in place\n"
        f"  relaybox relay{config}          deliver: events appear on the terminal"
    )


def _new_database(given: str | None) -> str:
    """Return the value for the file. A reference is not resolved: it may not exist yet."""
    if given is None:
        return "env:DATABASE_URL" if os.environ.get("DATABASE_URL") else DEFAULT_DATABASE
    parse_secret(given, "database")
    return given if is_reference(given) else normalize_url(given)


def show(
    context: typer.Context,
    everything: Annotated[bool, flag("Show what is left at its default, too.", "--all")] = False,
    as_json: Json = False,
) -> None:
    """Show the settings that count, and where each comes from. Secrets are not shown."""
    tables = effective_settings(options(context))
    if as_json:
        print_json(tables)
    else:
        _print(tables, everything)


def _print(tables: Tables, everything: bool) -> None:
    hidden = 0
    for number, (table, settings) in enumerate(tables.items()):
        shown = {
            name: one
            for name, one in settings.items()
            if everything or one["source"] != DEFAULT or name == "database"
        }
        hidden += len(settings) - len(shown)
        lines = {plain(f"{name} = {one['text']}"): plain(one["source"]) for name, one in shown.items()}
        width = max(map(len, lines), default=0)
        typer.echo(("\n" if number else "") + plain(f"[{table}]"))
        for line, source in lines.items():
            typer.echo(f"{line:<{width}}  # {source}")
    if hidden:
        typer.echo(f"\n# {hidden} more are at their defaults; --all shows them")


def check(context: typer.Context, as_json: Json = False) -> None:
    """Check everything a relay needs: settings, secrets, sinks, handlers, packages, database and tables.

    All that is wrong is reported on standard error, and the status is 2.
    """
    found = _look(options(context))
    ok = all(one["ok"] for one in found)
    if as_json:
        print_json({"ok": ok, "checks": found})
    else:
        width = max(len(plain(one["what"])) for one in found)
        for one in found:
            mark = "ok   " if one["ok"] else "wrong"
            typer.echo(plain(f"{mark} {one['what']:<{width}}  {one['text']}"), err=not one["ok"])
    if not ok:
        raise typer.Exit(2)


def _look(given: Options) -> list[dict[str, Any]]:
    from relaybox.cli.application import checks

    def found(what: str, text: object, *, ok: bool) -> dict[str, Any]:
        return {"what": what, "ok": ok, "text": " ".join(str(text).split())}

    try:
        outbox = given.outbox()
    except RelayboxError as error:
        return [found("settings", error, ok=False)]
    all_found = [found("settings", given.sources(outbox), ok=True)]
    for what, check_one in checks(outbox, given):
        try:
            all_found.append(found(what, check_one(), ok=True))
        except RelayboxError as error:
            all_found.append(found(what, error, ok=False))
    return all_found


def effective_settings(given: Options) -> Tables:
    """Return the tables ``relaybox``, ``destinations.NAME``, ``routes.N`` and ``web``, as in the file."""
    outbox = given.outbox()
    settings = outbox.settings
    try:
        in_file = given.read()
    except RelayboxError:
        # The application may not read the file: a mistake in it is not fatal here.
        in_file = Settings()
    file, origin = str(given.file()), given.origin(settings)
    default = Settings()
    names = [field.name for field in fields(Settings) if field.name not in TABLES]
    own = {name for name in names if getattr(settings, name) != getattr(in_file, name)}
    general = {name: _shown(settings, name, origin if name in own else file, default) for name in names}
    named = given.database_source()
    sources = {"database": "--database", "database in the file": file, None: DEFAULT}
    # A database set by the application takes precedence over the environment and the file.
    source = origin if "database" in own else str(sources.get(named, named))
    tables = {"relaybox": {**general, "database": _shown(settings, "database", source)}}
    if given.app:
        tables["relaybox"]["app"] = {"text": _text("app", given.app), "source": "--app"}
    for destination in settings.destinations:
        source = file if destination in in_file.destinations else origin
        tables[f"destinations.{destination.name}"] = _destination(destination, outbox, source)
    for number, route in enumerate(settings.routes, 1):
        source = file if route in in_file.routes else origin
        bare = Route(route.events, route.to)
        tables[f"routes.{number}"] = {
            name: _shown(route, name, source, None if name in ("events", "to") else bare)
            for name in (field.name for field in fields(Route))
        }
    return tables | _web(settings, file if settings.web == in_file.web else origin)


def _web(settings: Settings, source: str) -> Tables:
    if not settings.web:
        return {}
    from relaybox.web.settings import WebSettings

    given = WebSettings.of(settings.web)
    tables = {"web": {name: _shown(given, name, source) for name in settings.web if name != "users"}}
    for user in given.users:
        tables[f"web.users.{user.name}"] = {name: _shown(user, name, source) for name in ("token", "role")}
    return tables


def _shown(of: object, name: str, source: str, default: object = None) -> dict[str, str]:
    """Return a setting of an object; its source is the default if it equals that of ``default``."""
    value = getattr(of, name)
    is_default = default is not None and value == getattr(default, name)
    return {"text": _text(name, value), "source": DEFAULT if is_default else source}


def _destination(destination: Destination, outbox: Outbox, source: str) -> dict[str, dict[str, str]]:
    from relaybox.cli.application import sink_name

    with warnings.catch_warnings(action="ignore"):
        bare = Destination(destination.name, destination.sink)
        # The defaults of other settings depend on ``ordered``.
        default = Destination(destination.name, destination.sink, ordered=destination.ordered)
    names = [field.name for field in fields(Destination) if field.name not in ("name", "sink")]
    return {
        "sink": {"text": _text("sink", sink_name(destination, outbox)), "source": source},
        **{name: _shown(destination, name, source, bare if name == "ordered" else default) for name in names},
    }


def _text(name: str, value: Any) -> str:
    """Return the value as TOML; a callable is shown by its name."""
    match value:
        case None:
            return "none"
        case Secret():
            return json.dumps(str(value).removeprefix("Secret(").removesuffix(")"), ensure_ascii=False)
        case Backoff():
            inner = (f"{one.name} = {_text(one.name, getattr(value, one.name))}" for one in fields(value))
            return f"{{ {', '.join(inner)} }}"
        case Table():
            # The values may be secret.
            return f"{{ {', '.join(f'{one} = …' for one in value)} }}" if value else "{}"
        case bool():
            return "true" if value else "false"
        case float() if name in DURATIONS:
            return f'"{show_duration(value)}"'
        case float() if name == "rate_limit":
            return f'"{value:g}/s"'
        case str():
            return json.dumps(mask_url(value) if "://" in value else value, ensure_ascii=False)
        case tuple():
            return f"[{', '.join(_text(name, one) for one in value)}]"
        case _ if callable(value):
            return f"{getattr(value, '__module__', '?')}.{getattr(value, '__qualname__', '?')}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def new_secret() -> None:
    """Print a new secret that signs webhooks: 32 random bytes, as whsec_ and base64."""
    typer.echo(f"whsec_{b64encode(token_bytes(32)).decode()}")
