"""Real servers, started before Django is set up, and the databases that tests use through an alias.

A test that asks for ``using`` runs once for each alias and sees only that one; its commits are real where a
marker ``django_db`` says ``transaction=True``. A test that asks for ``live`` shares its database with other
processes.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import redis

from tests.conftest import databases, give_up, shared_server
from tests.databases import KINDS
from tests.django.databases import VARIABLE, database
from tests.servers import fresh, sqlite
from tests.waiting import wait_for

ALIASES = ("default", "mariadb", "sqlite")
URLS: dict[str, str] = {}
LIVE: dict[str, str] = {}
"""The databases that tests with other processes use, one test after the other."""
MISSING: dict[str, BaseException] = {}


@dataclass(frozen=True, slots=True)
class Live:
    """An empty, migrated database: what ``using`` means during the test, and its URL for other processes.

    After ``spoil()`` no other test gets it.
    """

    using: str
    url: str
    spoil: Callable[[], object]


def pytest_configure(config: pytest.Config) -> None:
    """Start the servers and name the settings, before pytest-django sets Django up."""
    if is_controller(config):
        # Its workers inherit the environment, and set Django up by themselves.
        return
    if not config.option.collectonly:
        start("default", "PostgreSQL 18")
        start("mariadb", "MariaDB")
        file = ExitStack()
        config.add_cleanup(file.close)
        URLS["sqlite"] = file.enter_context(sqlite.server())
    os.environ[VARIABLE] = json.dumps(URLS)
    load_settings()


def is_controller(config: pytest.Config) -> bool:
    """True if this process leaves the tests to the workers of xdist."""
    return bool(getattr(config.option, "numprocesses", None)) and not hasattr(config, "workerinput")


def load_settings() -> None:
    """pytest-django, whose turn is next, sets Django up only where the settings have been read."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.django.project.settings"
    from django.conf import settings

    settings.DATABASES  # noqa: B018


def start(alias: str, kind: str) -> None:
    """Start an alias's server, or keep the reason why its tests cannot run."""
    try:
        if alias == "mariadb" and find_spec("MySQLdb") is None:
            give_up(kind, "mysqlclient is not installed")
        URLS[alias] = shared_server(kind)
    except (pytest.skip.Exception, pytest.fail.Exception) as outcome:
        MISSING[alias] = outcome


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give the test of an alias access to that alias, and keep what its own marker says."""
    alias = parameters(item).get("using")
    if alias is not None:
        own = item.get_closest_marker("django_db")
        options = {"databases": [alias], **(own.kwargs if own else {})}
        item.add_marker(pytest.mark.django_db(**options), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a test whose server cannot be had."""
    marker = item.get_closest_marker("django_db")
    wanted = {parameters(item).get("live")}
    if marker is not None:
        databases = marker.kwargs.get("databases") or ["default"]
        wanted.update(ALIASES if databases == "__all__" else databases)
    for alias in ALIASES:
        if alias in wanted and alias in MISSING:
            raise MISSING[alias]


def parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


@pytest.fixture(params=ALIASES)
def using(request: pytest.FixtureRequest) -> str:
    """Return an alias of ``settings.DATABASES``, one after the other."""
    return str(request.param)


@pytest.fixture(scope="session")
def session_database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Return a fresh database for all tests."""
    with databases(request, fresh.database, sqlite.server) as create:
        yield create


@pytest.fixture(params=ALIASES)
def live(
    request: pytest.FixtureRequest, session_database: Callable[[str], str], django_db_blocker: Any
) -> Iterator[Live]:
    """Yield a database for several processes, with real commits; empty it for the next test."""
    from django.core.management import call_command
    from django.db import connections

    alias = str(request.param)
    url = LIVE.get(alias) or session_database(dict(zip(ALIASES, KINDS, strict=True))[alias])
    with django_db_blocker.unblock(), pointed(alias, database(url)["NAME"]):
        if alias not in LIVE:
            call_command("migrate", database=alias, verbosity=0)
            LIVE[alias] = url
        yield Live(alias, url, functools.partial(LIVE.pop, alias))
        # Only a database that could be emptied is for the next test.
        if LIVE.pop(alias, None):
            connections[alias].close()
            wait_for(lambda: is_alone(connections[alias]), "the processes of the test to be gone")
            call_command("flush", database=alias, interactive=False, verbosity=0)
            LIVE[alias] = url


def is_alone(connection: Any) -> bool:
    """True if nobody else is connected: a server first ends the statement of a killed process."""
    others = {
        "postgresql": "FROM pg_stat_activity WHERE datname = current_database()"
        " AND backend_type = 'client backend' AND pid <> pg_backend_pid()",
        "mysql": "FROM information_schema.processlist WHERE db = database() AND id <> connection_id()",
        "sqlite": "WHERE 0",
    }
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT 1 {others[connection.vendor]}")
        return not cursor.fetchall()


@pytest.fixture
def broker(redis_url: str) -> str:
    """Return the URL of a broker without messages."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    return redis_url


@pytest.fixture
def received() -> Iterator[list[Any]]:
    """Return the events that the shop's handler of ``order.placed`` gets in this process during this test."""
    from tests.django.shop.outbox_handlers import received

    received.clear()
    yield received
    received.clear()


@pytest.fixture
def tidy() -> Iterator[None]:
    """Close the connections of the thread that asynchronous tests have for Django."""
    from asgiref.sync import sync_to_async
    from django.db import connections

    yield
    asyncio.run(sync_to_async(connections.close_all)())


@pytest.fixture
def quiet() -> Iterator[None]:
    """Send no wakes for commits."""
    from django.conf import settings
    from django.test import override_settings

    with override_settings(OUTBOX={**settings.OUTBOX, "DISPATCH": "none"}):
        yield


@pytest.fixture
def handler() -> Iterator[Callable[..., Any]]:
    """Registers handlers, for this test."""
    from relaybox.contrib.django import conf, handlers, outbox_handler

    before = dict(handlers.registered)
    yield outbox_handler
    handlers.registered.clear()
    handlers.registered.update(before)
    conf.forget()


@contextmanager
def pointed(alias: str, name: str) -> Iterator[None]:
    """Let the alias mean another database of its server, as Django does for its test databases."""
    from django.conf import settings
    from django.db import connections

    connection = connections[alias]
    before = connection.settings_dict["NAME"]

    def point(name: str) -> None:
        connection.close()
        settings.DATABASES[alias]["NAME"] = connection.settings_dict["NAME"] = name

    point(name)
    try:
        yield
    finally:
        point(before)


@pytest.fixture(scope="session")
def postgres18_url() -> str:
    """Return the server that ``default`` is on."""
    return server_of("default")


@pytest.fixture(scope="session")
def mariadb_url() -> str:
    """Return the server that ``mariadb`` is on."""
    return server_of("mariadb")


def server_of(alias: str) -> str:
    if alias in MISSING:
        raise MISSING[alias]
    return URLS[alias]
