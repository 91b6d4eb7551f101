"""PostgreSQL's NOTIFY and LISTEN: the emitter's side and the relay's.

A notification is sent after the commit, on a connection of its own: NOTIFY inside the business transaction
would make the commits of the whole server queue for one lock. Its payload is the name of a destination.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from hashlib import sha256
from typing import Any, TypeAlias
from uuid import uuid4
from weakref import WeakSet

import msgspec
import psycopg
from psycopg import AsyncConnection, Connection, sql
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import ExecStatus

from relaybox.connect import hang_up
from relaybox.setting import mask_url
from relaybox.wakes.fork import renew_after_fork
from relaybox.wakes.local import LocalWake

log = logging.getLogger("relaybox.wake")

Listener: TypeAlias = AsyncConnection[tuple[Any, ...]]

IDLE_SECONDS = 30.0
"""Without a call, until the notifier's connection is closed and its thread ends."""
GAP_SECONDS = 0.002
"""At least this long between two notifications of one process; calls in between go out together."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds until the next try after trouble; doubled each time."""
CLOSE_SECONDS = 1.0
"""How long the end of a process may wait for its last call to go out."""
CONNECT_SECONDS = 5

PROBE = "\x01"
"""Begins the payload with which a listener hears itself; no destination's name has a control character."""

# Whatever of these stands in the URL goes before.
_CONNECT = {
    "connect_timeout": CONNECT_SECONDS,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}
# Nobody waits for this commit to be on disk, and it holds a lock that all notifying transactions share. So it
# is set for this transaction alone: behind a pooler the session is somebody else's the next moment.
_NOTIFY = b"""
    SELECT set_config('synchronous_commit', 'off', true), pg_notify($1, name)
    FROM json_array_elements_text($2::json) AS name
"""


def channel_name(schema: str | None, prefix: str) -> str:
    """The channel of an outbox; another one for each set of tables in a database."""
    if schema is None and not prefix:
        return "relaybox"
    return "relaybox_" + sha256(f"{schema or ''}.{prefix}".encode()).hexdigest()[:8]


def _options(url: str) -> dict[str, Any]:
    # No statement is prepared, because some poolers lose them.
    fixed = {"client_encoding": "utf-8", "autocommit": True, "prepare_threshold": None}
    return {**_CONNECT, **conninfo_to_dict(url), **fixed}


def _reason(error: BaseException, url: str) -> str:
    """What went wrong, in one line and without the password that libpq repeats where it cannot read a URL."""
    return " ".join(str(error).replace(url, mask_url(url)).split()) or type(error).__name__


class Notifier:
    """A ``Caller`` (see there) that notifies relays through the database.

    ``call`` only leaves the names; one thread with one connection sends them, all that came while the last
    ones were under way in one statement. Both are made for the first call and end after ``idle`` seconds
    without one. In trouble hints are dropped: the relays poll.
    """

    def __init__(self, url: str, channel: str, *, idle: float = IDLE_SECONDS) -> None:
        self._url = url
        self._channel = channel
        self._idle = idle
        self._warned = False
        self._thread: threading.Thread | None = None
        self.after_fork()
        renew_after_fork(self)
        _notifiers.add(self)

    def call(self, destinations: Iterable[str]) -> None:
        """Leave the names for the thread."""
        try:
            with self._changed:
                if not self._names:
                    self._changed.notify()
                self._names.update(destinations)
                if self._thread is None and self._names:
                    thread = threading.Thread(target=self._run, name="relaybox-notify", daemon=True)
                    thread.start()
                    self._thread = thread
        except (
            RuntimeError
        ) as error:  # no thread can be started: there are too many, or the process is ending
            self._warn(str(error))

    def close(self) -> None:
        """Send what was left, if that takes no longer than a second, and end; a later call starts anew."""
        with self._changed:
            thread = self._thread
            if thread is None:
                return
            self._closing = True
            self._changed.notify()
        thread.join(CLOSE_SECONDS)

    def after_fork(self) -> None:
        """The thread is the parent's; so is its connection, which nothing here can reach."""
        self._changed = threading.Condition(threading.Lock())
        self._names: set[str] = set()
        self._thread = None
        self._closing = False

    def _run(self) -> None:
        connection: Connection[Any] | None = None
        pause = begin = 0.0
        while names := self._next(begin, in_trouble=pause > 0):
            try:
                connection = self._send(connection, names)
            except Exception as error:
                connection = None
                self._warn(_reason(error, self._url))
                pause = min(max(2 * pause, FIRST_PAUSE), LONGEST_PAUSE)
            else:
                self._recovered()
                pause = 0.0
            begin = time.monotonic() + max(pause, GAP_SECONDS)
        if connection is not None:
            connection.close()

    def _next(self, begin: float, in_trouble: bool) -> list[str]:
        """The names to send, not before ``begin``; none when the thread is to end."""
        with self._changed:
            while not self._closing and (left := begin - time.monotonic()) > 0:
                self._changed.wait(left)
            self._changed.wait_for(lambda: self._names or self._closing, self._idle)
            names, self._names = list(self._names), set()
            if names and not (in_trouble and self._closing):
                return names
            self._thread, self._closing = None, False
            return []

    def _send(self, connection: Connection[Any] | None, names: list[str]) -> Connection[Any]:
        """Send the names; the connection to send the next ones on."""
        if connection is not None:
            try:
                self._execute(connection, names)
                return connection
            except psycopg.Error:
                # The server may have been restarted since the last call: worth a new connection, once.
                connection.close()
        fresh = psycopg.connect(**_options(self._url))
        try:
            self._execute(fresh, names)
        except BaseException:
            fresh.close()
            raise
        return fresh

    def _execute(self, connection: Connection[Any], names: list[str]) -> None:
        # A cursor would take four times as much of the processor, which the application's threads want.
        params = [self._channel.encode(), msgspec.json.encode(names)]
        result = connection.pgconn.exec_params(_NOTIFY, params)
        if result.status != ExecStatus.TUPLES_OK:
            raise psycopg.OperationalError(result.error_message.decode(errors="replace"))

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


