"""The receiver: an HTTP endpoint for each destination in a process of its own, which can misbehave.

It keeps what it applied, in the order in which it did, and counts the answers that nobody read: only what
they were about may come again by its fault. A bare protocol, so that it takes thousands of requests a second.
"""

from __future__ import annotations

import asyncio
import random
import socket
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from tests.waiting import wait_for

GIVEN_UP = (7, 8)
"""The states of a TCP socket whose peer reset or closed the connection: TCP_CLOSE and TCP_CLOSE_WAIT."""

Kind: TypeAlias = Literal[
    "well", "down", "slow", "status", "hang", "close", "hang after applying", "close after applying"
]


class Mood(msgspec.Struct, frozen=True):
    """How an endpoint behaves. ``share``: the part of the requests that is hit by it."""

    kind: Kind = "well"
    share: float = 1.0
    seconds: float = 0.0
    status: str = ""
    retry_after: str = ""
    """``date`` and a number of seconds: that moment as a date; anything else is sent as it is."""


class Plan(msgspec.Struct, frozen=True):
    """What it is started with: the socket to listen to for orders, and its endpoints."""

    control: str
    endpoints: list[str]
    seed: int


class Order(msgspec.Struct, frozen=True):
    """What the director says: a mood for an endpoint, or where to write down what was applied."""

    endpoint: str = ""
    mood: Mood | None = None
    dump: str = ""


class State(msgspec.Struct, frozen=True):
    ports: dict[str, int]
    applied: int
    unanswered: int
    last: float  # When it applied the last one, by the machine's monotonic clock


class Applied(msgspec.Struct, frozen=True, array_like=True):
    endpoint: str
    at: float
    headers: dict[str, str]
    body: bytes


class Endpoint:
    def __init__(self, name: str, receiver: Receiver) -> None:
        self.name = name
        self.receiver = receiver
        self.port = 0
        self.mood = Mood()
        self.connections: set[Connection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self) -> None:
        if self._server is None:
            loop = asyncio.get_running_loop()
            self._server = await loop.create_server(
                lambda: Connection(self), "127.0.0.1", self.port, backlog=512
            )
            self.port = self._server.sockets[0].getsockname()[1]

    def refuse(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self.connections):
            connection.transport.close()

    async def be(self, mood: Mood) -> None:
        self.mood = mood
        if mood.kind == "down":
            self.refuse()
        else:
            await self.listen()


class Connection(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._buffer = b""
        self._owes = False
        self._answered = False
        """True if the last request was applied and answered."""

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._endpoint.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._endpoint.connections.discard(self)
        # A peer that closes before it has read our answer resets the connection.
        if self._owes or (self._answered and isinstance(exc, ConnectionError)):
            self._endpoint.receiver.unanswered += 1

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, end, rest = self._buffer.partition(b"\r\n\r\n")
        if not end:
            return
        headers = _headers(head)
        length = int(headers.get("content-length", "0"))
        if len(rest) >= length:
            self._buffer = rest[length:]
            self._take(headers, rest[:length])

    def _take(self, headers: dict[str, str], body: bytes) -> None:
        mood = self._endpoint.mood
        self._answered = False
        if mood.kind != "well" and self._endpoint.receiver.random() >= mood.share:
            mood = Mood()
        if mood.kind in ("well", "slow", "hang after applying", "close after applying"):
            self._endpoint.receiver.apply(self._endpoint.name, headers, body)
            self._owes = True
        match mood.kind:
            case "well":
                self._answer("200 OK")
            case "slow":
                asyncio.get_running_loop().call_later(mood.seconds, self._answer, "200 OK")
            case "status":
                self._answer(mood.status, _retry_after(mood.retry_after))
            case "close" | "close after applying" | "down":
                self.transport.close()

    def _answer(self, status: str, *headers: str) -> None:
        if self.transport.is_closing() or self._peer_gave_up():
            return
        self._answered, self._owes = self._owes, False
        lines = [f"HTTP/1.1 {status}", "Content-Length: 0", *filter(None, headers), "", ""]
        self.transport.write("\r\n".join(lines).encode())

    def _peer_gave_up(self) -> bool:
        """True if the peer closed the connection: on a busy machine it may time out before we answer."""
        info = self.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
        return info[0] in GIVEN_UP


class Receiver:
    def __init__(self, plan: Plan) -> None:
        self.random: Callable[[], float] = random.Random(plan.seed).random
        self.unanswered = 0
        self._control = plan.control
        self.endpoints = {name: Endpoint(name, self) for name in plan.endpoints}
        self.applied: list[Applied] = []

    def apply(self, endpoint: str, headers: dict[str, str], body: bytes) -> None:
        self.applied.append(Applied(endpoint, time.monotonic(), headers, body))

    async def serve(self) -> None:
        for endpoint in self.endpoints.values():
            await endpoint.listen()
        server = await asyncio.start_unix_server(self._obey, self._control)
        await server.serve_forever()

    async def _obey(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            order = msgspec.json.decode(line, type=Order)
            if order.mood is not None:
                await self.endpoints[order.endpoint].be(order.mood)
            if order.dump:
                self._write(Path(order.dump))
            writer.write(msgspec.json.encode(self._state()) + b"\n")

    def _write(self, file: Path) -> None:
        file.write_bytes(msgspec.msgpack.encode(self.applied))

    def _state(self) -> State:
        owing = sum(one._owes for endpoint in self.endpoints.values() for one in endpoint.connections)
        return State(
            {name: endpoint.port for name, endpoint in self.endpoints.items()},
            len(self.applied),
            self.unanswered + owing,
            self.applied[-1].at if self.applied else 0.0,
        )


class Remote:
    def __init__(self, control: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        wait_for(lambda: not self._socket.connect_ex(str(control)), "the receiver begins")
        self._lines = self._socket.makefile("rb")

    def be(self, endpoint: str, mood: Mood) -> State:
        return self._say(Order(endpoint, mood))

    def state(self) -> State:
        return self._say(Order())

    def applied(self, file: Path) -> list[Applied]:
        """Return what it applied, in order, and write it to ``file``."""
        self._say(Order(dump=str(file)))
        return msgspec.msgpack.decode(file.read_bytes(), type=list[Applied])

    def _say(self, order: Order) -> State:
        self._socket.sendall(msgspec.json.encode(order) + b"\n")
        return msgspec.json.decode(self._lines.readline(), type=State)

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


def _headers(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}


def _retry_after(value: str) -> str:
    if value.startswith("date"):
        moment = datetime.now(UTC) + timedelta(seconds=float(value.removeprefix("date")))
        value = format_datetime(moment, usegmt=True)
    return f"Retry-After: {value}" if value else ""


def main(plan: bytes) -> None:
    asyncio.run(Receiver(msgspec.json.decode(plan, type=Plan)).serve())
