"""Real servers, started when the first test asks for them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NoReturn, TypeVar

import pytest

from tests.servers import (
    algolia,
    base,
    chromium,
    fresh,
    kafka,
    mariadb,
    meilisearch,
    moto,
    nats,
    opensearch,
    pgbouncer,
    postgres15,
    postgres18,
    rabbitmq,
    redis,
    sqlite,
)

Started = TypeVar("Started")

FIXTURES = {"postgresql-18": "postgres18_url", "postgresql-15": "postgres15_url", "mariadb": "mariadb_url"}


@pytest.fixture(scope="session")
def postgres18_url() -> Iterator[str]:
    """The URL of a PostgreSQL 18 server."""
    with available("PostgreSQL 18", postgres18.server()) as url:
        yield url


@pytest.fixture(scope="session")
def postgres15_url() -> Iterator[str]:
    """The URL of a PostgreSQL 15 server."""
    with available("PostgreSQL 15", postgres15.server()) as url:
        yield url


@pytest.fixture(scope="session")
def pgbouncer_url(postgres18_url: str) -> Iterator[str]:
    """The URL of a PgBouncer in transaction mode, in front of the PostgreSQL 18 server."""
    with available("PgBouncer", pgbouncer.server(postgres18_url)) as url:
        yield url


@pytest.fixture(scope="session")
def mariadb_url() -> Iterator[str]:
    """The URL of a MariaDB server."""
    with available("MariaDB", mariadb.server()) as url:
        yield url


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """The URL of a Redis server."""
    with available("Redis", redis.server()) as url:
        yield url


@pytest.fixture(scope="session")
def rabbitmq_url() -> Iterator[str]:
    """The URL of a RabbitMQ server."""
    with available("RabbitMQ", rabbitmq.server()) as url:
        yield url


@pytest.fixture(scope="session")
def nats_url() -> Iterator[str]:
    """The URL of a NATS server with JetStream."""
    with available("NATS", nats.server()) as url:
        yield url


@pytest.fixture(scope="session")
def kafka_url() -> Iterator[str]:
    """The URL of a Kafka broker that makes topics as they are named."""
    with available("Kafka", kafka.server()) as url:
        yield url


@pytest.fixture(scope="session")
def moto_url() -> Iterator[str]:
    """The endpoint of an imitation of Amazon's SQS and SNS."""
    with available("moto", moto.server()) as url:
        yield url


@pytest.fixture(scope="session")
def opensearch_url() -> Iterator[str]:
    """The URL of an OpenSearch server, without an index."""
    with available("OpenSearch", opensearch.server()) as url:
        yield url


@pytest.fixture(scope="session")
def meilisearch_url() -> Iterator[str]:
    """The URL of a Meilisearch server with its key, without an index."""
    with available("Meilisearch", meilisearch.server()) as started:
        yield meilisearch.destination_url(started).replace("://", f"://:{started.key}@")


@pytest.fixture(scope="session")
def algolia_url() -> Iterator[str]:
    """The URL of an imitation of Algolia with its key, and an index for each type of aggregate."""
    with available("Algolia", algolia.server()) as started:
        yield started.url.replace("://", f"://:{started.key}@")


@pytest.fixture(scope="session")
def chromium_path() -> Iterator[str]:
    """The path of the browser."""
    with available("Chromium", chromium.program()) as path:
        yield path


@pytest.fixture
def fresh_database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Makes an empty database on "postgresql-18", "postgresql-15", "mariadb" or "sqlite" for the test."""
    with databases(request, fresh.database, sqlite.server) as create:
        yield create


@pytest.fixture(scope="module")
def module_database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Like fresh_database, for all tests of the module."""
    with databases(request, fresh.database, sqlite.server) as create:
        yield create


@pytest.fixture
def migrated_database(request: pytest.FixtureRequest) -> Iterator[Callable[[str], str]]:
    """Like fresh_database, with Relaybox's tables in it: much cheaper than to migrate one."""
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
def clean_logging() -> Iterator[None]:
    """What a command in this process makes of the loggers is undone."""
    loggers = [logging.getLogger(name) for name in (None, "relaybox", "psycopg")]
    before = [(one.handlers[:], one.level, one.propagate) for one in loggers]
    raises = logging.raiseExceptions
    yield
    logging.raiseExceptions = raises
    for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)
