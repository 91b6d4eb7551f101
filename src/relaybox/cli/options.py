"""Options that several commands take, and the settings they lead to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

if TYPE_CHECKING:
    from pathlib import Path

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

    def settings(self, **flags: str | None) -> Settings:
        """The settings, from the flags that were given, the environment and the file."""
        import os

        from relaybox.config import Settings

        settings = Settings.load(self._path(), os.environ, self.database)
        given: dict[str, Any] = {name: flag for name, flag in flags.items() if flag is not None}
        return replace(settings, **given)

    def name_database(self) -> bool:
        """Whether the flag, the environment or the file says which database it is."""
        import os

        from relaybox.config import names_database

        return names_database(self._path(), os.environ, self.database)

    def _path(self) -> Path | None:
        from pathlib import Path

        return None if self.config is None else Path(self.config)


def options(context: typer.Context) -> Options:
    """The global options of the command that is running."""
    found = context.find_object(Options)
    assert found is not None
    return found
