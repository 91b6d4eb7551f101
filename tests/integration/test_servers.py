"""The servers that every other test relies on."""

from __future__ import annotations

import asyncio
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from urllib.request import urlopen

import aio_pika
import nats
import pytest
import redis
import sqlalchemy as sa
from confluent_kafka.admin import AdminClient

from relaybox import Destination, Outbox, Route
from tests.conftest import FIXTURES, available
from tests.databases import engine
from tests.servers import (
    algolia,
    base,
    fresh,
    kafka,
    mariadb,
    meilisearch,
    moto,
    opensearch,
    ports,
    postgres15,
    postgres18,
    rabbitmq,
)
from tests.servers import nats as nats_server
from tests.servers import redis as redis_server
from tests.waiting import PATIENCE, wait_for

DATABASES = {
    "postgresql-18": (postgres18, "RELAYBOX_TEST_POSTGRES18", r"^PostgreSQL 18\."),
    "postgresql-15": (postgres15, "RELAYBOX_TEST_POSTGRES15", r"^PostgreSQL 15\."),
    "mariadb": (mariadb, "RELAYBOX_TEST_MARIADB", r"-MariaDB"),
}
OTHERS = {
    "rabbitmq": (rabbitmq, "RELAYBOX_TEST_RABBITMQ", r"^[34]\."),
    "nats": (nats_server, "RELAYBOX_TEST_NATS", r"server v2\."),
    "kafka": (kafka, "RELAYBOX_TEST_KAFKA", r"^1 broker$"),
    "moto": (moto, "RELAYBOX_TEST_MOTO", r"^OK$"),
    "opensearch": (opensearch, "RELAYBOX_TEST_OPENSEARCH", r"^2\."),
}
IMITATIONS = {"meilisearch": (meilisearch, "MEILISEARCH_URL", ""), "algolia": (algolia, "", "")}
"""What speaks of itself in tests of its own."""
DURABLE_OR_NOT = {**DATABASES, "redis": (redis_server, "RELAYBOX_TEST_REDIS", r"^[78]\.")}
SERVERS = {**DURABLE_OR_NOT, **OTHERS}
MORTAL = {**SERVERS, **IMITATIONS}
STOPPED = MORTAL.keys() - {"postgresql-18", "postgresql-15"}
"""What tests stop with SIGSTOP; of PostgreSQL only single backends."""
OF_SERVERS = FIXTURES | {name: f"{name}_url" for name in ("redis", *OTHERS, *IMITATIONS)}
HOLDER = """
import time
from tests.servers import {name}
with {name}.server() as url:
    print(url, flush=True)
    time.sleep(600)
"""

SHARER = """
import os, subprocess, sys, time
from contextlib import contextmanager
from tests.servers import base, nats, shared

@contextmanager
def missing():
    raise base.Unavailable("there is none")
    yield

host = shared.Host({"NATS": nats.server, "no thing": missing})
host.start()
ask = "from tests.servers import shared; print(shared.url('NATS'), flush=True)"
for _ in range(2):
    subprocess.run([sys.executable, "-c", ask], check=True)
try:
    shared.url("no thing")
except base.Unavailable as reason:
    print("no thing:", reason, flush=True)
time.sleep(600)
"""

COLUMNS = ("module", "variable", "version")


STARTED = [
    *(
        pytest.param(*server, {"durable": False}, id=f"{name}-hasty")
        for name, server in DURABLE_OR_NOT.items()
    ),
    *(
        pytest.param(*server, {"durable": True}, id=f"{name}-durable")
        for name, server in DURABLE_OR_NOT.items()
    ),
    *(pytest.param(*server, {}, id=name) for name, server in OTHERS.items()),
]


