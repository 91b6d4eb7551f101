"""The proxy does what it says, to real databases and their drivers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any

import psycopg
import psycopg2
import pytest
import sqlalchemy as sa

from tests.chaos.drivers import ERRORS, Driver, Plain, connect
from tests.chaos.proxy import PostgresWire, Proxy, When
from tests.databases import engine
from tests.waiting import wait_for

INSERT = "INSERT INTO kept VALUES ({})"
PARAMETER = "INSERT INTO said VALUES (%s)"
ASK_FOR_TLS = b"\0\0\0\x08\x04\xd2\x16\x2f"


def psycopg_write(url: str, n: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(INSERT.format(n))


def pipelined_write(url: str, n: int) -> None:
    with psycopg.connect(url, autocommit=True) as connection, connection.pipeline():
        for statement in ("BEGIN", INSERT.format(n), "COMMIT"):
            connection.execute(statement)


def prepared_write(url: str, n: int) -> None:
    """Prepare the COMMIT beforehand, so that only its name is sent."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.prepare_threshold = 0
        for statement in ("BEGIN", INSERT.format(n), "COMMIT"):
            connection.execute(statement)


def driver_write(connect: Callable[[str], Driver], url: str, n: int) -> None:
    db = connect(url)
    try:
        db.begin()
        db.fetch(INSERT.format(n))
        db.commit()
    finally:
        db.close()


WRITES: dict[str, tuple[str, Callable[[str, int], None]]] = {
    "psycopg": ("postgresql-18", psycopg_write),
    "psycopg pipelined": ("postgresql-18", pipelined_write),
    "psycopg prepared": ("postgresql-18", prepared_write),
    "psycopg2": ("postgresql-18", partial(driver_write, lambda url: Plain(psycopg2.connect(url)))),
    "asyncpg": ("postgresql-18", partial(driver_write, partial(connect, "asyncpg"))),
    "pymysql": ("mariadb", partial(driver_write, partial(connect, "pymysql"))),
}


class Target:
    """A database behind a proxy, with the direct way to look at it."""

    def __init__(self, url: str, proxy: Proxy) -> None:
        parts = sa.make_url(url)
        self.proxy = proxy
        self.url = parts.set(port=proxy.port).render_as_string(hide_password=False)
        self._engine = engine(url, isolation_level="AUTOCOMMIT")
        self.execute("CREATE TABLE kept (n integer)")

    def execute(self, statement: str) -> None:
        with self._engine.connect() as connection:
            connection.execute(sa.text(statement))

    def kept(self) -> list[int]:
        with self._engine.connect() as connection:
            return sorted(connection.scalars(sa.text("SELECT n FROM kept")))


@contextmanager
def proxied(url: str) -> Iterator[Target]:
    parts = sa.make_url(url)
    with Proxy(parts.host or "", parts.port or 0) as proxy:
        yield Target(url, proxy)


@pytest.fixture
def postgres(fresh_database: Callable[[str], str]) -> Iterator[Target]:
    with proxied(fresh_database("postgresql-18")) as target:
        yield target


@pytest.mark.parametrize("driver", WRITES)
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_commit_is_cut_before_or_after_the_server_saw_it(
    driver: str, when: When, fresh_database: Callable[[str], str]
) -> None:
    kind, write = WRITES[driver]
    with proxied(fresh_database(kind)) as target:
        write(target.url, 1)
        target.proxy.cut_at_commit(when, 2)
        for n in (2, 3):
            with pytest.raises((*ERRORS, psycopg2.Error)):
                write(target.url, n)
        write(target.url, 4)
        assert target.kept() == ([1, 2, 3, 4] if when == "after" else [1, 4])
        assert target.proxy.cuts == 2


def test_a_commit_in_a_payload_is_not_a_commit(postgres: Target) -> None:
    postgres.execute("CREATE TABLE said (words text)")
    postgres.proxy.cut_at_commit("before")
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        connection.execute(PARAMETER, ["Q\0\0\0\x0bCOMMIT".replace("\0", " ")])
        connection.execute("INSERT INTO said VALUES ('COMMIT'), (E'\\n;COMMIT;')")
        connection.execute(PARAMETER, ["COMMIT"])
        assert postgres.proxy.cuts == 0
        with pytest.raises(psycopg.OperationalError), connection.transaction():
            connection.execute(PARAMETER, ["COMMIT"])
    assert postgres.proxy.cuts == 1


