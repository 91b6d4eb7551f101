"""NOTIFY and LISTEN through a real PostgreSQL, and through networks and poolers that fail in their ways."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relaybox.emit.wakes.postgres import PROBE, ListeningWake, Notifier
from tests.chaos import proxy as chaos
from tests.integration.shop import end_sessions
from tests.integration.test_costs import Wire
from tests.waiting import PATIENCE, await_for, wait_for

CHANNEL = "relaybox"
Threads = Callable[[], set[threading.Thread]]
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
    """Open a wake that listens, and take the wakes of its start."""
    wake = ListeningWake(url, channel, **options)
    wake.start()
    try:
        if alive:
            await await_for(lambda: wake.alive)
            for name in ("shop", "audit"):
                await wake.wait(name, 0)
        yield wake
    finally:
        await wake.close()


async def woken(wake: ListeningWake, name: str) -> bool:
    """True if a lane that would have slept for hours was woken."""
    async with asyncio.timeout(PATIENCE):
        return await wake.wait(name, 10_000)


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

    def backend_of(self, caller: Notifier) -> int:
        """Return the backend through which a caller notifies."""
        caller.call(["before"])
        wait_for(lambda: "before" in self.heard)
        (backend,) = self.backends
        return backend

    def _listen(self) -> None:
        while not self._stop:
            for notification in self._connection.notifies(timeout=0.05):
                if not notification.payload.startswith(PROBE):
                    self.heard.append(notification.payload)
                    self.backends.add(notification.pid)


class Proxy(Wire):
    """While it is ``black`` it takes everything and passes nothing on.

    While it is ``deaf`` it drops notifications only, as a pooler does that has no session for them.
    """

    def __init__(self, url: str, *, deaf: bool = False) -> None:
        super().__init__(sa.make_url(url))
        self.deaf = deaf
        self.black = False

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
        shop, audit = (asyncio.create_task(woken(wake, name)) for name in ("shop", "audit"))
        with notifier(database) as caller:
            caller.call(["shop"])
            assert await shop
            assert not audit.done()
            caller.call(["a destination that has no lane here"])
            assert await audit


async def test_a_plain_notify_wakes_all_and_another_outboxs_channel_nobody(database: str) -> None:
    async with listening(database) as wake:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute("NOTIFY relaybox_other, 'shop'")
            assert not await wake.wait("shop", 0.2)
            connection.execute("NOTIFY relaybox")
            assert await woken(wake, "shop")


async def test_another_relays_probe_wakes_nobody(database: str) -> None:
    async with listening(database) as wake, listening(database):
        assert not await wake.wait("shop", 0.2)


def test_a_burst_is_coalesced_and_its_last_call_is_not_lost(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.emit.wakes.postgres.GAP_SECONDS", 0.05)
    with Ear(database) as ear, notifier(database) as caller:
        started = time.monotonic()
        for _ in range(1_000):
            caller.call(["shop", "audit"])
        caller.call(["last"])
        wait_for(lambda: "last" in ear.heard)
        gaps = (time.monotonic() - started) / 0.05
        assert {"shop", "audit", "last"} == set(ear.heard)
        assert ear.heard.count("shop") <= gaps + 3
        assert len(ear.backends) == 1


def test_calls_one_after_the_other_all_arrive(database: str) -> None:
    with Ear(database) as ear, notifier(database) as caller:
        for number in range(50):
            caller.call([f"n{number}"])
            wait_for(lambda number=number: f"n{number}" in ear.heard)
        assert len(ear.backends) == 1


def test_a_notifier_that_is_idle_holds_no_connection_and_no_thread(database: str, notifying: Threads) -> None:
    with Ear(database) as ear, notifier(database, idle=0.05) as caller:
        for name in ("first", "second"):
            caller.call([name])
            wait_for(lambda name=name: name in ear.heard)
            wait_for(lambda: not notifying())
        assert len(ear.backends) == 2
        caller.call([])
        assert not notifying()


@pytest.fixture
def notifying() -> Threads:
    """Return the threads of notifiers, without idle ones that other tests left."""

    def threads() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name == "relaybox-notify"}

    before = threads()
    return lambda: threads() - before


def test_a_notifier_survives_the_loss_of_its_connection_without_losing_a_call(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    with Ear(database) as ear, notifier(database) as caller:
        backend = ear.backend_of(caller)
        with psycopg.connect(database, autocommit=True) as admin:
            admin.execute("SELECT pg_terminate_backend(%s, 5000)", (backend,))
        caller.call(["after"])
        wait_for(lambda: "after" in ear.heard)
    assert caplog.records == []


@contextmanager
def stopped(backend: int) -> Iterator[None]:
    """Stop a server; the block must not wait for it. Another process ends one that does."""
    later = f"import os, signal, time; time.sleep({PATIENCE}); os.kill({backend}, signal.SIGCONT)"
    os.kill(backend, signal.SIGSTOP)
    with subprocess.Popen([sys.executable, "-c", later]) as process:
        try:
            yield
            assert process.poll() is None, "it waited for the server"
        finally:
            os.kill(backend, signal.SIGCONT)
            process.kill()


def test_a_server_that_does_not_answer_holds_up_no_other_thread(database: str) -> None:
    with Ear(database) as ear, notifier(database) as caller:
        backend = ear.backend_of(caller)
        with stopped(backend):
            for _ in range(100):
                caller.call(["during"])
                time.sleep(0.002)
            assert "during" not in ear.heard
        caller.call(["after"])
        wait_for(lambda: "after" in ear.heard)


def test_a_server_that_does_not_answer_in_time_is_left_for_a_new_connection(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relaybox.emit.wakes.postgres.ANSWER_SECONDS", 1.0)
    with Ear(database) as ear, notifier(database) as caller:
        backend = ear.backend_of(caller)
        with stopped(backend):
            caller.call(["during"])
            caller.call(["behind it"])
            wait_for(lambda: "behind it" in ear.heard)
        assert len(ear.backends) > 1


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
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, notifying: Threads
) -> None:
    tried, answers = threading.Event(), threading.Event()

    def connect(**options: Any) -> None:
        tried.set()
        answers.wait(PATIENCE)
        raise psycopg.OperationalError("down")

    monkeypatch.setattr("relaybox.emit.wakes.postgres.psycopg.connect", connect)
    with notifier(DEAD) as caller:
        for _ in range(200):
            caller.call(["shop"])
        assert tried.wait(PATIENCE)
        caller.call(["shop"])
        assert caplog.records == [], "nobody has waited for the connection"
        answers.set()
        wait_for(lambda: caplog.records)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "polling" in record.getMessage()
    wait_for(lambda: not notifying())


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
        monkeypatch.setattr("relaybox.emit.wakes.postgres.FIRST_PAUSE", 0.05)
        monkeypatch.setattr("relaybox.emit.wakes.postgres.psycopg.connect", try_to)
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
from relaybox.emit.wakes.postgres import Notifier
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
        process.communicate(b"\n", timeout=PATIENCE)
        assert process.returncode == 0
        wait_for(lambda: "parent again" in ear.heard)
        children = {f"child{number}" for number in range(10)}
        assert children == set(ear.heard) - {"parent", "parent again", "noise"}
        assert len(ear.backends) == 11  # the parent's was not broken by its children's ends


EXIT = """
import sys
from relaybox.emit.wakes.postgres import Notifier
notifier = Notifier(sys.argv[1], "relaybox")
notifier.call(["farewell"])
"""


def test_the_last_call_of_a_process_is_sent_and_a_silent_database_does_not_hold_it(database: str) -> None:
    with Ear(database) as ear:
        subprocess.run(
            [sys.executable, "-W", "error::ResourceWarning", "-c", EXIT, database],
            check=True,
            timeout=PATIENCE,
        )
        wait_for(lambda: ear.heard == ["farewell"])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"postgresql://nobody@127.0.0.1:{silent.getsockname()[1]}/nothing?connect_timeout=0"
        subprocess.run([sys.executable, "-c", EXIT, url], check=True, timeout=PATIENCE)


async def test_a_listener_whose_session_is_ended_reconnects_and_wakes_all(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "relaybox.wake")
    async with listening(database) as wake:
        end_sessions(database)
        await await_for(lambda: not wake.alive)
        await await_for(lambda: wake.alive)
        assert await wake.wait("shop", 0)
        with notifier(database) as caller:
            caller.call(["shop"])
            assert await woken(wake, "shop")
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_a_network_that_swallows_everything_is_noticed_by_the_round_trip(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy(database)
    async with proxy.listening() as url, listening(url, check=0.1, patience=1.0) as wake:
        proxy.black = True
        await await_for(lambda: not wake.alive)
        assert not await wake.wait("shop", 0.05)
        proxy.black = False
        await await_for(lambda: wake.alive)
        assert await wake.wait("shop", 0)
    (record,) = caplog.records
    assert "does not get through" in record.getMessage()


async def test_a_pooler_that_swallows_notifications_is_noticed_and_the_lanes_poll(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    proxy = Proxy(database, deaf=True)
    async with proxy.listening() as url, listening(url, alive=False, check=0.1, patience=0.3) as wake:
        await await_for(lambda: caplog.records)
        assert not wake.alive
        assert not await wake.wait("shop", 0.05)
        proxy.deaf = False
        await await_for(lambda: wake.alive)
    (record,) = caplog.records
    assert "a transaction pooler?" in record.getMessage()


async def test_a_listener_that_hears_is_asked_only_after_silence(database: str) -> None:
    check = 0.5
    proxy = Proxy(database)
    async with proxy.listening() as url, listening(url, check=check) as wake:
        connections = proxy.connections
        with notifier(database) as caller:
            moments = [time.monotonic()]
            while moments[-1] < moments[0] + 3 * check:
                caller.call(["shop"])
                assert await woken(wake, "shop")
                moments.append(time.monotonic())
                await asyncio.sleep(0.05)
        silence = max(later - sooner for sooner, later in pairwise([*moments, time.monotonic()]))
        assert proxy.connections == connections or silence > check / 2
        await await_for(lambda: proxy.connections > connections)
        assert wake.alive


async def test_a_database_that_is_down_raises_nothing_and_local_wakes_still_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with listening(DEAD, alive=False) as wake:
        assert not await wake.wait("shop", 0.2)
        await await_for(lambda: caplog.records)
        wake.wake("shop")
        assert await woken(wake, "shop")
        assert not wake.alive
    assert len(caplog.records) == 1


async def test_closing_ends_in_every_state(database: str) -> None:
    proxy = Proxy(database)
    async with proxy.listening() as url:
        for state in ("unused", "connecting", "alive", "black"):
            wake = ListeningWake(url, CHANNEL, check=0.05, patience=0.5)
            proxy.black = state == "connecting"
            if state != "unused":
                await wake.wait("shop", 0.01)
            if state in ("alive", "black"):
                await await_for(lambda wake=wake: wake.alive)
            if state == "black":
                proxy.black = True
                await wake.wait("nobody", 0.2)
            await asyncio.wait_for(wake.close(), PATIENCE)


async def test_a_listener_and_a_notifier_find_a_server_that_was_away(database: str) -> None:
    server = sa.make_url(database)
    with chaos.Proxy(server.host or "", server.port or 0) as proxy:
        url = server.set(port=proxy.port).render_as_string(hide_password=False)
        async with listening(url) as wake:
            with notifier(url) as caller:
                caller.call(["shop"])
                assert await woken(wake, "shop")
                proxy.set(refuse=True)
                proxy.reset()
                await await_for(lambda: not wake.alive)
                assert not await wake.wait("shop", 0.1)
                proxy.set()
                await await_for(lambda: wake.alive)
                assert await wake.wait("shop", 0)
                caller.call(["shop"])
                assert await woken(wake, "shop")
