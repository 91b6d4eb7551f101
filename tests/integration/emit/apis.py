"""Every transaction API that ``emit`` takes, behind one interface, so that one suite covers them all.

The interface is asynchronous; synchronous APIs answer at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import cache
from typing import Any

import aiosqlite
import asyncmy
import asyncpg
import psycopg
import psycopg2
import pymysql
import sqlalchemy as sa
import sqlmodel
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import (
    AsyncConnection,
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from relaybox import Emitted, Outbox
from tests.databases import POSTGRESQL

try:
    import MySQLdb
except ImportError:  # it has no wheel for Linux
    MySQLdb = None


class Api:
    """A synchronous DB-API connection; the others say what is different."""

    asynchronous = False
    begins_by_itself = True
    can_be_closed = True
    sqlalchemy = False

    def __init__(self, name: str, kinds: tuple[str, ...], connect: Callable[[str, bool], Any]) -> None:
        self.name = name
        self.kinds = kinds
        self._connect = connect

    async def open(self, url: str, *, autocommit: bool = False) -> Any:
        return self._connect(url, autocommit)

    async def emit(self, outbox: Outbox, connection: Any, *args: Any, **options: Any) -> Emitted:
        return outbox.emit(connection, *args, **options)

    async def emit_many(self, outbox: Outbox, connection: Any, calls: Any, **options: Any) -> list[Emitted]:
        return outbox.emit_many(connection, calls, **options)

    async def run(self, connection: Any, sql: str) -> list[Any]:
        cursor = connection.cursor()
        cursor.execute(sql)
        rows = list(cursor.fetchall()) if cursor.description else []
        cursor.close()
        return rows

    async def begin(self, connection: Any) -> None:
        """Begin a transaction as an application does; do nothing if the driver begins it."""

    async def savepoint(self, connection: Any) -> Callable[[], Awaitable[Any]]:
        """Open a savepoint; what is returned rolls it back."""
        await self.run(connection, "SAVEPOINT one")

        async def roll_back() -> None:
            await self.run(connection, "ROLLBACK TO SAVEPOINT one")

        return roll_back

    async def commit(self, connection: Any) -> None:
        connection.commit()

    async def rollback(self, connection: Any) -> None:
        connection.rollback()

    async def close(self, connection: Any) -> None:
        # Some drivers refuse to be closed twice.
        with suppress(Exception):
            connection.close()

    def __repr__(self) -> str:
        return self.name


class AsyncApi(Api):
    """An asynchronous driver's connection."""

    asynchronous = True

    async def open(self, url: str, *, autocommit: bool = False) -> Any:
        return await self._connect(url, autocommit)

    async def emit(self, outbox: Outbox, connection: Any, *args: Any, **options: Any) -> Emitted:
        return await outbox.aemit(connection, *args, **options)

    async def emit_many(self, outbox: Outbox, connection: Any, calls: Any, **options: Any) -> list[Emitted]:
        return await outbox.aemit_many(connection, calls, **options)

    async def run(self, connection: Any, sql: str) -> list[Any]:
        cursor = connection.cursor()
        await cursor.execute(sql)
        rows = list(await cursor.fetchall()) if cursor.description else []
        await cursor.close()
        return rows

    async def commit(self, connection: Any) -> None:
        await connection.commit()

    async def rollback(self, connection: Any) -> None:
        await connection.rollback()

    async def close(self, connection: Any) -> None:
        await connection.close()


class Aiosqlite(AsyncApi):
    async def run(self, connection: Any, sql: str) -> list[Any]:
        return list(await connection.execute_fetchall(sql))


class Asyncmy(AsyncApi):
    async def close(self, connection: Any) -> None:
        with suppress(Exception):
            await connection.ensure_closed()


