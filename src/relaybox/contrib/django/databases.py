"""From an alias of ``DATABASES`` to what Relaybox calls that database."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from relaybox.errors import ConfigError, did_you_mean
from relaybox.stores.dialects import MARIADB, MYSQL, POSTGRESQL, SQLITE, Dialect

_OWN = {"isolation_level", "server_side_binding", "pool", "assume_role", "init_command", "transaction_mode"}
"""Options that are Django's, not the server's."""


def connection_of(using: str) -> BaseDatabaseWrapper:
    """This thread's connection of an alias; raises ``ConfigError`` where there is no such alias."""
    if using not in connections.settings:
        raise ConfigError(f"using = {using!r}: no database is called that{did_you_mean(using, connections)}")
    return connections[using]


def dialect_of(connection: BaseDatabaseWrapper) -> Dialect:
    """The dialect of a connection; MySQL and MariaDB have the same vendor and are told apart by asking."""
    match connection.vendor:
        case "postgresql":
            return POSTGRESQL
        case "sqlite":
            return SQLITE
        case "mysql":
            return MARIADB if connection.mysql_is_mariadb else MYSQL
    raise _unsupported(connection)


def url_of(using: str) -> str:
    """The URL of an alias, for a relay that has connections of its own."""
    connection = connection_of(using)
    given = connection.settings_dict
    match connection.vendor:
        case "postgresql":
            return _server("postgresql", given, _postgresql(given))
        case "mysql":
            return _server("mysql", given, _mysql(given))
        case "sqlite":
            name = str(given["NAME"])
            return "sqlite://" if connection.is_in_memory_db() else f"sqlite:///{quote(name)}"
    raise _unsupported(connection)


def _server(scheme: str, given: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    user, password = (quote(str(given.get(part) or ""), safe="") for part in ("USER", "PASSWORD"))
    account = f"{user}:{password}@" if password else f"{user}@" if user else ""
    host = str(given.get("HOST") or "")
    place = "" if host.startswith("/") else f"[{host}]" if ":" in host else host
    port = f":{given['PORT']}" if given.get("PORT") and place else ""
    query = f"?{urlencode(options, quote_via=quote)}" if options else ""
    return f"{scheme}://{account}{place}{port}/{quote(str(given.get('NAME') or ''), safe='')}{query}"


def _postgresql(given: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in given.get("OPTIONS", {}).items() if key not in _OWN}
    if role := given.get("OPTIONS", {}).get("assume_role"):
        options["options"] = f"{options.get('options', '')} -c role={role}".strip()
    host = str(given.get("HOST") or "")
    if host.startswith("/"):
        options["host"] = host
        options |= {"port": given["PORT"]} if given.get("PORT") else {}
    return options


def _mysql(given: Mapping[str, Any]) -> dict[str, Any]:
    options = {key: value for key, value in given.get("OPTIONS", {}).items() if key not in _OWN}
    ssl = options.pop("ssl", None)
    options |= {f"ssl_{key}": value for key, value in ssl.items()} if isinstance(ssl, Mapping) else {}
    host = str(given.get("HOST") or "")
    return {**options, "unix_socket": host} if host.startswith("/") else options


def _unsupported(connection: BaseDatabaseWrapper) -> ConfigError:
    known = "PostgreSQL, MariaDB, MySQL and SQLite"
    return ConfigError(f"database {connection.alias!r} is on {connection.vendor}; an outbox needs {known}")
