"""The database behind a command: whether its tables are there, and the operators' service on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import sqlalchemy as sa

from relaybox.admin import Admin
from relaybox.cli.options import Options
from relaybox.config import Settings
from relaybox.errors import SchemaError, StoreError
from relaybox.migrations import check
from relaybox.parts import open_store
from relaybox.schema import make_tables
from relaybox.stores.ledger import SqlLedger

T = TypeVar("T")


def check_tables(settings: Settings, given: Options) -> None:
    """Raise where the database cannot be reached, or its tables are missing or too old; it is named."""
    try:
        check(settings.database, schema=settings.schema, prefix=settings.prefix)
    except SchemaError as error:
        raise SchemaError(f"{given.shown_database(settings)}: {error}") from None
    except StoreError as error:
        raise StoreError(f"{error}; {given.no_server}") from error


def ask(given: Options, actor: str, work: Callable[[Admin], Awaitable[T]]) -> T:
    """Do the work with the service, on a connection of its own; ``actor`` is who the audit will name."""
    settings = given.settings()
    check_tables(settings, given)
    tables = make_tables(sa.MetaData(), schema=settings.schema, prefix=settings.prefix)

    async def start() -> T:
        store = open_store(settings.database, tables, connections=1)
        try:
            return await work(Admin(SqlLedger(store), settings.destinations, actor))
        finally:
            await store.close()

    return asyncio.run(start())
