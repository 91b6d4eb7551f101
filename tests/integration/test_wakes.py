"""NOTIFY and LISTEN through a real PostgreSQL, and through networks and poolers that fail in their ways."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest
import sqlalchemy as sa

from relaybox.wakes.postgres import PROBE, ListeningWake, Notifier
from tests.conftest import available
from tests.servers import base, postgres18

LONG = 60.0
SOON = 10.0
CHANNEL = "relaybox"
DEAD = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.fixture(scope="module")
def database(module_database: Callable[[str], str]) -> str:
    return module_database("postgresql-18")


@contextmanager
def notifier(url: str, channel: str = CHANNEL, **options: Any) -> Iterator[Notifier]:
    made = Notifier(url, channel, **options)
    try:
        yield made
    finally:
        made.close()


@asynccontextmanager
async def listening(
    url: str, channel: str = CHANNEL, *, alive: bool = True, **options: Any
) -> AsyncIterator[ListeningWake]:
    """A wake that hears, with the wakes of its beginning taken."""
    wake = ListeningWake(url, channel, **options)
    wake.start()
    try:
        if alive:
            await until(lambda: wake.alive)
            for name in ("shop", "audit"):
                await wake.wait(name, 0)
        yield wake
    finally:
        await wake.close()


async def until(condition: Callable[[], Any], seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        await asyncio.sleep(0.01)


class Ear:
    """Hears what is notified, in a thread of its own."""

    def __init__(self, url: str, channel: str = CHANNEL) -> None:
        self.heard: list[str] = []
        self.backends: set[int] = set()
        self._connection = psycopg.connect(url, autocommit=True)
        self._connection.execute(f"LISTEN {channel}")
        self._thread = threading.Thread(target=self._listen)
        self._stop = False

    def __enter__(self) -> Ear:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop = True
        self._thread.join()
        self._connection.close()

    def _listen(self) -> None:
        while not self._stop:
            for notification in self._connection.notifies(timeout=0.05):
                if not notification.payload.startswith(PROBE):
                    self.heard.append(notification.payload)
                    self.backends.add(notification.pid)


class Proxy:
    """Stands before the server; from a given moment on it takes everything and passes nothing on.

    With ``deaf`` it drops notifications only, as a pooler does that has no session to deliver them to.
    """

    def __init__(self, url: str, *, deaf: bool = False) -> None:
        self._server = sa.make_url(url)
        self.deaf = deaf
        self.black = False
        self.connections = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        listener = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        plain = {"sslmode": "disable", "gssencmode": "disable"}
        try:
            yield self._server.set(port=port, query=plain).render_as_string(hide_password=False)
        finally:
            listener.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._carry(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        above, up = await asyncio.open_connection(self._server.host, self._server.port)
        try:
            ways = {asyncio.create_task(self._up(reader, up)), asyncio.create_task(self._down(above, writer))}
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            writer.close()
            up.close()

    async def _up(self, client: asyncio.StreamReader, server: asyncio.StreamWriter) -> None:
        while data := await client.read(1 << 16):
            if not self.black:
                server.write(data)

    async def _down(self, server: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        while True:
            head = await server.readexactly(5)
            body = await server.readexactly(int.from_bytes(head[1:]) - 4)
            dropped = self.black or (self.deaf and head[:1] == b"A")
            if not dropped:
                client.write(head + body)


async def test_a_call_wakes_the_lane_of_a_relay_elsewhere_long_before_it_polls(database: str) -> None:
    async with listening(database) as wake:
        lanes = [asyncio.create_task(wake.wait(name, LONG)) for name in ("shop", "audit")]
        with notifier(database) as caller:
            caller.call(["shop"])
            assert await asyncio.wait_for(lanes[0], SOON)
            assert not lanes[1].done()
            caller.call(["a destination that has no lane here"])
            assert await asyncio.wait_for(lanes[1], SOON)


async def test_a_plain_notify_wakes_all_and_another_outboxs_channel_nobody(database: str) -> None:
    async with listening(database) as wake:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("NOTIFY relaybox_other, 'shop'")
            assert not await wake.wait("shop", 0.2)
            connection.execute("NOTIFY relaybox")
            assert await wake.wait("shop", SOON)


async def test_another_relays_probe_wakes_nobody(database: str) -> None:
    async with listening(database) as wake, listening(database):
        assert not await wake.wait("shop", 0.2)


def test_a_burst_is_coalesced_and_its_last_call_is_not_lost(database: str) -> None:
    with Ear(database) as ear, notifier(database) as caller:
        for _ in range(1_000):
            caller.call(["shop", "audit"])
        caller.call(["last"])
        wait_for(lambda: "last" in ear.heard)
        assert {"shop", "audit", "last"} == set(ear.heard)
        assert ear.heard.count("shop") < 500
        assert len(ear.heard) < 200
        assert len(ear.backends) == 1


def test_calls_one_after_the_other_all_arrive(database: str) -> None:
    with Ear(database) as ear, notifier(database) as caller:
        for number in range(50):
            caller.call([f"n{number}"])
            wait_for(lambda number=number: f"n{number}" in ear.heard)
        assert len(ear.backends) == 1


def wait_for(condition: Callable[[], Any], seconds: float = SOON) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.002)


def test_a_notifier_that_is_idle_holds_no_connection_and_no_thread(
    database: str, notifying: Callable[[], set[threading.Thread]]
) -> None:
    with Ear(database) as ear, notifier(database, idle=0.05) as caller:
        for name in ("first", "second"):
            caller.call([name])
            wait_for(lambda name=name: name in ear.heard)
            wait_for(lambda: not notifying())
        assert len(ear.backends) == 2
        caller.call([])
        assert not notifying()


@pytest.fixture
def notifying() -> Callable[[], set[threading.Thread]]:
    """The threads of notifiers, without those that others have left and that are still idle."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "relaybox-notify"}

    before = threads()
    return lambda: threads() - before


