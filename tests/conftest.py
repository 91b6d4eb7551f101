"""Real servers, started when the first test asks for them."""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NoReturn, TypeVar

import pytest
from hypothesis import HealthCheck, settings

from relaybox.core import scrub
from tests import leaks, tiers
from tests.servers import base, chromium, fresh, ports, shared, sqlite

Started = TypeVar("Started")

FIXTURES = {"postgresql-18": "postgres18_url", "postgresql-15": "postgres15_url", "mariadb": "mariadb_url"}

# The same examples in every run, and no bound on how long a busy machine takes for one.
settings.register_profile(
    "tests", deadline=None, derandomize=True, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Own the servers of this run, unless a process above does."""
    base.heed_signals()
    config.pluginmanager.register(leaks)
    if shared.VARIABLE not in os.environ:
        host = shared.Host()
        host.start()
        config.add_cleanup(host.stop)


def server(kind: str) -> Any:
    """Make a fixture of the URL of the run's server of a kind."""

    @pytest.fixture(scope="session")
    def url() -> str:
        return shared_server(kind)

    return url


postgres18_url = server("PostgreSQL 18")
postgres15_url = server("PostgreSQL 15")
mariadb_url = server("MariaDB")
rabbitmq_url = server("RabbitMQ")
nats_url = server("NATS")
pgbouncer_url = server("PgBouncer")
"""In transaction mode, in front of the PostgreSQL 18 server."""
kafka_url = server("Kafka")
"""It makes topics as they are named."""
moto_url = server("moto")
"""An imitation of Amazon's SQS and SNS."""
opensearch_url = server("OpenSearch")
meilisearch_url = server("Meilisearch")
"""With its key, and without an index, as OpenSearch."""
algolia_url = server("Algolia")
"""An imitation with its key, and an index for each type of aggregate."""


@pytest.fixture(scope="session")
def redis_url() -> str:
    """Return the URL of a database on a Redis server that only this process uses."""
    # A server of ours has as many as there are ranges; one that is given has 16.
    databases = 16 if os.environ.get("RELAYBOX_TEST_REDIS") else ports.RANGES
    return shared_server("Redis").removesuffix("/0") + f"/{ports.own().number % databases}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its tier before ``-m`` selects by it."""
    tiers.assign(items)


def pytest_collection_finish() -> None:
    """Leave out what was imported when garbage is looked for: it makes that ten times as fast."""
    gc.collect()
    gc.freeze()


def shared_server(kind: str) -> str:
    """Return the URL of the run's server of a kind, or skip the test."""
    try:
        return shared.url(kind)
    except base.Unavailable as reason:
        give_up(kind, reason)


@pytest.fixture(scope="session")
def chromium_path() -> Iterator[str]:
    """Return the path of the browser."""
    with available("Chromium", chromium.program()) as path:
        yield path


@pytest.fixture
def fresh_database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Makes an empty database on "postgresql-18", "postgresql-15", "mariadb" or "sqlite" for the test."""
    with databases(request, fresh.database, sqlite.server) as create:
        yield create


@pytest.fixture(scope="module")
def module_database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Return a fresh database for all tests of the module."""
    with databases(request, fresh.database, sqlite.server) as create:
        yield create


@pytest.fixture
def migrated_database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Return a fresh database with Relaybox's tables: much cheaper than migrating one."""
    with databases(request, fresh.migrated, fresh.migrated_sqlite) as create:
        yield create


@contextmanager
def databases(
    request: pytest.FixtureRequest,
    on_server: Callable[[str], AbstractContextManager[str]],
    on_sqlite: Callable[[], AbstractContextManager[str]],
) -> Iterator[Callable[[str], str]]:
    with ExitStack() as made:

        def create(kind: str) -> str:
            if kind == "sqlite":
                return made.enter_context(on_sqlite())
            return made.enter_context(on_server(request.getfixturevalue(FIXTURES[kind])))

        yield create


@contextmanager
def available(name: str, server: AbstractContextManager[Started]) -> Iterator[Started]:
    with ExitStack() as stack:
        try:
            started = stack.enter_context(server)
        except base.Unavailable as reason:
            give_up(name, reason)
        yield started


def give_up(name: str, reason: object) -> NoReturn:
    """Skip the test, or fail it where every server is required."""
    end = pytest.fail if os.environ.get("RELAYBOX_REQUIRE_SERVERS") == "1" else pytest.skip
    end(f"no {name}: {reason}")


@pytest.fixture(autouse=True)
def no_secrets() -> Iterator[None]:
    """Forget the secrets of each test: their values would be hidden in the texts of the next ones."""
    yield
    scrub.forget()


@pytest.fixture(autouse=True)
def clean_logging() -> Iterator[None]:
    """Undo what a command in this process does to the loggers."""
    loggers = [logging.getLogger(name) for name in (None, "relaybox", "psycopg")]
    before = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    raises = logging.raiseExceptions
    yield
    logging.raiseExceptions = raises
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)
