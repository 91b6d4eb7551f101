"""Whether the tables are there, and what to do where they are not."""

from __future__ import annotations

from relaybox.cli.options import Options
from relaybox.config import Settings
from relaybox.errors import SchemaError, StoreError
from relaybox.migrations import check
from relaybox.setting import mask_url

FIX = "start it, or choose another with --database, RELAYBOX_DATABASE or relaybox.toml"


def check_tables(settings: Settings, given: Options) -> None:
    """Raise where the database cannot be reached, or its tables are missing or too old; it is named."""
    try:
        check(settings.database, schema=settings.schema, prefix=settings.prefix)
    except SchemaError as error:
        raise SchemaError(f"{shown_database(settings, given)}: {error}") from None
    except StoreError as error:
        raise StoreError(f"{error}; {FIX}") from error


def shown_database(settings: Settings, given: Options) -> str:
    """The database without what is secret, and whether it is only the default one."""
    shown = mask_url(settings.database)
    return shown if given.name_database() else f"{shown} (the default; choose with --database)"
