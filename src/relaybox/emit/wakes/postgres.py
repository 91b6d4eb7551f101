"""Wake relays with PostgreSQL's NOTIFY and LISTEN; the payload is the name of a destination.

NOTIFY is sent after the commit on a separate connection. Inside the business transaction it would make all
commits of the server queue for one lock.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from asyncio import FIRST_COMPLETED
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from typing import Any, TypeAlias
from uuid import uuid4
from weakref import WeakSet

import psycopg
from psycopg import AsyncConnection
from psycopg.conninfo import conninfo_to_dict

from relaybox.core.values import without_password
from relaybox.database.connect import hang_up
from relaybox.database.drivers.notify import NOTIFY, Ear, NotifyConnection, listen
from relaybox.emit.wakes.local import LocalWake, renew_after_fork

log = logging.getLogger("relaybox.wake")

Listener: TypeAlias = AsyncConnection[tuple[Any, ...]]

IDLE_SECONDS = 30.0
"""Seconds without a call after which the notifier closes its connection and its thread."""
GAP_SECONDS = 0.001
"""Least seconds between two notifications of a process; calls in between are sent together."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds until the next try after a failure; doubled each time."""
CLOSE_SECONDS = 1.0
"""Seconds that the exit of a process may wait for its last call to go out."""
CONNECT_SECONDS = 5
ANSWER_SECONDS = 10.0

PROBE = "\x01"
"""Starts the payload that a listener sends to itself; no destination's name has a control character."""

# Parameters in the URL override these.
_CONNECT = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}


def channel_name(schema: str | None, prefix: str) -> str:
    """Return the channel of an outbox; each set of tables in a database has its own."""
    if schema is None and not prefix:
        return "relaybox"
    return "relaybox_" + sha256(f"{schema or ''}.{prefix}".encode()).hexdigest()[:8]


def _options(url: str) -> dict[str, Any]:
    # Prepare no statements, because some poolers lose them.
    fixed = {"client_encoding": "utf-8", "autocommit": True, "prepare_threshold": None}
    return {**_CONNECT, **conninfo_to_dict(url), **fixed}


def _reason(error: BaseException, url: str) -> str:
    """Return the error in one line, without the password that libpq repeats if it cannot parse a URL."""
    return " ".join(without_password(str(error), url).split()) or type(error).__name__


