"""Options that several commands share, and how their values are parsed."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar, get_type_hints
from uuid import UUID

import typer

from relaybox.core.commands import command
from relaybox.core.settings import DEFAULT_DATABASE, Settings, database_source, find_file
from relaybox.core.values import mask_url, parse_moment
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.operate.admin import Admin
    from relaybox.outbox import Outbox
    from relaybox.stores.ledger import Filter

T = TypeVar("T")

LogLevel = StrEnum("LogLevel", ("debug", "info", "warning", "error"))
LogFormat = StrEnum("LogFormat", ("text", "json"))


class Status(StrEnum):
    """The states that ``--status`` accepts."""

    pending = "pending"
    due = "due"
    scheduled = "scheduled"
    parked = "parked"
    sending = "sending"
    processing = "processing"
    delivered = "delivered"
    completed = "completed"
    failed = "failed"
    discarded = "discarded"


Schema: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="The tables' schema. Else the configuration's.")
]
Prefix: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TEXT", help="What table names begin with. Else the configuration's.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Yes: TypeAlias = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
DryRun: TypeAlias = Annotated[bool, typer.Option("--dry-run", help="Only say how many there are.")]
Limit: TypeAlias = Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")]
Cursor: TypeAlias = Annotated[str | None, typer.Option(metavar="ID", help="Go on where the last page ended.")]
Since: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TIME", help="Emitted at or after a time, or 1h: so long ago.")
]
Until: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TIME", help="Emitted before a time, or 1h: so long ago.")
]
Rate: TypeAlias = Annotated[
    float | None, typer.Option(metavar="NUMBER", help="No more than so many deliveries a second.")
]
LogLevelOption: TypeAlias = Annotated[LogLevel, typer.Option(help="The least important messages.")]
LogFormatOption: TypeAlias = Annotated[LogFormat, typer.Option(help="Lines, or JSON objects.")]


@dataclass(frozen=True, slots=True)
class Options:
    """The global options as given. An integration with other options derives its own class."""

    database: str | None
    config: str | None
    app: str | None = None

    no_destinations: ClassVar[str] = (
        "no destinations are configured: add a [destinations.NAME] table to relaybox.toml, or name the "
        "application with --app module:outbox; `relaybox init` writes an example"
    )
    no_server: ClassVar[str] = (
        "start it, or choose another with --database, RELAYBOX_DATABASE or relaybox.toml"
    )

    def outbox(self) -> Outbox:
        """Return the application's outbox if one is named, else one made from the settings."""
        from relaybox.cli.application import load_outbox

        return load_outbox(self)

    def settings(self, **flags: str | None) -> Settings:
        """Return the settings, or the application's if one is named; ``flags`` override them."""
        if self.app is not None or (settings := self.read()).app is not None:
            settings = self.outbox().settings
        given: dict[str, Any] = {name: flag for name, flag in flags.items() if flag is not None}
        return replace(settings, **given)

    def read(self) -> Settings:
        """Return the settings of flags, environment and file, without the application's."""
        return Settings.load(self.path(), os.environ, self.database)

    def path(self) -> Path | None:
        """Return the path of ``--config``."""
        return None if self.config is None else Path(self.config)

    def file(self) -> Path | None:
        """Return the configuration file that is read, if any."""
        return find_file(self.path(), os.environ)

    def database_source(self) -> str | None:
        """Return the source of the database's URL, or None if neither flag, environment nor file sets it."""
        return database_source(self.path(), os.environ, self.database)

    def origin(self, settings: Settings) -> str:
        """Describe the source of settings that are not in the file."""
        return f"app {self.app or self.read().app}"

    def sources(self, outbox: Outbox) -> str:
        """Describe the sources that were read, and the file if the application does not read it."""
        file = self.file()
        app = self.app or self.read().app
        if app and file and outbox.file is None:
            return f"app {app}, whose Outbox is given a database and so reads no settings of {file}"
        return ", ".join([str(file) if file else "no file, the defaults", *([f"app {app}"] if app else [])])

    def shown_database(self, settings: Settings) -> str:
        """Return the database's URL without secrets, with a note if it is the default."""
        shown = mask_url(settings.database)
        chosen = self.database_source() is not None or self.settings().database != DEFAULT_DATABASE
        return shown if chosen else f"{shown} (the default; choose with --app or --database)"

    def ask(self, actor: str, work: Callable[[Admin], Awaitable[T]]) -> T:
        """Run ``work`` with an ``Admin`` that has one connection; the audit names ``actor``."""
        import asyncio

        from relaybox.cli.application import open_outbox

        outbox = open_outbox(self)

        async def start() -> T:
            async with outbox.admin(actor, connections=1) as admin:
                return await work(admin)

        return asyncio.run(start())


