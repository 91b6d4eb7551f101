"""A failover: the node that a relay is connected to stays up, and takes no writes any more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from asyncmy.errors import MySQLError

from relaybox.database.dialects import refusal
from relaybox.database.pools.mysql import Asyncmy, _fetch
from relaybox.database.pools.postgresql import Psycopg
from relaybox.operate import open_relay as parts
from tests.chaos.proxy import Proxy
from tests.conftest import available
from tests.databases import engine
from tests.incidents.conftest import Case, variants
from tests.integration.shop import MEMBERSHIP, SOON, Databases, Shop
from tests.servers import mariadb, postgres, postgres18
from tests.waiting import await_for

PLAIN = "plain"
"""A user of MariaDB who may not write to a server that is read-only."""
READ_ONLY = {
    "postgresql-18": ["ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()"],
    "mariadb": ["SET GLOBAL read_only = 1"],
}
WRITABLE = {
    "postgresql-18": ["ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()"],
    "mariadb": ["SET GLOBAL read_only = 0"],
}


class Node:
    """One server of a pair, with a database of the same name."""

    def __init__(self, url: str) -> None:
        self.url = sa.make_url(url)

    def execute(self, *statements: str) -> None:
        """Each by itself, as an administrator."""
        address = self.url.render_as_string(hide_password=False)
        with engine(address, isolation_level="AUTOCOMMIT").connect() as connection:
            for statement in statements:
                connection.execute(sa.text(statement))

    def database(self, name: str) -> Node:
        """Create a database on the same server."""
        self.execute(f"CREATE DATABASE {name}")
        return Node(self.url.set(database=name).render_as_string(hide_password=False))

    def plain(self) -> sa.URL:
        """Return its URL for an application."""
        if self.url.drivername == "postgresql":
            return self.url
        self.execute(
            f"CREATE OR REPLACE USER {PLAIN}@'127.0.0.1' IDENTIFIED BY '{PLAIN}'",
            f"GRANT ALL ON {self.url.database}.* TO {PLAIN}@'127.0.0.1'",
        )
        return self.url.set(username=PLAIN, password=PLAIN)


@contextmanager
def server(kind: str) -> Iterator[str]:
    """Run a server that a test may turn read-only."""
    if kind == "mariadb":
        with mariadb.server() as url:
            yield url
        return
    with (
        postgres18._reachable(postgres18._site_packages()) as packages,
        postgres.cluster(packages / postgres18.INSTALLATION / "bin", durable=False) as url,
    ):
        yield url


@pytest.fixture(scope="module", params=READ_ONLY)
def old_server(request: pytest.FixtureRequest) -> Iterator[Node]:
    """Run a server for these tests alone, even if the other tests use a given one."""
    with pytest.MonkeyPatch.context() as environment, ExitStack() as servers:
        environment.delenv("RELAYBOX_TEST_MARIADB", raising=False)
        yield Node(servers.enter_context(available(request.param, server(request.param))))


@pytest.fixture
def nodes(
    request: pytest.FixtureRequest, old_server: Node, fresh_database: Databases
) -> Iterator[tuple[Node, Node]]:
    """Return the node that was the primary, and the next primary."""
    kind = request.node.callspec.params["old_server"]
    new = Node(fresh_database(kind))
    yield old_server.database(str(new.url.database)), new
    old_server.execute(*WRITABLE[kind])


def keep_connections(case: Case) -> None:
    """Keep every connection that answers, whatever it answers."""

    async def run_on_postgres(self: Any, begin: Any, **_: Any) -> Any:
        async with self._places.take(""):
            session = self._idle.pop() if self._idle else await self._connect()
            try:
                return await session.drive(begin())
            except psycopg.Error as error:
                raise refusal(error) from error
            finally:
                self._idle.append(session)

    async def run_on_mariadb(self: Any, begin: Any, **_: Any) -> Any:
        async with (await self._open()).acquire() as connection:
            steps = begin()
            try:
                await connection.begin()
                queries = next(steps)
                while True:
                    queries = steps.send([await _fetch(connection, query) for query in queries])
            except StopIteration as end:
                await connection.commit()
                return end.value
            except MySQLError as error:
                await connection.rollback()
                raise refusal(error) from error

    case.patch.setattr(Psycopg, "run", run_on_postgres)
    case.patch.setattr(Asyncmy, "run", run_on_mariadb)


@variants("a pool that keeps every connection that answers")
async def test_stuck_on_a_read_only_node_after_a_failover(
    case: Case, request: pytest.FixtureRequest, nodes: tuple[Node, Node], caplog: pytest.LogCaptureFixture
) -> None:
    if case.broken:
        keep_connections(case)
    case.patch.setitem(MEMBERSHIP, "interval", SOON)
    # Else one of them might be made for the first time after the failover.
    case.patch.setattr(parts, "open_store", partial(parts.open_store, connections=1))
    old, new = nodes
    new_shop, address = Shop(new.url.render_as_string(hide_password=False)), old.plain()
    with Proxy(address.host or "", address.port or 0) as proxy:
        shop = Shop(address.set(port=proxy.port).render_as_string(hide_password=False))
        new_shop.collect("shop")
        taken = shop.collect("shop")
        async with shop.outbox.relay(patience=1):
            shop.emit(1)
            await await_for(lambda: shop.states() == {"delivered": 1}, "a delivery before the failover")
            old.execute(*READ_ONLY[request.node.callspec.params["old_server"]])
            leads_to = new.plain()
            proxy.target = leads_to.host or "", leads_to.port or 0
            new_shop.emit(1, first=1)
            with case.check("a delivery after the failover"):
                await await_for(lambda: taken == [0, 1], "a delivery after the failover", case.seconds)
    assert "read-only" in caplog.text