def write_after_many_rows(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection, connection.pipeline():
        connection.execute("BEGIN")
        connection.execute("SELECT repeat('x', 1000) FROM generate_series(1, 5000)")
        connection.execute(INSERT.format(1))
        connection.execute("COMMIT")


def test_an_answer_of_many_rows_before_the_commit_is_waited_for(postgres: Target) -> None:
    postgres.proxy.cut_at_commit("after")
    with pytest.raises(psycopg.OperationalError):
        write_after_many_rows(postgres.url)
    assert postgres.kept() == [1]


def test_a_commit_in_pieces_is_known() -> None:
    start = ASK_FOR_TLS + b"\0\0\0\x09\0\x03\0\0\0"
    query = b"P\0\0\0\x10\0COMMIT\0\0\0\0\0" + b"Q\0\0\0\x0cCOMMIT;\0"
    wire = PostgresWire()
    pieces = [bytes([byte]) for byte in start + query]
    found = [wire.sent(piece) for piece in pieces]
    assert found == [False] * (len(pieces) - 1) + [True]
    # Not encrypted, the session is ready, and then the answer to the query.
    assert [wire.received(piece) for piece in (b"N", b"Z\0\0\0\x05I", b"Z\0\0\0", b"\x05I")] == [
        *(False,) * 3,
        True,
    ]


def test_a_delay_holds_each_way_for_all_that_is_under_way_and_not_longer_than_it_is_set(
    postgres: Target,
) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        postgres.proxy.set(delay=0.2)
        started = time.monotonic()
        # One piece after the other would take longer than the test waits for anything.
        connection.pgconn.send_query(b"SELECT repeat('x', 65536) FROM generate_series(1, 500)")
        wait_for(lambda: answered(connection), "500 pieces with one delay")
        assert time.monotonic() - started >= 0.4
        postgres.proxy.set(delay=3600.0)
        postgres.proxy.set()
        connection.pgconn.send_query(b"SELECT 1")
        wait_for(lambda: answered(connection), "an answer without delay")


def answered(connection: psycopg.Connection[Any]) -> bool:
    """True if the whole answer has come and nothing is left to read."""
    connection.pgconn.consume_input()
    while not connection.pgconn.is_busy():
        if connection.pgconn.get_result() is None:
            return True
    return False


def test_in_a_hole_connections_stay_and_nothing_passes(postgres: Target) -> None:
    with (
        psycopg.connect(postgres.url, autocommit=True) as quiet,
        closing(psycopg.connect(postgres.url, autocommit=True)) as talking,
        socket.socket() as late,
    ):
        postgres.proxy.set(hole=True)
        talking.pgconn.send_query(INSERT.format(1).encode())
        late.connect(("127.0.0.1", postgres.proxy.port))
        late.send(ASK_FOR_TLS)
        late.settimeout(0.2)
        with pytest.raises(TimeoutError):
            late.recv(1)
        talking.pgconn.consume_input()
        assert talking.pgconn.is_busy()
        assert postgres.kept() == []
        postgres.proxy.set()
        late.settimeout(60)
        with pytest.raises(ConnectionResetError):
            late.recv(1)
        with pytest.raises(psycopg.OperationalError):
            talking.pgconn.consume_input()
        # What lost nothing goes on, and what was lost stays lost.
        quiet.execute(INSERT.format(2))
        assert postgres.kept() == [2]


def test_new_connections_are_refused_and_open_ones_stay(postgres: Target) -> None:
    with psycopg.connect(postgres.url, autocommit=True) as connection:
        for _ in range(2):
            postgres.proxy.set(refuse=True)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", postgres.proxy.port))
            connection.execute(INSERT.format(1))
            postgres.proxy.set()
            psycopg_write(postgres.url, 2)
    assert postgres.kept() == [1, 1, 2, 2]


def test_a_reset_is_felt_at_once_on_both_sides(postgres: Target) -> None:
    with Proxy("127.0.0.1", postgres.proxy.port) as second, socket.socket() as raw:
        raw.connect(("127.0.0.1", second.port))
        with psycopg.connect(postgres.url) as connection:
            connection.execute(INSERT.format(1))
            assert postgres.proxy.reset() == 2
            with pytest.raises(ConnectionResetError):
                raw.recv(1)
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
        assert postgres.proxy.reset() == 0
        wait_for(lambda: second.reset() == 0, "the reset went through the second proxy")
    assert postgres.kept() == []


def test_a_forked_child_does_not_keep_connections_open(postgres: Target) -> None:
    with socket.create_connection(("127.0.0.1", postgres.proxy.port)) as raw:
        raw.send(ASK_FOR_TLS)
        assert raw.recv(1) == b"N"
        hold, let_go = os.pipe()
        if not (child := os.fork()):
            os.close(let_go)
            os.read(hold, 1)
            os._exit(0)
        try:
            assert postgres.proxy.reset() == 1
            raw.settimeout(60)
            with pytest.raises(ConnectionResetError):
                raw.recv(1)
            postgres.proxy.set(refuse=True)
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", postgres.proxy.port))
        finally:
            os.close(let_go)
            os.close(hold)
            os.waitpid(child, 0)


def test_new_connections_to_a_target_that_is_down_are_reset() -> None:
    with socket.socket() as taken, socket.socket() as raw:
        taken.bind(("127.0.0.1", 0))
        with Proxy("127.0.0.1", taken.getsockname()[1]) as proxy:
            raw.connect(("127.0.0.1", proxy.port))
            with pytest.raises(ConnectionResetError):
                raw.recv(1)
            assert proxy.reset() == 0
