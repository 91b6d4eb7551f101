"""``relaybox config show`` and ``relaybox config check``."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypeAlias

import typer

from relaybox.cli.options import Json, Options, options
from relaybox.cli.output import plain, print_json
from relaybox.errors import RelayboxError

if TYPE_CHECKING:
    from relaybox.core.settings import Destination, Route, Settings
    from relaybox.outbox import Outbox

DEFAULT = "default"
TABLES = ("destinations", "routes", "web")
"""Settings that have tables of their own."""

DURATIONS = {"timeout", "lease", "poll_interval", "retention", "canary", "base", "cap"} | {
    "inbox_window",
    "idempotency_window",
}


class Shown(NamedTuple):
    """A setting as it is written in the file, and where it comes from."""

    text: str
    source: str

    @property
    def chosen(self) -> bool:
        """True if the setting is not at its default."""
        return self.source != DEFAULT


Tables: TypeAlias = dict[str, dict[str, Shown]]


def show(
    context: typer.Context,
    everything: Annotated[bool, typer.Option("--all", help="Show what is left at its default, too.")] = False,
    as_json: Json = False,
) -> None:
    """Show the settings that count, and where each comes from. Secrets are not shown."""
    tables = effective_settings(options(context))
    if as_json:
        print_json(
            {table: {name: one._asdict() for name, one in shown.items()} for table, shown in tables.items()}
        )
    else:
        _print(tables, everything)


def _print(tables: Tables, everything: bool) -> None:
    hidden = 0
    for number, (table, settings) in enumerate(tables.items()):
        shown = {
            name: one for name, one in settings.items() if everything or one.chosen or name == "database"
        }
        hidden += len(settings) - len(shown)
        lines = {plain(f"{name} = {one.text}"): plain(one.source) for name, one in shown.items()}
        width = max(map(len, lines), default=0)
        typer.echo(("\n" if number else "") + plain(f"[{table}]"))
        for line, source in lines.items():
            typer.echo(f"{line:<{width}}  # {source}")
    if hidden:
        typer.echo(f"\n# {hidden} more are at their defaults; --all shows them")


def check(context: typer.Context, as_json: Json = False) -> None:
    """Check everything a relay needs: settings, secrets, sinks, handlers, packages, database and tables.

    All that is wrong is told, on standard error, and the status is 2.
    """
    found = _look(options(context))
    if as_json:
        wrong = [one for one in found if not one["ok"]]
        print_json({"ok": not wrong, "checks": found})
    else:
        width = max(len(plain(one["what"])) for one in found)
        for one in found:
            mark = "ok   " if one["ok"] else "wrong"
            said = plain(f"{mark} {one['what']:<{width}}  {one['text']}")
            typer.echo(said, err=not one["ok"])
    if not all(one["ok"] for one in found):
        raise typer.Exit(2)


def _look(given: Options) -> list[dict[str, Any]]:
    """Return each thing that was checked, if it is right, and what there is to say about it."""
    from relaybox.cli.checks import checks

    try:
        outbox = given.outbox()
    except RelayboxError as error:
        return [_found("settings", str(error), ok=False)]
    found = [_found("settings", given.sources(outbox), ok=True)]
    for one in checks(outbox, given):
        try:
            found.append(_found(one.what, one.run(), ok=True))
        except RelayboxError as error:
            found.append(_found(one.what, str(error), ok=False))
    return found


def _found(what: str, text: str, *, ok: bool) -> dict[str, Any]:
    return {"what": what, "ok": ok, "text": " ".join(text.split())}


def effective_settings(given: Options) -> Tables:
    """Return the tables of the file: ``relaybox``, ``destinations.NAME``, ``routes.N`` and ``web``."""
    outbox = given.outbox()
    settings, in_file = outbox.settings, _in_file(given)
    file, origin = str(given.file()), given.origin(settings)
    tables = {"relaybox": _general(settings, in_file, file, origin)}
    tables["relaybox"]["database"] = _database(settings, given, in_file, file, origin)
    if given.app:
        tables["relaybox"]["app"] = Shown(_text("app", given.app), "--app")
    for destination in settings.destinations:
        source = file if destination in in_file.destinations else origin
        tables[f"destinations.{destination.name}"] = _destination(destination, outbox, source)
    for number, route in enumerate(settings.routes, 1):
        source = file if route in in_file.routes else origin
        tables[f"routes.{number}"] = _route(route, source)
    return tables | _web(settings, file if settings.web == in_file.web else origin)


def _web(settings: Settings, source: str) -> Tables:
    """Return ``web`` and ``web.users.NAME``, if the web is configured."""
    if not settings.web:
        return {}
    from relaybox.web.settings import WebSettings

    given = WebSettings.of(settings.web)
    tables = {"web": {name: Shown(_text(name, getattr(given, name)), source) for name in settings.web}}
    tables["web"].pop("users", None)
    for user in given.users:
        shown = {"token": user.token, "role": user.role}
        table = {name: Shown(_text(name, one), source) for name, one in shown.items()}
        tables[f"web.users.{user.name}"] = table
    return tables


def _in_file(given: Options) -> Settings:
    """Return what the file says, or the defaults if it is wrong: the application may not read it."""
    from relaybox.core.settings import Settings

    try:
        return given.read()
    except RelayboxError:
        return Settings()


def _general(settings: Settings, in_file: Settings, file: str, app: str) -> dict[str, Shown]:
    from relaybox.core.settings import Settings

    default = Settings()
    shown = {}
    for name in (field.name for field in fields(Settings) if field.name not in TABLES):
        value = getattr(settings, name)
        source = file if value == getattr(in_file, name) else app
        shown[name] = Shown(_text(name, value), DEFAULT if value == getattr(default, name) else source)
    return shown


def _database(settings: Settings, given: Options, in_file: Settings, file: str, app: str) -> Shown:
    sources = {"database": "--database", "database in the file": file, None: DEFAULT}
    source = given.database_source()
    # An application that names its database itself goes before the environment and the file.
    own = settings.database != in_file.database
    return Shown(_text("database", settings.database), app if own else str(sources.get(source, source)))


def _destination(destination: Destination, outbox: Outbox, source: str) -> dict[str, Shown]:
    import warnings

    from relaybox.cli.checks import sink_name
    from relaybox.core.settings import Destination

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ordered = Destination(destination.name, destination.sink).ordered
        default = Destination(destination.name, destination.sink, ordered=destination.ordered)
    shown = {"sink": Shown(json.dumps(sink_name(destination, outbox), ensure_ascii=False), source)}
    for field in fields(Destination):
        if field.name in ("name", "sink"):
            continue
        value = getattr(destination, field.name)
        ordinary = value == (ordered if field.name == "ordered" else getattr(default, field.name))
        shown[field.name] = Shown(_text(field.name, value), DEFAULT if ordinary else source)
    return shown


def _route(route: Route, source: str) -> dict[str, Shown]:
    from relaybox.core.settings import Route

    default = Route(route.events, route.to)
    shown = {}
    for name in (field.name for field in fields(Route)):
        value = getattr(route, name)
        ordinary = name in ("rollout", "shadow") and value == getattr(default, name)
        shown[name] = Shown(_text(name, value), DEFAULT if ordinary else source)
    return shown


def _text(name: str, value: Any) -> str:
    """Return the value as TOML writes it; one that TOML cannot write is named."""
    from relaybox.core.settings import Backoff
    from relaybox.core.values import Secret, Table, mask_url, show_duration

    match value:
        case None:
            return "none"
        case Secret():
            return json.dumps(str(value).removeprefix("Secret(").removesuffix(")"), ensure_ascii=False)
        case Backoff():
            inner = (f"{one.name} = {_text(one.name, getattr(value, one.name))}" for one in fields(value))
            return f"{{ {', '.join(inner)} }}"
        case Table():
            # Their values may be secret, as in the query of a URL.
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
            return _named(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _named(function: Callable[..., Any]) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', '?')}"