@pytest.mark.full
@pytest.mark.parametrize((*COLUMNS, "options"), STARTED)
def test_a_server_answers_with_its_version_and_is_gone_afterwards(
    module: ModuleType,
    variable: str,
    version: str,
    options: dict[str, bool],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(variable, raising=False)
    with available(module.__name__, module.server(**options)) as url:
        assert re.search(version, version_of(url))
    assert not listening(url)


@pytest.mark.full
@pytest.mark.parametrize(COLUMNS, MORTAL.values(), ids=MORTAL)
def test_a_server_dies_with_a_process_that_is_killed(
    module: ModuleType,
    variable: str,
    version: str,
    pytestconfig: pytest.Config,
    request: pytest.FixtureRequest,
) -> None:
    kind = next(kind for kind, server in MORTAL.items() if server[0] is module)
    request.getfixturevalue(OF_SERVERS[kind])  # skips where there is none
    with base.workspace() as directory:
        environment = {**os.environ, "TMPDIR": str(directory)}
        environment.pop(variable, None)
        code = HOLDER.format(name=module.__name__.rpartition(".")[2])
        with subprocess.Popen(
            [sys.executable, "-c", code], cwd=pytestconfig.rootpath, env=environment, stdout=subprocess.PIPE
        ) as holder:
            assert holder.stdout is not None
            holder.stdout.readline()
            with ExitStack() as stack:
                stack.callback(holder.kill)
                servers = processes_in(directory)
                watches = [stack.enter_context(watching(server)) for server in servers]
                assert watches
                for server in servers if kind in STOPPED else []:
                    os.kill(server, signal.SIGSTOP)
                holder.send_signal(signal.SIGKILL)
                assert all(ended(PATIENCE) for ended in watches)


@pytest.mark.parametrize(COLUMNS, SERVERS.values(), ids=SERVERS)
def test_a_url_from_the_environment_is_used_as_it_is(
    module: ModuleType, variable: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, "scheme://somebody:secret@elsewhere/database")
    with module.server() as url:
        assert url == "scheme://somebody:secret@elsewhere/database"


@pytest.mark.parametrize("kind", [*DATABASES, "sqlite"])
def test_a_migrated_database_has_the_tables_and_no_row_of_the_last_one(
    kind: str, request: pytest.FixtureRequest, migrated_database: Callable[[str], str]
) -> None:
    def leave(url: str) -> None:
        outbox = Outbox(url, routes=[Route("*", to="shop")], destinations=[Destination("shop", "console:")])
        assert outbox.migrate() == []
        with engine(url).begin() as connection:
            assert connection.scalar(sa.select(sa.func.count()).select_from(outbox.tables.event)) == 0
            outbox.emit(connection, "Order", 1, "order.paid", {}, idempotency_key="once")

    leave(migrated_database(kind))
    leave(migrated_database(kind))
    if kind != "sqlite":
        for _ in range(2):
            with fresh.migrated(request.getfixturevalue(FIXTURES[kind])) as url:
                leave(url)


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE outbox_event ADD COLUMN mine INTEGER",
        "CREATE TRIGGER mine BEFORE INSERT ON outbox_event FOR EACH ROW SET @mine = 1",
        "DELETE FROM outbox_migration",
        "DROP TABLE outbox_migration",
    ],
)
def test_a_migrated_database_that_was_changed_is_not_used_again(mariadb_url: str, statement: str) -> None:
    with fresh.migrated(mariadb_url) as changed, engine(changed).begin() as connection:
        connection.execute(sa.text(statement))
    with fresh.migrated(mariadb_url) as url:
        assert url != changed


def test_a_database_is_disconnected_when_the_server_has_undone_what_was_not_committed(
    mariadb_url: str,
) -> None:
    count = sa.text("SELECT count(*) FROM information_schema.processlist WHERE db = :name")
    with fresh.database(mariadb_url) as url, ExitStack() as stack:
        name = str(sa.make_url(url).database)
        admin = stack.enter_context(engine(mariadb_url).connect())
        connection = engine(url).connect()
        stack.callback(connection.invalidate)
        connection.execute(sa.text("CREATE TABLE mine (id INTEGER)"))
        connection.execute(sa.text("INSERT INTO mine SELECT seq FROM seq_1_to_100000"))
        assert admin.scalar(count, {"name": name}) == 1
        fresh._disconnect(admin, name)
        assert admin.scalar(count, {"name": name}) == 0


