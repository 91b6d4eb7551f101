"""The URL of a database, as users write it."""

from __future__ import annotations

import re

from relaybox.core.values import mask_url
from relaybox.errors import ConfigError

_DIALECTS = {
    "postgresql": "postgresql",
    "postgres": "postgresql",
    "mysql": "mysql",
    "mariadb": "mysql",
    "sqlite": "sqlite",
}


def normalize_url(url: str, setting: str = "database") -> str:
    """The database's URL as ``postgresql://``, ``mysql://`` or ``sqlite://``, without a driver."""
    match = re.fullmatch(r"(\w+)(?:\+\w+)?://(.*)", url, re.DOTALL) if isinstance(url, str) else None
    dialect = _DIALECTS.get(match[1].lower()) if match else None
    if match is None or dialect is None:
        raise _no_database(url, setting)
    normal, place = f"{dialect}://{match[2]}", match[2]
    if dialect == "sqlite":
        _check_file(normal, place, setting)
    else:
        _check_user(normal, place, setting)
        _check_port(normal, place, setting)
    return normal


def _no_database(url: object, setting: str) -> ConfigError:
    known = ", ".join(f"{name}://" for name in _DIALECTS)
    fix = f"write one of {known} (with or without +driver)"
    if not isinstance(url, str):
        return ConfigError(f"{setting} is of type {type(url).__name__}: {fix}")
    if re.match(r"\w+(\+\w+)?://", url):
        return ConfigError(f"{setting} = {mask_url(url)!r}: {fix}")
    # Without a scheme there is no telling which part is a password, but a file's name has none.
    file = re.fullmatch(r"[\w./\\ -]+\.(db3?|sqlite3?)", url)
    return ConfigError(f"{setting} is not a URL: {fix}" + (f"; for a file: sqlite:///{url}" if file else ""))


def _check_file(url: str, place: str, setting: str) -> None:
    if place and place[0] not in "/?":
        masked = mask_url(url)
        fix = f"write {masked.replace('://', ':///', 1)} (three slashes; four for an absolute path)"
        raise ConfigError(f"{setting} = {masked!r}: {fix}")


def _check_user(url: str, place: str, setting: str) -> None:
    """Drivers repeat what they cannot read, and here that would be a password."""
    user = place.partition("?")[0].rpartition("@")[0]
    if re.search(r"\s|%(?![0-9A-Fa-f]{2})", user):
        fix = "its user or password holds a space or a lone %; write %20 for a space and %25 for a %"
        raise ConfigError(f"{setting} = {mask_url(url)!r}: {fix}")


def _check_port(url: str, place: str, setting: str) -> None:
    before, _, query = place.partition("?")
    if "@" in query:
        # Of a password with a question mark, a part would be taken for the port, and shown.
        return
    # PostgreSQL takes several hosts, each with its port.
    for host in before.rpartition("@")[2].partition("/")[0].split(","):
        port = re.fullmatch(r"(?:\[.*\]|[^:\[\]]*):(.+)", host, re.DOTALL)
        if port and not re.fullmatch(r"[0-9]+", port[1]):
            raise ConfigError(f"{setting} = {mask_url(url)!r}: the port {port[1]!r} is no number")
