"""A TCP proxy in front of a database, or of anything else, that does to connections what networks do.

It runs in a thread of its own, with its own event loop; its controls may be called from any thread, and hold
when they return.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from struct import pack, unpack_from
from typing import Any, Literal, Self, TypeAlias, TypeVar
from weakref import WeakSet

T = TypeVar("T")
When: TypeAlias = Literal["before", "after"]

CHUNK = 1 << 16
CONTROL_SECONDS = 60.0


class Proxy:
    """Listens on 127.0.0.1 at ``port`` and connects each client with the target."""

    def __init__(self, host: str, port: int) -> None:
        self.target = host, port
        self.cuts = 0  # How many COMMITs were cut so far
        self.delay = 0.0
        self.hole = False
        self._when: When = "before"
        self._left = 0
        self._listener: socket.socket | None = None
        self._links: set[Link] = set()
        # Holds the port while there is no listener: otherwise the kernel might give it to another.
        self._place = _bound(0)
        self.port: int = self._place.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proxy", daemon=True)
        _proxies.add(self)

    def __enter__(self) -> Self:
        self._thread.start()
        self._do(self._listen)
        return self

    def __exit__(self, *_: object) -> None:
        self._do(self._refuse)
        self.reset()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._place.close()

    def set(self, *, delay: float = 0.0, hole: bool = False, refuse: bool = False) -> None:
        """Set the faults from now on; those that are not named end.

        ``delay``: seconds that everything takes, each way. ``hole``: connections stay, and what is sent on
        them is lost; when it ends, those that lost something are reset, as by a router that has forgotten
        them. ``refuse``: no new connections.
        """

        async def change() -> None:
            self.delay, self.hole = delay, hole
            self._refuse() if refuse else self._listen()
            if not hole:
                await self._reset(lambda link: link.torn)

        self._await(change())

    def cut_at_commit(self, when: When, count: int = 1) -> None:
        """Cut the connection at each of the next ``count`` COMMITs.

        ``before``: the server never sees it. ``after``: the server has answered, the client never hears it.
        """

        def change() -> None:
            self._when, self._left = when, count

        self._do(change)

    def reset(self) -> int:
        """Reset every open connection; return how many there were."""
        return self._await(self._reset(lambda link: True))

    def take_cut(self) -> When | None:
        """Return when to cut this COMMIT of a link, or None to let it pass."""
        if not self._left:
            return None
        self._left -= 1
        self.cuts += 1
        return self._when

    def forked(self) -> None:
        """Close a child's copies, so that connections end when the parent ends them."""
        for end in (self._place, self._listener, *(end for link in self._links for end in link.ends)):
            if end is not None and end.fileno() >= 0:
                os.close(end.detach())

    async def _reset(self, concerned: Callable[[Link], bool]) -> int:
        links = [link for link in self._links if concerned(link)]
        for link in links:
            link.reset()
        await asyncio.gather(*(link.task for link in links), return_exceptions=True)
        return len(links)

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bound(self.port)
            self._listener.listen(128)
            self._loop.add_reader(self._listener, self._accept, self._listener)

    def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        with _forking, suppress(OSError):
            client, _ = listener.accept()
            link = Link(self, client)
            self._links.add(link)
            link.task = self._loop.create_task(link.run())
            link.task.add_done_callback(lambda _: self._ended(link))

    def _ended(self, link: Link) -> None:
        for end in link.ends:
            end.close()
        self._links.discard(link)

    def _do(self, change: Callable[[], None]) -> None:
        async def call() -> None:
            change()

        self._await(call())

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(CONTROL_SECONDS)


class Link:
    task: asyncio.Task[None]

    def __init__(self, proxy: Proxy, client: socket.socket) -> None:
        self.torn = False  # Whether something that was sent on it is lost
        self._proxy = proxy
        self._loop = asyncio.get_running_loop()
        self._client = _ready(client)
        self._server = _ready(socket.socket())
        self._wire: PostgresWire | MysqlWire | None = None
        self._silenced = False

    @property
    def ends(self) -> tuple[socket.socket, socket.socket]:
        return self._client, self._server

    async def run(self) -> None:
        """Pass on what comes, until either side ends it or it is reset."""
        try:
            await self._connect()
            down = self._pump(self._server, self._client, self._from_server)
            up = self._pump(self._client, self._server, self._from_client)
            async with asyncio.TaskGroup() as pumps:
                pumps.create_task(down)
                pumps.create_task(up)
        except* (OSError, Ended):
            pass

    def reset(self) -> None:
        self._linger_not()
        self.task.cancel()

    async def _connect(self) -> None:
        try:
            await self._loop.sock_connect(self._server, self._proxy.target)
        except OSError:
            self._linger_not()
            raise

    async def _pump(
        self, source: socket.socket, drain: socket.socket, pass_on: Callable[[bytes], bool]
    ) -> None:
        # Read on while the first bytes are under way: a delay does not limit how much is.
        chunks: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        async with asyncio.TaskGroup() as both:
            both.create_task(self._read(source, chunks))
            both.create_task(self._write(drain, chunks, pass_on))

    async def _read(self, source: socket.socket, chunks: asyncio.Queue[tuple[float, bytes]]) -> None:
        chunk = b"-"
        while chunk:
            try:
                chunk = await self._loop.sock_recv(source, CHUNK)
            except OSError:
                self._linger_not()
                chunk = b""
            chunks.put_nowait((self._loop.time() + self._proxy.delay, chunk))

    async def _write(
        self,
        drain: socket.socket,
        chunks: asyncio.Queue[tuple[float, bytes]],
        pass_on: Callable[[bytes], bool],
    ) -> None:
        while True:
            due, chunk = await chunks.get()
            await asyncio.sleep(max(due - self._loop.time(), 0))
            if self._proxy.hole:
                self.torn = True
            elif not chunk:
                raise Ended
            elif pass_on(chunk):
                await self._loop.sock_sendall(drain, chunk)

    def _from_client(self, chunk: bytes) -> bool:
        # A server of MySQL greets its client; one of PostgreSQL waits for the client's word.
        self._wire = self._wire or PostgresWire()
        if not self._silenced and self._wire.sent(chunk) and (when := self._proxy.take_cut()):
            if when == "before":
                self._cut()
            self._silenced = True
        return True

    def _from_server(self, chunk: bytes) -> bool:
        self._wire = self._wire or MysqlWire()
        if self._wire.received(chunk) and self._silenced:
            self._cut()
        return not self._silenced

    def _cut(self) -> None:
        self._linger_not()
        raise Ended

    def _linger_not(self) -> None:
        # A socket that must not linger is closed with RST.
        for end in self.ends:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, pack("ii", 1, 0))


class Ended(Exception):
    """One side has ended the connection, or the proxy has."""


def _bound(port: int) -> socket.socket:
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    place.bind(("127.0.0.1", port))
    place.setblocking(False)
    return place


def _ready(end: socket.socket) -> socket.socket:
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return end


_proxies: WeakSet[Proxy] = WeakSet()
_forking = threading.Lock()
"""Held while a connection is taken, and while the process forks: a child must know of all of them."""


def _forked() -> None:
    _forking.release()
    for proxy in _proxies:
        proxy.forked()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_forked)


COMMIT = re.compile(rb"\s*COMMIT(\s+(WORK|TRANSACTION))?\s*;?\s*", re.IGNORECASE)

STARTUP = 3  # The major version that a PostgreSQL client's first message asks for
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
        self._from_client += data
        found = [packet for packet in _packets(self._from_client) if _is_command(*packet)]
        self._asked = self._asked or bool(found)
        return bool(found)

    def received(self, data: bytes) -> bool:
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
