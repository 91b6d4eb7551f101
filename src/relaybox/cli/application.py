"""The outbox that a command works with, its database, and the operators' service on it."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any, TypeVar

import sqlalchemy as sa

from relaybox.cli.options import Options
from relaybox.core.imports import load, told_where
from relaybox.core.settings import Settings
from relaybox.core.values import reveal_database
from relaybox.database.migrations import check
from relaybox.database.schema import make_tables
from relaybox.errors import ConfigError, SchemaError, StoreError
from relaybox.operate.admin import Admin
from relaybox.outbox import Outbox
from relaybox.stores.open import open_store
from relaybox.stores.sql.ledger import SqlLedger

T = TypeVar("T")

FIX = "write where the application's Outbox is, such as --app shop.outbox:outbox"


def load_outbox(given: Options) -> Outbox:
    """Return the outbox of ``--app`` or of ``app`` in the file; without either, one made of the settings."""
    path = given.app
    if path is None:
        settings = given.read()
        path = settings.app
        if path is None:
            # What is not in the application may still name functions of it, as handler:module:function.
            _search_here()
            outbox = Outbox(**{field.name: getattr(settings, field.name) for field in fields(Settings)})
            if (file := given.file()) is not None:
                outbox.follow(file)
            return outbox
    outbox = _application(path, given)
    if given.database is not None:
        url = reveal_database(given.database, os.environ)
        outbox.settings = replace(outbox.settings, database=url)
    return outbox


def open_outbox(given: Options) -> Outbox:
    """Return the outbox of the options; raise if its tables are missing or too old."""
    outbox = given.outbox()
    check_tables(outbox.settings, given)
    return outbox


def check_tables(settings: Settings, given: Options) -> None:
    """Raise if the database cannot be reached, or its tables are missing or too old; the error names it."""
    try:
        check(settings.database, schema=settings.schema, prefix=settings.prefix)
    except SchemaError as error:
        raise SchemaError(f"{given.shown_database(settings)}: {error}") from None
    except StoreError as error:
        raise StoreError(f"{error}; {given.no_server}") from error


def ask(given: Options, actor: str, work: Callable[[Admin], Awaitable[T]]) -> T:
    """Do the work with the operators' service on a connection of its own; the audit names ``actor``."""
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


def _application(path: str, given: Options) -> Outbox:
    _search_here()
    with _flags_in_environment(given):
        found = load(path, f"app = {path!r}", FIX)
        if not isinstance(found, Outbox) and callable(found):
            found = _called(found, path)
    if not isinstance(found, Outbox):
        raise ConfigError(f"app = {path!r}: it is no Outbox but of type {type(found).__name__}; {FIX}")
    return found


def _called(factory: Any, path: str) -> Any:
    if _needs_arguments(factory):
        raise ConfigError(f"app = {path!r}: it is no Outbox but a function that needs arguments; {FIX}")
    try:
        return factory()
    except Exception as error:
        raise ConfigError(f"app = {path!r}: the call failed: {told_where(error)}") from error


def _needs_arguments(function: Any) -> bool:
    try:
        inspect.signature(function).bind()
    except TypeError:
        return True
    except ValueError:
        # Some that are written in C do not say.
        return False
    return False


def _search_here() -> None:
    """Find modules where the command is run, as uvicorn and celery do."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


@contextmanager
def _flags_in_environment(given: Options) -> Iterator[None]:
    """Set what the flags say in the environment, for an ``Outbox()`` of the application being imported."""
    flags = {"RELAYBOX_DATABASE": given.database, "RELAYBOX_CONFIG": given.config}
    before = dict(os.environ)
    os.environ.update({name: flag for name, flag in flags.items() if flag is not None})
    try:
        yield
    finally:
        for name in flags:
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
