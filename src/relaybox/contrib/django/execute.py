"""Statements of the core on Django's own connection: what goes in, and what comes back as the core's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, TypeAlias
from zoneinfo import ZoneInfo

import sqlalchemy as sa
from django.conf import settings
from django.db import Error
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.emit.drive import translated
from relaybox.schema import Tables, make_tables
from relaybox.stores.dialects import SQLITE, Dialect
from relaybox.stores.statements import Query, Statements

Row: TypeAlias = Sequence[Any]


@functools.cache
def get_tables() -> Tables:
    """The tables, under the names that the models have."""
    return make_tables(sa.MetaData())


_statements: dict[str, Statements] = {}


def get_statements(dialect: Dialect) -> Statements:
    """The statements for a kind of database; every backend of Django takes ``%s``."""
    found = _statements.get(dialect.name)
    return found or _statements.setdefault(dialect.name, Statements(get_tables(), dialect, "format"))


def execute(connection: BaseDatabaseWrapper, query: Query) -> list[Row]:
    """Execute one statement; its rows."""
    return _execute(connection, query.sql, query.params)


def execute_ours(connection: BaseDatabaseWrapper, query: Query) -> list[Row]:
    """``execute``, which raises our own error where there is one."""
    try:
        return execute(connection, query)
    except Error as error:
        ours = translated_error(error)
        if ours is error:
            raise
        raise ours from error


def execute_text(connection: BaseDatabaseWrapper, sql: str) -> list[Row]:
    """Execute one statement that has no parameters, and in which no ``%`` is doubled."""
    return _execute(connection, sql, None)


def _execute(connection: BaseDatabaseWrapper, sql: str, params: Sequence[Any] | None) -> list[Row]:
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        rows: list[Row] = cursor.fetchall() if cursor.description else []
    translate = _translate(connection) if rows else None
    return rows if translate is None else [tuple(map(translate, row)) for row in rows]


def translated_error(error: Error) -> BaseException:
    """Our own error where there is one, else Django's."""
    beneath = error.__cause__ or error
    ours = translated(beneath)
    return error if ours is beneath else ours


def _translate(connection: BaseDatabaseWrapper) -> Callable[[Any], Any] | None:
    """Where the backend has its own idea of times and bytes, back to what the core's dialect reads."""
    if connection.vendor == "sqlite":
        return _time_as_text
    if connection.vendor == "postgresql":
        zone = None if settings.USE_TZ else ZoneInfo(connection.timezone_name)
        if zone is not None or connection.Database.__name__ == "psycopg2":
            return functools.partial(_of_postgresql, zone)
    return None


def _time_as_text(value: Any) -> Any:
    """Columns that are declared as times arrive parsed, expressions as text."""
    return SQLITE.to_time(value.replace(tzinfo=UTC)) if isinstance(value, datetime) else value


def _of_postgresql(zone: ZoneInfo | None, value: Any) -> Any:
    """Without USE_TZ, times arrive in the session's zone and do not say so; psycopg2 hands out its memory."""
    if isinstance(value, memoryview):
        return value.tobytes()
    return value.replace(tzinfo=zone) if isinstance(value, datetime) and value.tzinfo is None else value
