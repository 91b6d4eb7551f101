"""DATABASES from the environment, so that every process of a test sees the same ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

VARIABLE = "RELAYBOX_TEST_DATABASES"

ENGINES = {
    "postgresql": "django.db.backends.postgresql",
    "mysql": "django.db.backends.mysql",
    "sqlite": "django.db.backends.sqlite3",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "postgresql": {},
    "mysql": {"charset": "utf8mb4"},
    "sqlite": {"timeout": 20},
}


def databases(environment: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """Return what the variable holds as JSON, alias by alias; an alias that it leaves out does not exist."""
    urls = json.loads(environment.get(VARIABLE, "{}"))
    # Django insists on the alias default, which may stand for no database.
    return {"default": {}, **{alias: database(url) for alias, url in urls.items()}}


def database(url: str) -> dict[str, Any]:
    """Return the settings of the database at the URL."""
    parts = urlsplit(url)
    settings = {
        "ENGINE": ENGINES[parts.scheme],
        "NAME": parts.path[1:],
        "OPTIONS": OPTIONS[parts.scheme],
    }
    if parts.scheme == "sqlite":
        # The test database would lie in memory otherwise, where other threads and processes cannot see it.
        return settings | {"TEST": {"NAME": f"{parts.path[1:]}.test"}}
    return settings | {
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": parts.hostname,
        "PORT": parts.port,
    }