class Notifier:
    """A ``Caller`` that notifies relays through the database.

    A call sends at once if a connection is open and free, without waiting for the answer. Otherwise a thread
    connects and sends all waiting names in one statement. Both end after ``idle`` seconds without a call.
    After an error hints are dropped, because relays poll anyway.
    """

    def __init__(self, url: str, channel: str, *, idle: float = IDLE_SECONDS) -> None:
        self._url = url
        self._channel = channel
        self._idle = idle
        self._warned = False
        self._thread: threading.Thread | None = None
        self._line: NotifyConnection | None = None
        """Set while it is free; the thread takes it to send."""
        self.after_fork()
        renew_after_fork(self)
        _notifiers.add(self)

    def call(self, destinations: Iterable[str]) -> None:
        """Send the names now, or leave them to the thread."""
        try:
            with self._changed:
                waiting = bool(self._names) and self._thread is not None
                self._names.update(destinations)
                if waiting or not self._names or self._sent_at_once():
                    return
                self._changed.notify()
                if self._thread is None:
                    thread = threading.Thread(target=self._run, name="relaybox-notify", daemon=True)
                    thread.start()
                    self._thread = thread
        except RuntimeError as error:
            # No thread can be started: there are too many, or the process is ending.
            self._warn(str(error))

    def close(self) -> None:
        """Send what is left, within a second, and stop; a later call starts again."""
        with self._changed:
            thread = self._thread
            if thread is None:
                return
            self._closing = True
            self._changed.notify()
        thread.join(CLOSE_SECONDS)

    def after_fork(self) -> None:
        """Reset; keep a reference to the parent's connection, so that this process does not close it."""
        self._changed = threading.Condition(threading.Lock())
        self._names: set[str] = set()
        self._thread = None
        self._closing = False
        self._of_parent = self._line
        self._line = None
        self._begin = 0.0
        self._in_trouble = False

    def _sent_at_once(self) -> bool:
        """True if the names were sent from here, which is faster than waking the thread."""
        if self._line is None or time.monotonic() < self._begin:
            return False
        try:
            if not self._line.is_free():
                return False
            self._line.send(self._channel, list(self._names))
        except psycopg.Error:
            self._line.close()
            self._line = None
            return False
        self._names.clear()
        self._begin = time.monotonic() + GAP_SECONDS
        return True

    def _run(self) -> None:
        pause = 0.0
        while True:
            names, line = self._next()
            if not names:
                break
            try:
                line = self._send(line, names)
            except Exception as error:
                line = None
                self._warn(_reason(error, self._url))
                pause = min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)
            else:
                self._recovered()
                pause = 0.0
            with self._changed:
                self._line, self._in_trouble = line, pause > 0
                self._begin = time.monotonic() + max(pause, GAP_SECONDS)

    def _next(self) -> tuple[list[str], NotifyConnection | None]:
        """Return the names to send, when it is time, and the connection; no names if the thread must end."""
        with self._changed:
            while not self._closing and (seconds := self._rest()) > 0:
                self._changed.wait(seconds)
            names, self._names = list(self._names), set()
            line, self._line = self._line, None
            if names and not (self._in_trouble and self._closing):
                return names, line
            self._thread, self._closing = None, False
        if line is not None:
            line.close()
        return [], None

    def _rest(self) -> float:
        """Return the seconds until the next names can be sent, or until the thread is idle for too long."""
        end = self._begin if self._names else self._begin + self._idle
        return end - time.monotonic()

    def _send(self, line: NotifyConnection | None, names: list[str]) -> NotifyConnection:
        if line is not None:
            try:
                line.finish(ANSWER_SECONDS)
                line.send(self._channel, names)
                line.finish(ANSWER_SECONDS)
                return line
            except psycopg.Error:
                # The server may have restarted since the last call: try a new connection once.
                line.close()
        fresh = NotifyConnection(psycopg.connect(**_options(self._url)))
        try:
            fresh.send(self._channel, names)
            fresh.finish(ANSWER_SECONDS)
        except BaseException:
            fresh.close()
            raise
        return fresh

    def _warn(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("NOTIFY cannot be sent (%s): until it can, relays find events by polling", reason)

    def _recovered(self) -> None:
        if self._warned:
            self._warned = False
            log.info("NOTIFY can be sent again")


_notifiers: WeakSet[Notifier] = WeakSet()


@atexit.register
def _close_all() -> None:
    for notifier in list(_notifiers):
        notifier.close()


class Deaf(Exception):
    """A notification that was sent did not arrive."""


class ListeningWake(LocalWake):
    """A ``Wake`` for the lanes of one relay that is also woken through the database.

    After ``check`` seconds of silence, the listening connection must hear within ``patience`` seconds what
    another connection sends. This finds dead connections, and poolers that accept LISTEN but deliver nothing.
    Until a new one hears, ``alive`` is False and the lanes poll; nothing is raised.
    """

    def __init__(self, url: str, channel: str, *, check: float = 10.0, patience: float = 5.0) -> None:
        super().__init__()
        self._url = url
        self._channel = channel
        self._check = check
        self._patience = patience
        self._task: asyncio.Task[None] | None = None
        self._probe: tuple[str, asyncio.Future[None]] | None = None
        self._warned = False

    def start(self) -> None:
        """Start to listen in the running loop; the first ``wait`` does this too."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="relaybox-listen")

    async def wait(self, destination: str, seconds: float) -> bool:
        """Sleep until woken, at most ``seconds``; True if woken since the last wait."""
        self.start()
        return await super().wait(destination, seconds)

    async def close(self) -> None:
        """Stop listening."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        pause = FIRST_PAUSE
        while True:
            begun = clock()
            try:
                await self._listen()
            except Exception as error:
                self._lost(_reason(error, self._url))
            # After a long good period retry soon; after repeated failures wait longer each time.
            pause = FIRST_PAUSE if clock() - begun > 2 * LONGEST_PAUSE else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _listen(self) -> None:
        """Listen until the connection is lost or turns out to be deaf, which raises."""
        connection: Listener = await AsyncConnection.connect(**_options(self._url))
        try:
            await self._execute(connection, listen(self._channel))
            with Ear(connection, self._take) as ear:
                await self._prove(ear)
                self._found()
                while True:
                    await self._hear(ear)
        finally:
            self.alive = False
            await connection.close()

    async def _hear(self, ear: Ear) -> None:
        before = ear.heard
        await asyncio.wait([ear.lost], timeout=self._check)
        if ear.lost.done():
            ear.lost.result()
        if ear.heard == before:
            await self._prove(ear)

    def _take(self, payload: str) -> None:
        if self._probe is not None and payload == self._probe[0]:
            if not self._probe[1].done():
                self._probe[1].set_result(None)
        elif not payload.startswith(PROBE):
            self.wake(payload if self.knows(payload) else None)

    async def _prove(self, ear: Ear) -> None:
        """Send a notification through another connection, and raise if it does not arrive."""
        payload, heard = f"{PROBE}{uuid4().hex}", asyncio.get_running_loop().create_future()
        self._probe = payload, heard
        sending = asyncio.create_task(self._send(payload))
        try:
            await asyncio.wait([heard, ear.lost], timeout=self._patience, return_when=FIRST_COMPLETED)
        finally:
            self._probe = None
            if not heard.done():
                self.alive = False
                sending.cancel()
            (failure,) = await asyncio.gather(sending, return_exceptions=True)
        if ear.lost.done():
            ear.lost.result()
        if not heard.done():
            raise failure if isinstance(failure, psycopg.Error) else Deaf("a transaction pooler?")

    async def _send(self, payload: str) -> None:
        # On the listening connection, a pooler might pass it to the very session that has the LISTEN.
        connection: Listener = await AsyncConnection.connect(**_options(self._url))
        try:
            await self._execute(connection, NOTIFY, (self._channel, payload))
        finally:
            await connection.close()

    async def _execute(self, connection: Listener, query: Any, params: Any = None) -> None:
        # Not asyncio.timeout: after a cancellation psycopg waits for the server once more.
        timer = asyncio.get_running_loop().call_later(self._patience, _hang_up, connection)
        try:
            await connection.execute(query, params)
        finally:
            timer.cancel()

    def _found(self) -> None:
        self.alive = True
        # A notification may have been missed before.
        self.wake()
        if self._warned:
            self._warned = False
            log.info("LISTEN gets through again")

    def _lost(self, reason: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning("LISTEN does not get through (%s): until it does, the relay polls", reason)


def _hang_up(connection: Listener) -> None:
    with suppress(psycopg.Error):
        hang_up(connection.fileno())
