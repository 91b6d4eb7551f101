"""Adapt Django's connections to the core: dialects, URLs, statements, errors, times and bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote, urlencode
from zoneinfo import ZoneInfo

import sqlalchemy as sa
from django.conf import settings
from django.db import Error, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.database.dialects import DIALECTS, MARIADB, MYSQL, POSTGRESQL, SQLITE, Dialect
from relaybox.database.drivers.driver import failed, translated
from relaybox.database.schema import Tables, make_tables
from relaybox.database.statements.delivery import Query, Statements
from relaybox.database.steps import Row, Steps, drive
from relaybox.errors import ConfigError, did_you_mean

T = TypeVar("T")

_OWN = {"isolation_level", "server_side_binding", "pool", "assume_role", "init_command", "transaction_mode"}
"""Options for Django, not for the server."""

VENDORS = ("postgresql", "mysql", "sqlite")


def connection_of(using: str) -> BaseDatabaseWrapper:
    """Return this thread's connection to an alias. Raise ``ConfigError`` if the alias does not exist."""
    if using not in connections.settings:
        raise ConfigError(f"using = {using!r}: no database has this name{did_you_mean(using, connections)}")
    return connections[using]


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """Return a connection's dialect; ask the server, because MySQL and MariaDB share a vendor."""
    match connection.vendor:
        case "postgresql":
            return POSTGRESQL
        case "sqlite":
            return SQLITE
        case "mysql":
            return MARIADB if connection.mysql_is_mariadb else MYSQL
    raise unsupported(connection)


def in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """True if a transaction is open. Raise ``TransactionFailed`` if it can only be rolled back."""
    if connection.needs_rollback:
        raise failed("Django")
    return connection.in_atomic_block or not connection.get_autocommit()


def url_of(using: str) -> str:
    """Return the URL of an alias, for a relay that opens its own connections."""
    connection = connection_of(using)
    given = connection.settings_dict
    if connection.vendor == "sqlite":
        return "sqlite://" if connection.is_in_memory_db() else f"sqlite:///{quote(str(given['NAME']))}"
    if connection.vendor not in ("postgresql", "mysql"):
        raise unsupported(connection)
    user, password = (quote(str(given.get(part) or ""), safe="") for part in ("USER", "PASSWORD"))
    account = f"{user}:{password}@" if password else f"{user}@" if user else ""
    host = str(given.get("HOST") or "")
    place = "" if host.startswith("/") else f"[{host}]" if ":" in host else host
    port = f":{given['PORT']}" if given.get("PORT") and place else ""
    options = _url_options(connection.vendor, given)
    query = f"?{urlencode(options, quote_via=quote)}" if options else ""
    name = quote(str(given.get("NAME") or ""), safe="")
    return f"{connection.vendor}://{account}{place}{port}/{name}{query}"


def _url_options(vendor: str, given: Mapping[str, Any]) -> dict[str, Any]:
    written, host = given.get("OPTIONS", {}), str(given.get("HOST") or "")
    options = {key: value for key, value in written.items() if key not in _OWN}
    if vendor == "mysql":
        ssl = options.pop("ssl", None)
        options |= {f"ssl_{key}": value for key, value in ssl.items()} if isinstance(ssl, Mapping) else {}
        return {**options, "unix_socket": host} if host.startswith("/") else options
    if role := written.get("assume_role"):
        options["options"] = f"{options.get('options', '')} -c role={role}".strip()
    if host.startswith("/"):
        options |= {"host": host, "port": given["PORT"]} if given.get("PORT") else {"host": host}
    return options


def unsupported(connection: BaseDatabaseWrapper) -> ConfigError:
    """Return the error for a connection whose vendor is not one of ``VENDORS``."""
    known = "PostgreSQL, MariaDB, MySQL and SQLite"
    return ConfigError(f"database {connection.alias!r} is on {connection.vendor}; an outbox needs {known}")


@functools.cache
def get_tables() -> Tables:
    """Return the core's tables, with the names that the models use."""
    return make_tables(sa.MetaData())


def get_statements(connection: BaseDatabaseWrapper) -> Statements:
    """Return the statements for a connection's dialect, with Django's ``%s`` placeholders."""
    return _statements(dialect_of(connection).name)


@functools.cache
def _statements(dialect: str) -> Statements:
    return Statements(get_tables(), DIALECTS[dialect], "format")


def execute(connection: BaseDatabaseWrapper, sql: str, params: Sequence[Any] | None = None) -> list[Row]:
    """Execute a statement and return its rows. Write ``%`` once if there are no parameters."""
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        rows: list[Row] = cursor.fetchall() if cursor.description else []
    translate = _translate(connection) if rows else None
    return rows if translate is None else [tuple(map(translate, row)) for row in rows]


def execute_ours(connection: BaseDatabaseWrapper, query: Query) -> list[Row]:
    """Execute a statement and return its rows. Translate Django's errors to ours where possible."""
    try:
        return execute(connection, *query)
    except Error as error:
        raise_ours(error)


def run_ours(connection: BaseDatabaseWrapper, steps: Steps[T]) -> T:
    """Drive the steps on the connection. Translate Django's errors to ours where possible."""
    return drive(steps, lambda queries: [execute_ours(connection, query) for query in queries])


def raise_ours(error: Error) -> NoReturn:
    """Raise our counterpart of Django's error, or Django's error if there is none."""
    beneath = error.__cause__ or error
    ours = translated(beneath)
    if ours is beneath:
        raise error
    raise ours from error


def driver_error(error: Exception) -> Exception:
    """Return the driver's error inside Django's error, or the error itself."""
    return error.__cause__ if isinstance(error.__cause__, Exception) else error


def _translate(connection: BaseDatabaseWrapper) -> Callable[[Any], Any] | None:
    """Return a function that converts the backend's times and bytes to the core's, or None if they match."""
    if connection.vendor == "sqlite":
        return _time_as_text
    if connection.vendor == "postgresql":
        zone = None if settings.USE_TZ else ZoneInfo(connection.timezone_name)
        if zone is not None or connection.Database.__name__ == "psycopg2":
            return functools.partial(_of_postgresql, zone)
    return None


def _time_as_text(value: Any) -> Any:
    """Return a time as text: Django parses declared time columns but not expressions."""
    return SQLITE.to_time(value.replace(tzinfo=UTC)) if isinstance(value, datetime) else value


def _of_postgresql(zone: ZoneInfo | None, value: Any) -> Any:
    """Return psycopg2's ``memoryview`` as bytes, and add the session's zone to naive times."""
    if isinstance(value, memoryview):
        return value.tobytes()
    return value.replace(tzinfo=zone) if isinstance(value, datetime) and value.tzinfo is None else value