def test_a_template_of_other_migrations_is_not_used(
    postgres18_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def migrate(url: str) -> None:
        with engine(url).begin() as connection:
            connection.execute(sa.text("CREATE TABLE mine (id INTEGER)"))

    with fresh.migrated(postgres18_url) as url:
        assert "outbox_event" in sa.inspect(engine(url)).get_table_names()
    monkeypatch.setattr(fresh, "ddl", lambda dialect: ["CREATE TABLE mine (id INTEGER)"])
    monkeypatch.setattr(fresh, "migrate", migrate)
    with fresh.migrated(postgres18_url) as url:
        assert sa.inspect(engine(url)).get_table_names() == ["mine"]


@pytest.mark.parametrize("kind", [*DATABASES, "sqlite"])
def test_each_fresh_database_is_empty_and_its_own(kind: str, fresh_database: Callable[[str], str]) -> None:
    first, second = engine(fresh_database(kind)), engine(fresh_database(kind))
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
        connection = engine(url).connect()
        connection.execute(sa.text("CREATE TABLE mine (id INTEGER)"))
        connection.execute(sa.text("INSERT INTO mine (id) VALUES (1)"))
    connection.invalidate()
    assert sa.make_url(url).database not in sa.inspect(engine(server_url)).get_schema_names()
    with pytest.raises(sa.exc.OperationalError):
        scalar(url, "SELECT 1")


def test_the_browser_is_chromium(chromium_path: str) -> None:
    shown = subprocess.run([chromium_path, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout.startswith("Chromium ")


@pytest.mark.parametrize(("required", "ended"), [("", pytest.skip.Exception), ("1", pytest.fail.Exception)])
def test_a_server_that_cannot_be_had_skips_the_test_or_fails_it_where_servers_are_required(
    required: str, ended: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RELAYBOX_REQUIRE_SERVERS", required)
    with pytest.raises(ended, match="no PostgreSQL: not installed"), available("PostgreSQL", missing()):
        pass


def test_all_processes_of_a_run_share_one_server_which_ends_with_the_run(pytestconfig: pytest.Config) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SHARER], cwd=pytestconfig.rootpath, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        first, second, third = (owner.stdout.readline().strip() for _ in range(3))
        assert first.startswith("nats://")
        assert first == second
        assert third == "no thing: there is none"
        assert listening(first)
        owner.kill()
    wait_for(lambda: not listening(first), "the server ends with the run that was killed")


def test_ports_lie_below_those_of_outgoing_connections_and_belong_to_one_process() -> None:
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    mine = {ports.own().take() for _ in range(5)}
    code = "from tests.servers import ports; print(ports.own().number, ports.own().take())"
    other, port = map(int, subprocess.check_output([sys.executable, "-c", code]).split())
    assert other != ports.own().number
    assert len(mine) == 5
    assert all(ports.FIRST <= taken < lowest for taken in (port, *mine))


def test_a_port_that_is_taken_is_passed_over() -> None:
    first = ports.own().take()
    with socket.create_server(("127.0.0.1", first + 1)):
        assert ports.own().take() == first + 2


def test_nothing_is_installed_where_that_is_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELAYBOX_INSTALL", "0")
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(base.Unavailable, match="redis-server is not installed, and RELAYBOX_INSTALL=0"):
        base.apt_install("redis-server")


@pytest.mark.parametrize(("module", "place"), [(base, "MEMORY"), (tempfile, "tempdir")])
def test_the_workspaces_of_processes_that_were_killed_are_removed(
    module: ModuleType, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, place, tmp_path)
    ended = subprocess.Popen(["true"])
    ended.wait()
    for name in (f"{base.PREFIX}{ended.pid}-x", f"{base.PREFIX}{os.getpid()}-x", "relaybox-mine", "other"):
        (tmp_path / name).mkdir()
    base.remove_abandoned()
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {f"{base.PREFIX}{os.getpid()}-x", "relaybox-mine", "other"}


def test_the_guide_names_every_server_and_what_stands_in_for_it(pytestconfig: pytest.Config) -> None:
    guide = (pytestconfig.rootpath / "CONTRIBUTING.md").read_text()
    modules = "\n".join(path.read_text() for path in Path(base.__file__).parent.glob("*.py"))
    variables = set(re.findall(r"RELAYBOX_TEST_[A-Z0-9]+", modules))
    assert {variable for _, variable, _ in SERVERS.values()} <= variables
    assert [variable for variable in sorted(variables) if f"`{variable}=" not in guide] == []


@contextmanager
def missing() -> Iterator[str]:
    raise base.Unavailable("not installed")
    yield


def version_of(url: str) -> str:
    """Return the version that a plain client sees."""
    match sa.make_url(url).drivername:
        case "redis":
            with redis.Redis.from_url(url) as client:
                return str(client.info("server")["redis_version"])
        case "nats":
            return asyncio.run(_nats_version(url))
        case "amqp":
            return asyncio.run(_rabbitmq_version(url))
        case "kafka":
            found = AdminClient({"bootstrap.servers": url.removeprefix("kafka://")}).list_topics(timeout=30)
            return f"{len(found.brokers)} broker"
        case "opensearch":
            with urlopen(url.replace("opensearch://", "http://")) as answer:
                return str(json.load(answer)["version"]["number"])
        case "http":
            with urlopen(f"{url}/moto-api/") as answer:
                return str(answer.reason)
    return scalar(url, "SELECT version()")


async def _nats_version(url: str) -> str:
    async with await nats.connect(url) as client:
        return str(client.connected_server_version)


async def _rabbitmq_version(url: str) -> str:
    async with await aio_pika.connect(url) as connection:
        return str(connection.transport.connection.server_properties["version"])  # type: ignore[union-attr]


def scalar(url: str, statement: str) -> str:
    with engine(url).connect() as connection:
        return str(connection.scalar(sa.text(statement)))


def listening(url: str) -> bool:
    parsed = sa.make_url(url)
    with socket.socket() as probe:
        return probe.connect_ex((parsed.host, parsed.port)) == 0


def processes_in(directory: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            named = str(directory).encode() in (process / "cmdline").read_bytes()
            if named or (process / "cwd").readlink().is_relative_to(directory):
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