def test_a_notifier_survives_the_loss_of_its_connection_without_losing_a_call(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        Ear(database) as ear,
        notifier(database) as caller,
        psycopg.connect(database, autocommit=True) as admin,
    ):
        caller.call(["before"])
        wait_for(lambda: "before" in ear.heard)
        (backend,) = ear.backends
        admin.execute("SELECT pg_terminate_backend(%s, 5000)", (backend,))
        caller.call(["after"])
        wait_for(lambda: "after" in ear.heard)
    assert caplog.records == []


@contextmanager
def stopped(backend: int, seconds: float) -> Iterator[None]:
    """A server that does not answer; another process ends that, should this one be held up itself."""
    later = f"import os, signal, time; time.sleep({seconds}); os.kill({backend}, signal.SIGCONT)"
    os.kill(backend, signal.SIGSTOP)
    with subprocess.Popen([sys.executable, "-c", later]) as process:
        try:
            yield
        finally:
            os.kill(backend, signal.SIGCONT)
            process.kill()


def test_a_server_that_does_not_answer_holds_up_no_other_thread(database: str) -> None:
    with Ear(database) as ear, notifier(database) as caller:
        caller.call(["before"])
        wait_for(lambda: "before" in ear.heard)
        (backend,) = ear.backends
        longest, last = 0.0, time.monotonic()
        with stopped(backend, 3.0):
            for _ in range(100):
                caller.call(["during"])
                time.sleep(0.005)
                now = time.monotonic()
                longest, last = max(longest, now - last), now
            assert longest < 1.0
            assert "during" not in ear.heard
        caller.call(["after"])
        wait_for(lambda: "after" in ear.heard)


