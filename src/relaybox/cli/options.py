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
from relaybox.core.text import printable
from relaybox.core.values import mask_url, parse_moment
from relaybox.errors import ConfigError

if TYPE_CHECKING:
    from relaybox.operate.admin import Admin
    from relaybox.outbox import Outbox
    from relaybox.stores.ledger import Filter

T = TypeVar("T")


def option(metavar: str, help: str, *names: str, **more: Any) -> Any:
    """Return an option that takes a value; its name is that of the parameter unless ``names`` are given."""
    return typer.Option(*names, metavar=metavar, help=help, **more)


def flag(help: str, *names: str) -> Any:
    """Return a flag that has no opposite, as typer would add it to one without ``names``."""
    return typer.Option(*names, help=help)


Status = StrEnum(
    "Status", "pending due scheduled parked sending processing delivered completed failed discarded"
)
"""The states that ``--status`` accepts."""

Schema: TypeAlias = Annotated[str | None, option("NAME", "The tables' schema. Else the configuration's.")]
Prefix: TypeAlias = Annotated[
    str | None, option("TEXT", "What table names begin with. Else the configuration's.")
]
Json: TypeAlias = Annotated[bool, flag("Print JSON.", "--json")]
Yes: TypeAlias = Annotated[bool, flag("Do not ask.", "--yes", "-y")]
DryRun: TypeAlias = Annotated[bool, flag("Only say how many there are.", "--dry-run")]
Limit: TypeAlias = Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")]
Cursor: TypeAlias = Annotated[str | None, option("ID", "Go on where the last page ended.")]
Since: TypeAlias = Annotated[str | None, option("TIME", "Emitted at or after a time, or 1h: so long ago.")]
Until: TypeAlias = Annotated[str | None, option("TIME", "Emitted before a time, or 1h: so long ago.")]
Rate: TypeAlias = Annotated[float | None, option("NUMBER", "No more than so many deliveries a second.")]


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
    """Return ``user@host`` for the audit, with the name that the environment claims if it is another."""
    import pwd
    import socket

    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        user = str(os.getuid())
    claimed = os.environ.get("SUDO_USER") or os.environ.get("LOGNAME") or user
    claim = "" if claimed == user else f" ({printable(claimed, '?')})"
    return f"{user}@{socket.gethostname()}{claim}"[:200]


def parse_id(text: str) -> UUID:
    """Parse an id; raise ``ConfigError`` if it is not a UUID."""
    try:
        return UUID(text)
    except ValueError:
        fix = f"write the UUID of an event or a delivery, as {command('events list')} prints it"
        raise ConfigError(f"{text!r} is not an id: {fix}") from None


def moment(text: str | None, setting: str, direction: int = -1) -> datetime | None:
    """Read a time, or a duration from now, if one was given: into the past with -1, the future with 1."""
    return None if text is None else parse_moment(text, setting, direction)


CRITERIA: dict[str, Any] = {
    "status": Annotated[
        Status | None, typer.Option(help="pending is due, scheduled or parked; processing is sending.")
    ],
    "destination": Annotated[str | None, option("NAME", "Of this destination.")],
    "event_type": Annotated[str | None, option("NAME", "Of this event type.", "--type")],
    "aggregate_type": Annotated[str | None, option("NAME", "Of this kind of aggregate.")],
    "aggregate_id": Annotated[str | None, option("ID", "Of this aggregate.")],
    "ordering_key": Annotated[str | None, option("TEXT", "Of this ordering key.", "--key")],
    "event_id": Annotated[str | None, option("ID", "Of this event.", "--event")],
    "since": Since,
    "until": Until,
    "error": Annotated[str | None, option("TEXT", "Whose last error holds this text.")],
    "fingerprint": Annotated[str | None, option("TEXT", "That failed so, as `failures` names it.")],
}
"""The options that describe a filter, by its fields."""


def criteria(**given: Any) -> Filter:
    """Return the filter that these options describe."""
    from relaybox.stores.ledger import Filter

    status, event_id = given["status"], given["event_id"]
    given["status"] = None if status is None else status.value
    given["event_id"] = None if event_id is None else parse_id(event_id)
    return Filter(**given | {name: moment(given[name], f"--{name}") for name in ("since", "until")})


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
    keyword = inspect.Parameter.KEYWORD_ONLY
    if of is criteria:
        return [
            inspect.Parameter(name, keyword, default=None, annotation=CRITERIA[name]) for name in CRITERIA
        ]
    hints = get_type_hints(of, include_extras=True)
    found = inspect.signature(of).parameters
    return [one.replace(kind=keyword, annotation=hints[name]) for name, one in found.items()]