class Asyncpg(AsyncApi):
    begins_by_itself = False

    async def run(self, connection: Any, sql: str) -> list[Any]:
        return list(await connection.fetch(sql))

    async def begin(self, connection: Any) -> None:
        await connection.execute("BEGIN")

    async def commit(self, connection: Any) -> None:
        await connection.execute("COMMIT")

    async def rollback(self, connection: Any) -> None:
        await connection.execute("ROLLBACK")


class AsyncpgPool(Asyncpg):
    async def open(self, url: str, *, autocommit: bool = False) -> Any:
        pool = await asyncpg.create_pool(url, min_size=1, max_size=1)
        connection = await pool.acquire()
        self._pools = {**getattr(self, "_pools", {}), id(connection): pool}
        return connection

    async def close(self, connection: Any) -> None:
        if pool := self._pools.pop(id(connection), None):
            await pool.release(connection)
            pool.terminate()


@cache
def engine(create: Callable[..., Any], url: str, driver: str, autocommit: bool) -> Any:
    """Kept, because an engine asks its database some questions when it first connects."""
    options = {"isolation_level": "AUTOCOMMIT"} if autocommit else {}
    return create(sa.make_url(url).set(drivername=driver), poolclass=sa.NullPool, **options)


class Sqlalchemy(Api):
    """A SQLAlchemy connection or session."""

    sqlalchemy = True

    def __init__(
        self, name: str, kinds: tuple[str, ...], driver: str, make: Callable[[Any], Any], closes: bool = True
    ) -> None:
        super().__init__(name, kinds, lambda url, autocommit: None)
        self._driver = driver
        self._make = make
        self.can_be_closed = closes

    async def open(self, url: str, *, autocommit: bool = False) -> Any:
        return self._make(engine(create_engine, url, self._driver, autocommit))

    async def run(self, connection: Any, sql: str) -> list[Any]:
        target = connection if isinstance(connection, sa.Connection) else connection.connection()
        result = target.exec_driver_sql(sql)
        return list(result.fetchall()) if result.returns_rows else []

    async def savepoint(self, connection: Any) -> Callable[[], Awaitable[Any]]:
        nested = connection.begin_nested()

        async def roll_back() -> None:
            nested.rollback()

        return roll_back


class AsyncSqlalchemy(AsyncApi, Sqlalchemy):
    async def open(self, url: str, *, autocommit: bool = False) -> Any:
        made = self._make(engine(create_async_engine, url, self._driver, autocommit))
        return await made if isinstance(made, AsyncConnection) else made

    async def run(self, connection: Any, sql: str) -> list[Any]:
        target = connection if isinstance(connection, AsyncConnection) else await connection.connection()
        result = await target.exec_driver_sql(sql)
        return list(result.fetchall()) if result.returns_rows else []

    async def savepoint(self, connection: Any) -> Callable[[], Awaitable[Any]]:
        nested = await connection.begin_nested()
        roll_back: Callable[[], Awaitable[Any]] = nested.rollback
        return roll_back


def _psycopg2(url: str, autocommit: bool) -> Any:
    connection = psycopg2.connect(url)
    connection.autocommit = autocommit
    return connection


def _sqlite(connect: Any, **options: Any) -> Callable[[str, bool], Any]:
    def open_file(url: str, autocommit: bool) -> Any:
        path = str(sa.make_url(url).database)
        return connect(path, isolation_level=None if autocommit else "", **options)

    return open_file


def _mysql(connect: Any) -> Callable[[str, bool], Any]:
    def log_in(url: str, autocommit: bool) -> Any:
        account = sa.make_url(url).translate_connect_args(username="user")
        return connect(**{"password": "", **account}, autocommit=autocommit, charset="utf8mb4")

    return log_in


def _scoped(engine: Any) -> Any:
    # One scope for the whole test, which uses threads.
    return scoped_session(sessionmaker(engine), scopefunc=lambda: 0)


def _async_scoped(engine: Any) -> Any:
    # As above.
    return async_scoped_session(async_sessionmaker(engine), scopefunc=lambda: 0)


