"""What passes between a database and its clients, read just far enough to know a COMMIT and its answer.

A COMMIT is known as a statement, by the framing of its protocol: the same letters in a payload are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from struct import unpack_from

COMMIT = re.compile(rb"\s*COMMIT(\s+(WORK|TRANSACTION))?\s*;?\s*", re.IGNORECASE)

STARTUP = 3
"""The major version that a PostgreSQL client's first message asks for."""
CANCEL, SSL, GSS = 80877102, 80877103, 80877104
COM_QUERY = 0x03


class PostgresWire:
    """PostgreSQL, simple and extended queries, pipelined or not; what is encrypted is not understood."""

    def __init__(self) -> None:
        self._from_client = bytearray()
        self._from_server = bytearray()
        self._started = False
        self._blind = False
        self._bare = 0
        self._named_commits: set[bytes] = set()
        # ReadyForQuery comes once after the start, and then once for each query or Sync.
        self._asked = 1
        self._answered = 0
        self._awaited: int | None = None

    def sent(self, data: bytes) -> bool:
        """Take in what the client sends; whether a COMMIT is complete with it."""
        if self._blind:
            return False
        self._from_client += data
        if not self._started:
            self._start()
        if not self._started:
            return False
        self._awaited = None
        for message in _messages(self._from_client):
            self._take(*message)
        return self._awaited is not None

    def received(self, data: bytes) -> bool:
        """Take in what the server sends; whether the COMMIT that was sent last is answered."""
        if self._blind:
            return False
        while self._bare and data:
            self._bare -= 1
            self._blind, data = data[:1] != b"N", data[1:]
        self._from_server += data
        self._answered += sum(kind == b"Z" for kind, _ in _messages(self._from_server))
        return self._awaited is not None and self._answered >= self._awaited

    def _start(self) -> None:
        """Past the messages without a type: requests for encryption, and what opens a session."""
        while not self._started and len(self._from_client) >= 8:
            length, code = unpack_from("!II", self._from_client)
            if code in (SSL, GSS):
                self._bare += 1
            elif code >> 16 == STARTUP:
                if len(self._from_client) < length:
                    return
                self._started = True
            else:
                self._blind = True
                return
            del self._from_client[:length]

    def _take(self, kind: bytes, body: bytes) -> None:
        found = False
        match kind:
            case b"Q":
                found = _is_commit(body.rstrip(b"\0"))
            case b"P":
                name, statement, *_ = body.split(b"\0", 2)
                self._named_commits.discard(name)
                if _is_commit(statement):
                    self._named_commits.add(name)
            case b"B":
                # A prepared COMMIT is named, not spelled out.
                _portal, name, *_ = body.split(b"\0", 2)
                found = name in self._named_commits
        if found and self._awaited is None:
            self._awaited = self._asked + 1
        self._asked += kind in (b"Q", b"S", b"F")


class MysqlWire:
    """MariaDB and MySQL: one command at a time, in plain text."""

    def __init__(self) -> None:
        self._from_client = bytearray()
        self._asked = False

    def sent(self, data: bytes) -> bool:
        """Take in what the client sends; whether a COMMIT is complete with it."""
        self._from_client += data
        found = [packet for packet in _packets(self._from_client) if _is_command(*packet)]
        self._asked = self._asked or bool(found)
        return bool(found)

    def received(self, data: bytes) -> bool:
        """Take in what the server sends; whether the COMMIT is answered."""
        return self._asked and bool(data)


def _is_commit(statement: bytes) -> bool:
    return COMMIT.fullmatch(statement) is not None


def _is_command(number: int, body: bytes) -> bool:
    return number == 0 and body[:1] == bytes([COM_QUERY]) and _is_commit(body[1:])


def _messages(buffer: bytearray) -> Iterator[tuple[bytes, bytes]]:
    """Take complete messages of PostgreSQL out of the buffer: their type and their body."""
    at = 0
    while len(buffer) - at >= 5:
        end = at + 1 + unpack_from("!I", buffer, at + 1)[0]
        if end > len(buffer):
            break
        yield bytes(buffer[at : at + 1]), bytes(buffer[at + 5 : end])
        at = end
    del buffer[:at]


def _packets(buffer: bytearray) -> Iterator[tuple[int, bytes]]:
    """Take complete packets of MySQL out of the buffer: their number and their body."""
    at = 0
    while len(buffer) - at >= 4:
        end = at + 4 + int.from_bytes(buffer[at : at + 3], "little")
        if end > len(buffer):
            break
        yield buffer[at + 3], bytes(buffer[at + 4 : end])
        at = end
    del buffer[:at]