def test_a_server_that_does_not_answer_in_time_is_left_for_a_new_connection(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.wakes.postgres.ANSWER_SECONDS", 0.1)
    with Ear(database) as ear, notifier(database) as caller:
        caller.call(["before"])
        wait_for(lambda: "before" in ear.heard)
        (backend,) = ear.backends
        with stopped(backend, 5.0):
            caller.call(["during"])
            caller.call(["behind it"])
            wait_for(lambda: "behind it" in ear.heard)
        assert len(ear.backends) == 2


def test_a_thread_that_could_not_be_started_is_tried_again_by_the_next_call(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with Ear(database) as ear, notifier(database) as caller:
        with monkeypatch.context() as crowded:
            crowded.setattr(threading.Thread, "start", refuse)
            caller.call(["first"])
        caller.call(["second"])
        wait_for(lambda: {"first", "second"} == set(ear.heard))
    (record,) = caplog.records
    assert "can't start new thread" in record.getMessage()


def test_a_database_that_is_down_costs_the_caller_nothing_and_is_said_once(
    caplog: pytest.LogCaptureFixture, notifying: Callable[[], set[threading.Thread]]
) -> None:
    with notifier(DEAD) as caller:
        slowest = 0.0
        for _ in range(200):
            started = time.monotonic()
            caller.call(["shop"])
            slowest = max(slowest, time.monotonic() - started)
            time.sleep(0.001)
        wait_for(lambda: caplog.records)
        assert slowest < 0.5
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "polling" in record.getMessage()
    assert not notifying()


def test_trouble_is_followed_by_a_pause_that_grows(
    database: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relaybox.wake")
    attempts: list[float] = []
    connect = psycopg.connect
    down = True

    def try_to(**options: Any) -> Any:
        attempts.append(time.monotonic())
        if down:
            raise psycopg.OperationalError("down")
        return connect(**options)

    with Ear(database) as ear, notifier(database) as caller:
        monkeypatch.setattr("relaybox.wakes.postgres.FIRST_PAUSE", 0.05)
        monkeypatch.setattr("relaybox.wakes.postgres.psycopg.connect", try_to)
        while len(attempts) < 4:
            caller.call(["shop"])
            time.sleep(0.001)
        gaps = [later - sooner for sooner, later in pairwise(attempts)]
        assert all(gap >= pause for gap, pause in zip(gaps, (0.05, 0.1, 0.2), strict=True))
        down = False
        caller.call(["again"])
        wait_for(lambda: "again" in ear.heard)
        wait_for(lambda: len(caplog.records) == 2)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


FORK = """
import os, sys, threading
from relaybox.wakes.postgres import Notifier
notifier = Notifier(sys.argv[1], "relaybox")
notifier.call(["parent"])
sys.stdin.readline()
stop = threading.Event()

def hold_the_lock():
    while not stop.is_set():
        notifier.call(["noise"])

thread = threading.Thread(target=hold_the_lock)
thread.start()
pids = []
for number in range(10):
    if not (pid := os.fork()):
        notifier.call([f"child{number}"])
        notifier.close()
        os._exit(0)
    pids.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * len(pids)
stop.set()
thread.join()
notifier.call(["parent again"])
"""


def test_forked_processes_notify_on_connections_of_their_own(database: str) -> None:
    with Ear(database) as ear:
        command = [sys.executable, "-W", "error::ResourceWarning", "-c", FORK, database]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        wait_for(lambda: "parent" in ear.heard)
        process.communicate(b"\n", timeout=3 * SOON)
        assert process.returncode == 0
        wait_for(lambda: "parent again" in ear.heard)
        children = {f"child{number}" for number in range(10)}
        assert children == set(ear.heard) - {"parent", "parent again", "noise"}
        assert len(ear.backends) == 11  # the parent's was not broken by its children's ends


EXIT = """
import sys
from relaybox.wakes.postgres import Notifier
notifier = Notifier(sys.argv[1], "relaybox")
notifier.call(["farewell"])
"""


def test_the_last_call_of_a_process_is_sent_and_a_dead_database_does_not_hold_it(database: str) -> None:
    with Ear(database) as ear:
        subprocess.run(
            [sys.executable, "-W", "error::ResourceWarning", "-c", EXIT, database], check=True, timeout=SOON
        )
        wait_for(lambda: ear.heard == ["farewell"])
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", EXIT, DEAD], check=True, timeout=SOON, capture_output=True)
    assert time.monotonic() - started < 5


async def test_a_listener_whose_session_is_ended_reconnects_and_wakes_all(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relaybox.wake")
    async with listening(database) as wake:
        end_listeners(database)
        await until(lambda: not wake.alive)
        await until(lambda: wake.alive)
        assert await wake.wait("shop", 0)
        with notifier(database) as caller:
            caller.call(["shop"])
            assert await wake.wait("shop", SOON)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def end_listeners(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as admin:
        ended = admin.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND query LIKE 'LISTEN%'"
        ).fetchall()
    assert ended


async def test_a_network_that_swallows_everything_is_noticed_by_the_round_trip(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy(database)
    async with proxy.listening() as url, listening(url, check=0.1, patience=0.5) as wake:
        proxy.black = True
        await until(lambda: not wake.alive)
        assert not await wake.wait("shop", 0.05)
        proxy.black = False
        await until(lambda: wake.alive, 30)
        assert await wake.wait("shop", 0)
    (record,) = caplog.records
    assert "does not get through" in record.getMessage()


async def test_a_pooler_that_swallows_notifications_is_noticed_and_the_lanes_poll(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy(database, deaf=True)
    async with (
        proxy.listening() as url,
        listening(url, alive=False, check=0.1, patience=0.3) as wake,
    ):
        await until(lambda: caplog.records)
        assert not wake.alive
        assert not await wake.wait("shop", 0.05)
        proxy.deaf = False
        await until(lambda: wake.alive)
    (record,) = caplog.records
    assert "a transaction pooler?" in record.getMessage()


async def test_a_listener_that_hears_is_asked_only_after_silence(database: str) -> None:
    proxy = Proxy(database)
    async with proxy.listening() as url, listening(url, check=0.5) as wake:
        connections = proxy.connections
        with notifier(database) as caller:
            end = time.monotonic() + 1.5
            while time.monotonic() < end:
                caller.call(["shop"])
                assert await wake.wait("shop", SOON)
                await asyncio.sleep(0.05)
        assert proxy.connections == connections
        await until(lambda: proxy.connections == connections + 1)
        assert wake.alive


async def test_a_database_that_is_down_raises_nothing_and_local_wakes_still_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening(DEAD, alive=False) as wake:
        assert not await wake.wait("shop", 0.2)
        await until(lambda: caplog.records)
        wake.wake("shop")
        assert await wake.wait("shop", LONG)
        assert not wake.alive
    assert len(caplog.records) == 1


async def test_closing_is_quick_in_every_state(database: str) -> None:
    loop = asyncio.get_running_loop()
    proxy = Proxy(database)
    async with proxy.listening() as url:
        for state in ("unused", "connecting", "alive", "black"):
            wake = ListeningWake(url, CHANNEL, check=0.05, patience=0.5)
            proxy.black = state == "connecting"
            if state != "unused":
                await wake.wait("shop", 0.01)
            if state in ("alive", "black"):
                await until(lambda wake=wake: wake.alive)
            if state == "black":
                proxy.black = True
                await wake.wait("nobody", 0.2)
            started = loop.time()
            await wake.close()
            assert loop.time() - started < 8, state


Start: TypeAlias = Callable[[int | None], AbstractContextManager[int]]


@contextmanager
def stoppable_server() -> Iterator[Start]:
    """Starts a server of its own, each time on the same data, on a port that is given or free."""
    with postgres18._reachable(postgres18._site_packages()) as packages, base.workspace() as directory:
        binaries: Path = packages / postgres18.INSTALLATION / "bin"
        data = directory / "data"
        base.prepare([binaries / "initdb", "-D", data, "--username=relaybox", "--auth=trust"], directory)
        settings = ["-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-c", "fsync=off"]

        def start(port: int | None) -> AbstractContextManager[int]:
            return base.running(
                lambda free: [binaries / "postgres", "-D", data, "-p", str(port or free), *settings],
                directory,
                ready="ready to accept connections",
            )

        yield start


async def test_a_listener_and_a_notifier_find_a_server_that_was_restarted() -> None:
    with available("PostgreSQL 18", stoppable_server()) as start:
        with start(None) as port:
            url = f"postgresql://relaybox@127.0.0.1:{port}/postgres"
            wake, caller = ListeningWake(url, CHANNEL), Notifier(url, CHANNEL)
            wake.start()
            await until(lambda: wake.alive)
            await wake.wait("shop", 0)
            caller.call(["shop"])
            assert await wake.wait("shop", SOON)
        await until(lambda: not wake.alive)
        assert not await wake.wait("shop", 0.1)
        with start(port):
            await until(lambda: wake.alive, 30)
            assert await wake.wait("shop", 0)
            caller.call(["shop"])
            assert await wake.wait("shop", SOON)
            await wake.close()
            caller.close()
