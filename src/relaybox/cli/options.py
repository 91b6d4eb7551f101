"""Options that several commands take, and the settings they lead to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from pathlib import Path

    from relaybox.app import Outbox
    from relaybox.config import Settings

Schema: TypeAlias = Annotated[
    str | None, typer.Option(metavar="NAME", help="The tables' schema. Else the configuration's.")
]
Prefix: TypeAlias = Annotated[
    str | None, typer.Option(metavar="TEXT", help="What table names begin with. Else the configuration's.")
]
Json: TypeAlias = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True)
class Options:
    """The global options as they were given."""

    database: str | None
    config: str | None
    app: str | None = None

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
        import os

        from relaybox.config import DEFAULT_DATABASE, database_source

        named = database_source(self.path(), os.environ, self.database) is not None
        return named or self.settings().database != DEFAULT_DATABASE

    def path(self) -> Path | None:
        """The file that was given."""
        from pathlib import Path

        return None if self.config is None else Path(self.config)


def options(context: typer.Context) -> Options:
    """The global options of the command that is running."""
    found = context.find_object(Options)
    assert found is not None
    return found