class ListeningWake:
    """A ``Wake`` (see there) for the lanes of one relay, woken through the database too.

    One connection listens. After ``check`` seconds without a notification it is sent one through another
    connection, and has ``patience`` seconds to hear it: so a connection that died without a word is noticed,
    and a pooler that takes LISTEN and delivers nothing. Until a new one hears, ``alive`` is false and the
    lanes poll; nothing is raised.
    """

    def __init__(self, url: str, channel: str, *, check: float = 10.0, patience: float = 5.0) -> None:
        self.alive = False
        self._url = url
        self._channel = channel
        self._check = check
        self._patience = patience
        self._local = LocalWake()
        self._task: asyncio.Task[None] | None = None
        self._probe: str | None = None
        self._warned = False

    def start(self) -> None:
        """Begin to listen, in the background of the running loop; the first wait does it too."""
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="relaybox-listen")

    async def wait(self, destination: str, seconds: float) -> bool:
        """Sleep for ``seconds``, or until the destination was woken since the last wait; whether it was."""
        self.start()
        return await self._local.wait(destination, seconds)

    def wake(self, destination: str | None = None) -> None:
        """Wake one destination's lane, or all; from any thread."""
        self._local.wake(destination)

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
            # One that heard for long is tried again soon; one that fails again and again, ever more rarely.
            pause = FIRST_PAUSE if clock() - begun > 2 * LONGEST_PAUSE else pause
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _listen(self) -> None:
        """Until the connection is lost or turns out to be deaf, which raises."""
        connection: Listener = await AsyncConnection.connect(**_options(self._url))
        try:
            listen = sql.SQL("LISTEN {}").format(sql.Identifier(self._channel))
            await self._execute(connection, listen)
            await self._prove(connection)
            self._found()
            while True:
                if not await self._hear(connection, self._check):
                    await self._prove(connection)
        finally:
            self.alive = False
            await connection.close()

    async def _hear(self, connection: Listener, seconds: float) -> bool:
        """Wake whom the next notifications name; False when none came for so many seconds."""
        heard = False
        async for notification in connection.notifies(timeout=seconds, stop_after=1):
            heard = True
            self._take(notification.payload)
        return heard

    def _take(self, payload: str) -> None:
        if payload == self._probe:
            self._probe = None
        elif not payload.startswith(PROBE):
            self._local.wake(payload if self._local.knows(payload) else None)

    async def _prove(self, connection: Listener) -> None:
        """Send a notification the long way round, and hear it."""
        clock = asyncio.get_running_loop().time
        end = clock() + self._patience
        self._probe = f"{PROBE}{uuid4().hex}"
        sending = asyncio.create_task(self._send(self._probe))
        try:
            while self._probe is not None and (left := end - clock()) > 0:
                await self._hear(connection, left)
        finally:
            if self._probe is not None:
                self.alive = False
                sending.cancel()
            (failure,) = await asyncio.gather(sending, return_exceptions=True)
        if self._probe is not None:
            raise failure if isinstance(failure, psycopg.Error) else Deaf("a transaction pooler?")

    async def _send(self, payload: str) -> None:
        # A pooler might take what the listening connection sends to the session that has the LISTEN.
        connection: Listener = await AsyncConnection.connect(**_options(self._url))
        try:
            await self._execute(connection, "SELECT pg_notify(%s, %s)", (self._channel, payload))
        finally:
            await connection.close()

    async def _execute(self, connection: Listener, query: Any, params: Any = None) -> None:
        # Not a timeout, whose cancellation the driver answers by waiting for the server once more.
        timer = asyncio.get_running_loop().call_later(self._patience, _hang_up, connection)
        try:
            await connection.execute(query, params)
        finally:
            timer.cancel()

    def _found(self) -> None:
        self.alive = True
        # Something may have been missed.
        self._local.wake()
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
