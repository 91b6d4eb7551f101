"""Sends and receives NOTIFY through psycopg's libpq, which takes far less CPU than its cursors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from selectors import EVENT_READ, DefaultSelector
from typing import Any

import psycopg
from psycopg import AsyncConnection, Connection, sql
from psycopg.pq import ExecStatus

# This commit need not wait for the disk, and it holds a lock that all notifying transactions share. The
# setting covers one transaction only: behind a pooler the session soon belongs to another client.
_UNHURRIED = b"SELECT set_config('synchronous_commit', 'off', true)"

NOTIFY = "SELECT pg_notify(%s, %s)"


def listen(channel: str) -> sql.Composed:
    """Return the statement that listens on a channel."""
    return sql.SQL("LISTEN {}").format(sql.Identifier(channel))


class NotifyConnection:
    """A connection that sends notifications. It reads each answer before it sends the next one."""

    def __init__(self, connection: Connection[Any]) -> None:
        self._connection = connection
        self._libpq = connection.pgconn
        self._asked = False

    def send(self, channel: str, names: list[str]) -> None:
        """Notify the relays of these destinations."""
        calls = [b"pg_notify($1, $%d)" % place for place in range(2, len(names) + 2)]
        self._libpq.send_query_params(
            b", ".join([_UNHURRIED, *calls]), [text.encode() for text in (channel, *names)]
        )
        self._asked = True

    def is_free(self) -> bool:
        """True if the last notification was answered."""
        # Twice: a server's last message arrives before its hang-up.
        self._libpq.consume_input()
        self._libpq.consume_input()
        while self._asked and not self._libpq.is_busy():
            self._take()
        return not self._asked

    def finish(self, seconds: float) -> None:
        """Wait for the last answer. libpq's own wait would block all other threads."""
        end = time.monotonic() + seconds
        with DefaultSelector() as selector:
            selector.register(self._libpq.socket, EVENT_READ)
            while self._asked:
                if not self._libpq.is_busy():
                    self._take()
                elif selector.select(max(0.0, end - time.monotonic())):
                    self._libpq.consume_input()
                else:
                    raise psycopg.OperationalError(f"no answer to NOTIFY for {seconds:g} s")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _take(self) -> None:
        result = self._libpq.get_result()
        self._asked = result is not None
        if result is not None and result.status != ExecStatus.TUPLES_OK:
            raise psycopg.OperationalError(result.get_error_message())


class Ear:
    """Passes on each notification as soon as it arrives."""

    def __init__(self, connection: AsyncConnection[Any], take: Callable[[str], None]) -> None:
        self.heard = 0
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Raises the error that ended the connection."""
        self._libpq = connection.pgconn
        self._socket = connection.fileno()
        self._take = take

    def __enter__(self) -> Ear:
        self.lost.get_loop().add_reader(self._socket, self._read)
        return self

    def __exit__(self, *_: object) -> None:
        self.lost.get_loop().remove_reader(self._socket)
        self.lost.cancel()

    def _read(self) -> None:
        try:
            self._libpq.consume_input()
            while (notification := self._libpq.notifies()) is not None:
                self.heard += 1
                self._take(notification.extra.decode(errors="replace"))
        except psycopg.Error as error:
            self.lost.get_loop().remove_reader(self._socket)
            self.lost.set_exception(error)
