"""Options that several commands take, and the settings they lead to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias, TypeVar

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from relaybox.admin import Admin
    from relaybox.app import Outbox
    from relaybox.config import Settings

T = TypeVar("T")

Schema: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="The tables' schema. Else the configuration's.")
]
Prefix: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TEXT", help="What table names begin with. Else the configuration's.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Options:
    """The global options as they were given. A framework that wraps the command has others, and derives."""

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
        """The application's outbox where one is named, else one made of the settings."""
        from relaybox.cli.application import load_outbox

        return load_outbox(self)

    def settings(self, **flags: str | None) -> Settings:
        """The settings: the application's where one is named, and the flags before all others."""
        if self.app is not None or (settings := self.read()).app is not None:
            settings = self.outbox().settings
        given: dict[str, Any] = {name: flag for name, flag in flags.items() if flag is not None}
        return replace(settings, **given)

    def read(self) -> Settings:
        """The settings without the application: of the flag, the environment and the file."""
        import os

        from relaybox.config import Settings

        return Settings.load(self.path(), os.environ, self.database)

    def name_database(self) -> bool:
        """Whether anything says which database it is, so that it is not the default one."""
        from relaybox.config import DEFAULT_DATABASE

        return self.database_source() is not None or self.settings().database != DEFAULT_DATABASE

    def path(self) -> Path | None:
        """The file that was given."""
        from pathlib import Path

        return None if self.config is None else Path(self.config)

    def file(self) -> Path | None:
        """The file that is read, if any."""
        import os

        from relaybox.config import find_file

        return find_file(self.path(), os.environ)

    def database_source(self) -> str | None:
        """What says which database it is; ``None``: nothing but perhaps the application does."""
        import os

        from relaybox.config import database_source

        return database_source(self.path(), os.environ, self.database)

    def origin(self, settings: Settings) -> str:
        """Where settings come from that are not in the file."""
        return f"app {self.app or self.read().app}"

    def sources(self, outbox: Outbox) -> str:
        """Everything that was read, in words, and the file that an application leaves unread."""
        file = self.file()
        app = self.app or self.read().app
        if app and file and outbox.file is None:
            return f"app {app}, whose Outbox is given a database and so reads no settings of {file}"
        return ", ".join([str(file) if file else "no file, the defaults", *([f"app {app}"] if app else [])])

    def shown_database(self, settings: Settings) -> str:
        """The database without what is secret, and whether it is only the default one."""
        from relaybox.setting import mask_url

        shown = mask_url(settings.database)
        return shown if self.name_database() else f"{shown} (the default; choose with --app or --database)"

    def ask(self, actor: str, work: Callable[[Admin], Awaitable[T]]) -> T:
        """Do the work with the service that the settings lead to."""
        from relaybox.cli.application import ask

        return ask(self, actor, work)


def options(context: typer.Context) -> Options:
    """The global options of the command that is running."""
    found = context.find_object(Options)
    assert found is not None
    return found
