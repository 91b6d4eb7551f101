"""The servers that every other test relies on."""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import pytest
import redis
import sqlalchemy as sa

from tests.conftest import FIXTURES, available
from tests.servers import base, fresh, mariadb, postgres15, postgres18
from tests.servers import redis as redis_server

DATABASES = {
    "postgresql-18": (postgres18, "RELAYBOX_TEST_POSTGRES18", r"^PostgreSQL 18\."),
    "postgresql-15": (postgres15, "RELAYBOX_TEST_POSTGRES15", r"^PostgreSQL 15\."),
    "mariadb": (mariadb, "RELAYBOX_TEST_MARIADB", r"-MariaDB"),
}
SERVERS = {**DATABASES, "redis": (redis_server, "RELAYBOX_TEST_REDIS", r"^[78]\.")}
HOLDER = """
import time
from tests.servers import {name}
with {name}.server() as url:
    print(url, flush=True)
    time.sleep(600)
"""

each_server = pytest.mark.parametrize(("module", "variable", "version"), SERVERS.values(), ids=SERVERS)


@each_server
@pytest.mark.parametrize("durable", [False, True], ids=["hasty", "durable"])
def test_a_server_answers_with_its_version_and_is_gone_afterwards(
    module: ModuleType, variable: str, version: str, durable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(variable, raising=False)
    with available(module.__name__, module.server(durable=durable)) as url:
        assert re.search(version, version_of(url))
    assert not listening(url)


@each_server
def test_a_server_dies_with_a_process_that_is_killed(
    module: ModuleType,
    variable: str,
    version: str,
    pytestconfig: pytest.Config,
    request: pytest.FixtureRequest,
) -> None:
    kind = next(kind for kind, server in SERVERS.items() if server[0] is module)
    request.getfixturevalue({**FIXTURES, "redis": "redis_url"}[kind])  # skips where there is none
    with base.workspace() as directory:
        environment = {**os.environ, "TMPDIR": str(directory)}
        environment.pop(variable, None)
        code = HOLDER.format(name=module.__name__.rpartition(".")[2])
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=pytestconfig.rootpath, env=environment, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            (server,) = processes_in(directory)
            with watching(server) as ended:
                holder.send_signal(signal.SIGKILL)
                assert ended(10)


@each_server
def test_a_url_from_the_environment_is_used_as_it_is(
    module: ModuleType, variable: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "scheme://somebody:secret@elsewhere/database")
    with module.server() as url:
        assert url == "scheme://somebody:secret@elsewhere/database"


@pytest.mark.parametrize("kind", [*DATABASES, "sqlite"])
def test_each_fresh_database_is_empty_and_its_own(kind: str, fresh_database: Callable[[str], str]) -> None:
    first, second = connectable(fresh_database(kind)), connectable(fresh_database(kind))
    with first.begin() as connection:
        connection.execute(sa.text("CREATE TABLE mine (id INTEGER)"))
    assert sa.inspect(first).get_table_names() == ["mine"]
    assert sa.inspect(second).get_table_names() == []


@pytest.mark.parametrize("kind", DATABASES)
def test_a_fresh_database_is_dropped_under_an_open_transaction(
    kind: str, request: pytest.FixtureRequest
) -> None:
    server_url = request.getfixturevalue(FIXTURES[kind])
    with fresh.database(server_url) as url:
        connection = connectable(url).connect()
        connection.execute(sa.text("CREATE TABLE mine (id INTEGER)"))
        connection.execute(sa.text("INSERT INTO mine (id) VALUES (1)"))
    connection.invalidate()
    assert sa.make_url(url).database not in sa.inspect(connectable(server_url)).get_schema_names()
    with pytest.raises(sa.exc.OperationalError):
        scalar(url, "SELECT 1")


def test_the_browser_is_chromium(chromium_path: str) -> None:
    shown = subprocess.run([chromium_path, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Chromium ")


def test_a_server_that_cannot_be_had_skips_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RELAYBOX_REQUIRE_SERVERS", raising=False)
    with (
        pytest.raises(pytest.skip.Exception, match="no PostgreSQL: not installed"),
        available("PostgreSQL", missing()),
    ):
        pass


def test_a_server_that_cannot_be_had_fails_the_test_where_servers_are_required(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RELAYBOX_REQUIRE_SERVERS", "1")
    with (
        pytest.raises(pytest.fail.Exception, match="no PostgreSQL: not installed"),
        available("PostgreSQL", missing()),
    ):
        pass


@contextmanager
def missing() -> Iterator[str]:
    raise base.Unavailable("not installed")
    yield


def connectable(url: str) -> sa.Engine:
    parsed = sa.make_url(url)
    driver = fresh.DRIVERS.get(parsed.drivername, parsed.drivername)
    return sa.create_engine(parsed.set(drivername=driver), poolclass=sa.NullPool)


def version_of(url: str) -> str:
    if not url.startswith("redis:"):
        return scalar(url, "SELECT version()")
    with redis.Redis.from_url(url) as client:
        return str(client.info("server")["redis_version"])


def scalar(url: str, statement: str) -> str:
    with connectable(url).connect() as connection:
        return str(connection.scalar(sa.text(statement)))


def listening(url: str) -> bool:
    parsed = sa.make_url(url)
    with socket.socket() as probe:
        return probe.connect_ex((parsed.host, parsed.port)) == 0


def processes_in(directory: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if str(directory).encode() in (process / "cmdline").read_bytes():
                found.append(int(process.name))
    # A server's child has its parent's command line until it has given itself a name.
    return [pid for pid in found if parent_of(pid) not in found]


def parent_of(pid: int) -> int | None:
    with suppress(FileNotFoundError, ProcessLookupError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return None


@contextmanager
def watching(process: int) -> Iterator[Callable[[float], bool]]:
    descriptor = os.pidfd_open(process)
    try:
        yield lambda seconds: bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)