def options(context: typer.Context) -> Options:
    """Return the global options of the running command."""
    found = context.find_object(Options)
    assert found is not None
    return found


def run(context: typer.Context, work: Callable[[Admin], Awaitable[T]]) -> T:
    """Run ``work`` with an ``Admin`` on the configured database."""
    return options(context).ask(actor(), work)


def actor() -> str:
    """Return ``user@host`` for the audit."""
    import getpass
    import socket

    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"[:200]


def parse_id(text: str) -> UUID:
    """Parse an id; raise ``ConfigError`` if it is not a UUID."""
    try:
        return UUID(text)
    except ValueError:
        fix = f"write the UUID of an event or a delivery, as {command('events list')} prints it"
        raise ConfigError(f"{text!r} is no id: {fix}") from None


def moment(text: str | None, setting: str, direction: int = -1) -> datetime | None:
    """Read a time, or a duration from now, if one was given: into the past with -1, the future with 1."""
    return None if text is None else parse_moment(text, setting, direction)


def criteria(
    status: Annotated[
        Status | None, typer.Option(help="pending is due, scheduled or parked; processing is sending.")
    ] = None,
    destination: Annotated[str | None, typer.Option(metavar="NAME", help="Of this destination.")] = None,
    event_type: Annotated[
        str | None, typer.Option("--type", metavar="NAME", help="Of this event type.")
    ] = None,
    aggregate_type: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of this kind of aggregate.")
    ] = None,
    aggregate_id: Annotated[str | None, typer.Option(metavar="ID", help="Of this aggregate.")] = None,
    key: Annotated[str | None, typer.Option(metavar="TEXT", help="Of this ordering key.")] = None,
    event: Annotated[str | None, typer.Option(metavar="ID", help="Of this event.")] = None,
    since: Since = None,
    until: Until = None,
    error: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Whose last error holds this text.")
    ] = None,
    fingerprint: Annotated[
        str | None, typer.Option(metavar="TEXT", help="That failed so, as `failures` names it.")
    ] = None,
) -> Filter:
    """Return the filter that these options describe."""
    from relaybox.stores.ledger import Filter

    return Filter(
        status=None if status is None else status.value,
        destination=destination,
        event_type=event_type,
        aggregate_type=aggregate_type,
        aggregate_id=aggregate_id,
        ordering_key=key,
        event_id=None if event is None else parse_id(event),
        since=moment(since, "--since"),
        until=moment(until, "--until"),
        error=error,
        fingerprint=fingerprint,
    )


@dataclass(frozen=True, slots=True)
class Bulk:
    """The options of actions on many deliveries."""

    rate: Rate = None
    dry_run: DryRun = False
    yes: Yes = False
    as_json: Json = False


BUNDLES: dict[str, Callable[..., Any]] = {"bulk": Bulk, "filter": criteria}
"""Maps a parameter of a command to the callable that builds its value from several options."""


def bundled(command: Callable[..., None]) -> Callable[..., None]:
    """Replace each bundle parameter of a command with the options it is built from."""
    own = _parameters(command)
    bundles = {each.name: _parameters(BUNDLES[each.name]) for each in own if each.name in BUNDLES}
    options = [option for each in own for option in bundles.get(each.name, [each])]

    @functools.wraps(command)
    def with_bundles(**given: Any) -> None:
        for name, parts in bundles.items():
            given[name] = BUNDLES[name](**{part.name: given.pop(part.name) for part in parts})
        command(**given)

    # Typer reads the options from these.
    with_bundles.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    with_bundles.__annotations__ = {each.name: each.annotation for each in options}
    del with_bundles.__wrapped__
    return with_bundles


def _parameters(of: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(of, include_extras=True, localns={"Filter": Any})
    found = inspect.signature(of).parameters
    return [
        one.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, one in found.items()
    ]
