"""Whether an alias has the tables, asked on Django's own connection."""

from __future__ import annotations

from django.db import Error

from relaybox.contrib.django.databases import connection_of, dialect_of
from relaybox.contrib.django.operations import recorded_version
from relaybox.errors import SchemaError, StoreError
from relaybox.migrations import NEWEST
from relaybox.program import Program


def check_tables(using: str) -> None:
    """Raise where the database cannot be reached, or its tables are missing or too old."""
    connection = connection_of(using)
    fix = f"run `{Program.migrate}{'' if using == 'default' else f' --database {using}'}`"
    try:
        dialect_of(connection)
        version = recorded_version(connection) or 0
    except Error as error:
        raise StoreError(f"database {using!r}: {' '.join(str(error).split())}") from error
    if version == 0:
        raise SchemaError(f"database {using!r}: the tables are missing: {fix}")
    if version < NEWEST:
        needed = f"this release needs {NEWEST}"
        raise SchemaError(f"database {using!r}: the tables are at version {version} and {needed}: {fix}")
