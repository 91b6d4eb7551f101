"""Finds the driver for a connection by type name, so that unused drivers are not imported."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import sqlalchemy as sa

from relaybox.database.drivers.driver import EMIT, Channel, Driver, Names
from relaybox.database.drivers.sqlalchemy import SqlalchemyChannel, connection_of, driver_connection
from relaybox.errors import UnsupportedConnection

Kind: TypeAlias = Literal[
    "driver", "connection", "session", "scoped session", "async driver", "async", "async scoped session"
]


class Found(NamedTuple):
    """How a type is served: by a driver, or by SQLAlchemy."""

    kind: Kind
    driver: Driver | None = None


_DRIVERS: dict[str, tuple[Kind, str]] = {
    "psycopg.Connection": ("driver", "psycopg.Psycopg"),
    "psycopg.AsyncConnection": ("async driver", "psycopg.AsyncPsycopg"),
    "psycopg2.extensions.connection": ("driver", "psycopg2.Psycopg2"),
    "asyncpg.connection.Connection": ("async driver", "asyncpg.Asyncpg"),
    "asyncpg.pool.PoolConnectionProxy": ("async driver", "asyncpg.Asyncpg"),
    "sqlite3.Connection": ("driver", "sqlite3.Sqlite3"),
    "aiosqlite.core.Connection": ("async driver", "sqlite3.Aiosqlite"),
    "pymysql.connections.Connection": ("driver", "pymysql.Pymysql"),
    "MySQLdb.connections.Connection": ("driver", "mysqlclient.Mysqlclient"),
    "asyncmy.connection.Connection": ("async driver", "asyncmy.Asyncmy"),
}
_SQLALCHEMY: dict[str, Kind] = {
    "sqlalchemy.engine.base.Connection": "connection",
    "sqlalchemy.orm.session.Session": "session",
    "sqlalchemy.orm.scoping.scoped_session": "scoped session",
    "sqlalchemy.ext.asyncio.engine.AsyncConnection": "async",
    "sqlalchemy.ext.asyncio.session.AsyncSession": "async",
    "sqlalchemy.ext.asyncio.scoping.async_scoped_session": "async scoped session",
}
_DJANGO = "on Django's connections write `from relaybox.contrib.django import {django}`"
_FIXES = {
    "sqlalchemy.engine.base.Engine": (
        "pass a connection or session, not an engine:"
        " `with engine.begin() as connection: {owner}.{sync}(connection, …)`"
    ),
    "sqlalchemy.ext.asyncio.engine.AsyncEngine": (
        "pass a connection or session, not an engine:"
        " `async with engine.begin() as connection: await {owner}.{asynchronous}(connection, …)`"
    ),
    "sqlalchemy.orm.session.sessionmaker": "call it and pass the session",
    "sqlalchemy.ext.asyncio.session.async_sessionmaker": "call it and pass the session",
    "sqlalchemy.pool.base._ConnectionFairy": "pass its driver_connection, or a SQLAlchemy connection",
    "psycopg.Cursor": "pass cursor.connection",
    "psycopg.AsyncCursor": "pass cursor.connection",
    "psycopg2.extensions.cursor": "pass cursor.connection",
    "sqlite3.Cursor": "pass cursor.connection",
    "asyncpg.pool.Pool": "acquire a connection and pass that",
    "django.utils.connection.ConnectionProxy": _DJANGO,
    "django.db.backends.base.base.BaseDatabaseWrapper": _DJANGO,
}
_ACCEPTED = (
    "{sync} takes a SQLAlchemy Session, scoped_session or Connection, a SQLModel Session, or a connection of"
    " psycopg, psycopg2, sqlite3, PyMySQL or mysqlclient; {asynchronous} a SQLAlchemy AsyncSession,"
    " async_scoped_session or AsyncConnection, or a connection of psycopg, asyncpg, aiosqlite or asyncmy"
)

_found: dict[type, Found] = {}
_drivers: dict[str, Driver] = {}


def find(connection: Any, names: Names = EMIT) -> Found:
    """Return what serves this connection or session, or raise ``UnsupportedConnection``."""
    kind = type(connection)
    return _found.get(kind) or _remember(kind, names)


def channel(connection: Any, insert: sa.Insert, names: Names = EMIT, *, flush: bool = True) -> Channel:
    """Return the channel for a synchronous connection or session; ``flush`` a session before use."""
    kind, driver = find(connection, names)
    if driver is not None and kind == "driver":
        return Channel(driver, connection, names)
    match kind:
        case "connection":
            return _over(connection, None, names)
        case "session":
            return _over(connection_of(connection, insert), connection if flush else None, names)
        case "scoped session":
            return channel(connection(), insert, names, flush=flush)
    return _mismatch(connection, "is asynchronous", names.asynchronous, names.sync)


def async_channel(connection: Any, names: Names = EMIT) -> Channel:
    """Return the channel for an asynchronous driver's connection."""
    kind, driver = find(connection, names)
    if driver is not None and kind == "async driver":
        return Channel(driver, connection, names)
    return _mismatch(connection, "is synchronous", names.sync, names.asynchronous)


def async_sqlalchemy(connection: Any, names: Names = EMIT) -> Any:
    """Return the SQLAlchemy object that has ``run_sync``, or None for another connection."""
    kind = find(connection, names).kind
    return connection if kind == "async" else connection() if kind == "async scoped session" else None


def _over(connection: sa.Connection, session: Any, names: Names) -> SqlalchemyChannel:
    beneath = driver_connection(connection)
    driver = find(beneath, names).driver
    if driver is None:
        accepted = _ACCEPTED.format_map(names._asdict())
        raise UnsupportedConnection(f"SQLAlchemy over {name_of(type(beneath))} is not supported; {accepted}")
    return SqlalchemyChannel(driver, connection, session, names)


def _remember(kind: type, names: Names) -> Found:
    words = names._asdict()
    for base in kind.__mro__:
        name = name_of(base)
        if name in _SQLALCHEMY:
            return _found.setdefault(kind, Found(_SQLALCHEMY[name]))
        if name in _DRIVERS:
            served, path = _DRIVERS[name]
            return _found.setdefault(kind, Found(served, _driver(path)))
        if name in _FIXES:
            raise UnsupportedConnection(f"{name_of(kind)}: {_FIXES[name].format_map(words)}")
    accepted = _ACCEPTED.format_map(words)
    raise UnsupportedConnection(
        f"{name_of(kind)} is not a connection or session that Relaybox supports; {accepted}"
    )


def _driver(path: str) -> Driver:
    module, _, name = path.partition(".")
    made: Driver = getattr(import_module(f"relaybox.database.drivers.{module}"), name)()
    return _drivers.setdefault(path, made)


def name_of(kind: type) -> str:
    """Return the qualified name of a type, with its module unless it is a builtin."""
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _mismatch(connection: Any, problem: str, right: str, wrong: str) -> NoReturn:
    raise UnsupportedConnection(f"{name_of(type(connection))} {problem}: use {right}, not {wrong}")