SYNC_DRIVERS = {
    "psycopg": (POSTGRESQL, "postgresql+psycopg"),
    "psycopg2": (POSTGRESQL, "postgresql+psycopg2"),
    "pymysql": (("mariadb",), "mysql+pymysql"),
    **({"mysqlclient": (("mariadb",), "mysql+mysqldb")} if MySQLdb else {}),
    "sqlite3": (("sqlite",), "sqlite+pysqlite"),
}
ASYNC_DRIVERS = {
    "psycopg": (POSTGRESQL, "postgresql+psycopg"),
    "asyncpg": (POSTGRESQL, "postgresql+asyncpg"),
    "asyncmy": (("mariadb",), "mysql+asyncmy"),
    "aiosqlite": (("sqlite",), "sqlite+aiosqlite"),
}
SYNC_KINDS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "Session": (Session, False),
    "scoped_session": (_scoped, False),
    "Connection": (lambda engine: engine.connect(), True),
    "SQLModel": (sqlmodel.Session, False),
}
ASYNC_KINDS: dict[str, tuple[Callable[[Any], Any], bool]] = {
    "AsyncSession": (AsyncSession, False),
    "async_scoped_session": (_async_scoped, False),
    "AsyncConnection": (lambda engine: engine.connect(), True),
}

APIS: list[Api] = [
    Api("psycopg", POSTGRESQL, lambda url, alone: psycopg.connect(url, autocommit=alone)),
    AsyncApi(
        "psycopg-async", POSTGRESQL, lambda url, alone: psycopg.AsyncConnection.connect(url, autocommit=alone)
    ),
    Api("psycopg2", POSTGRESQL, _psycopg2),
    Asyncpg("asyncpg", POSTGRESQL, lambda url, _: asyncpg.connect(url)),
    AsyncpgPool("asyncpg-pool", POSTGRESQL, lambda url, _: asyncpg.connect(url)),
    Api("pymysql", ("mariadb",), _mysql(pymysql.connect)),
    *([Api("mysqlclient", ("mariadb",), _mysql(MySQLdb.connect))] if MySQLdb else []),
    Asyncmy("asyncmy", ("mariadb",), _mysql(asyncmy.connect)),
    Api("sqlite3", ("sqlite",), _sqlite(sqlite3.connect, check_same_thread=False)),
    Aiosqlite("aiosqlite", ("sqlite",), _sqlite(aiosqlite.connect)),
    *(
        Sqlalchemy(f"{kind}-{name}", kinds, driver, make, closes)
        for kind, (make, closes) in SYNC_KINDS.items()
        for name, (kinds, driver) in SYNC_DRIVERS.items()
    ),
    *(
        AsyncSqlalchemy(f"{kind}-{name}", kinds, driver, make, closes)
        for kind, (make, closes) in ASYNC_KINDS.items()
        for name, (kinds, driver) in ASYNC_DRIVERS.items()
    ),
]
# The older server, and the second drivers of a database, with the plain sessions and connections only.
THIN = ("scoped_session", "SQLModel", "async_scoped_session")
SECOND = ("psycopg2", "mysqlclient")
PLACES = [
    (api, kind)
    for api in APIS
    for kind in api.kinds
    if not api.name.startswith(THIN) or (kind != "postgresql-15" and not api.name.endswith(SECOND))
]
PLAIN = tuple(api.name for api in APIS if not isinstance(api, Sqlalchemy | AsyncSqlalchemy))
SESSIONS = ("Session-psycopg", "scoped_session-sqlite3", "Connection-pymysql", "SQLModel-sqlite3")
ASYNC_SESSIONS = ("AsyncSession-asyncpg", "async_scoped_session-aiosqlite", "AsyncConnection-asyncmy")


def fast(api: Api, kind: str) -> bool:
    """True if `make test` runs it: every driver and every kind of session once."""
    return api.name in (*PLAIN, *SESSIONS, *ASYNC_SESSIONS) and kind != "postgresql-15"
