"""Compare HTTP clients: requests per second, the cost of one, and which limits they support.

Each client posts the same bodies over kept connections, ``--at-once`` at the same time, in a process of its
own, on asyncio's loop and on uvloop, in turns. A client that is not installed is skipped. «CPU» is the CPU of
the process, threads included. Judge by it on a busy machine. «raw» writes the request by hand to a bare
protocol: it shows the cost without a client.

    pip install aiohttp httpx httpx2 niquests pyreqwest pyqwest curl_cffi uvloop
    python -m benchmarks.clients
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.metadata
import importlib.util
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, NamedTuple, TypeAlias, cast
from urllib.parse import urlsplit

from benchmarks.harness import Sample, Take, interleave, report
from benchmarks.process import PATIENCE, Loop, apart, begin
from benchmarks.receiver import ANSWER, Seen, counting_receiver

Post: TypeAlias = Callable[[bytes], Awaitable[None]]
Open: TypeAlias = Callable[[str, int], AbstractAsyncContextManager[Post]]

BODY = b'{"id":"01890f5c-0000-7000-8000-000000000000","type":"order.paid","data":{"note":"%b"}}' % (
    b"x" * 286
)
HEADERS = {"content-type": "application/json"}
LEAST = 5
LOOPS: tuple[Loop, ...] = ("asyncio", "uvloop")


class Hooks(NamedTuple):
    """The requirements of a sink that a client supports through its public interface."""

    address: str
    """Connect only to an address that was checked at that moment."""

    size: str
    """Stop reading an answer at a limit."""

    redirects: str
    """Refuse to follow redirects."""

    timeouts: str
    """Limit the time of each phase and of all of them."""

    tls: str
    """Choose the trusted certificates and the versions of the protocol."""


class Client(NamedTuple):
    """A client, and what it supports."""

    module: str
    open: Open
    hooks: Hooks


class Cost(NamedTuple):
    """The cost of a run."""

    rate: float
    cpu: float
    """Microseconds of CPU per request, of all threads."""

    its: float = 0.0
    """Microseconds of the receiver's CPU per request."""

    posted: int = 0
    """All requests, including the warm-up."""


def _check(status: int | None) -> None:
    if status != 200:
        raise AssertionError(f"answered {status}")


@asynccontextmanager
async def with_aiohttp(url: str, at_once: int) -> AsyncIterator[Post]:
    """Post with aiohttp."""
    import aiohttp

    async def post(body: bytes) -> None:
        async with session.post(url, data=body, headers=HEADERS) as response:
            await response.read()
            _check(response.status)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=at_once)) as session:
        yield post


def with_httpx(module: str) -> Open:
    """Post with httpx, or httpx2, which continues it."""

    @asynccontextmanager
    async def opened(url: str, at_once: int) -> AsyncIterator[Post]:
        httpx: Any = importlib.import_module(module)

        async def post(body: bytes) -> None:
            response = await client.post(url, content=body, headers=HEADERS)
            _check(response.status_code)

        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        async with httpx.AsyncClient(limits=limits, trust_env=False) as client:
            yield post

    return opened


@asynccontextmanager
async def with_niquests(url: str, at_once: int) -> AsyncIterator[Post]:
    """Post with niquests."""
    import niquests

    async def post(body: bytes) -> None:
        response = await session.post(url, data=body, headers=HEADERS)
        _check(response.status_code)

    async with niquests.AsyncSession(pool_maxsize=at_once) as session:
        session.trust_env = False
        yield post


@asynccontextmanager
async def with_pyreqwest(url: str, at_once: int) -> AsyncIterator[Post]:
    """Post with pyreqwest."""
    from pyreqwest.client import ClientBuilder

    async def post(body: bytes) -> None:
        response = await client.post(url).headers(HEADERS).body_bytes(body).build().send()
        await response.bytes()
        _check(response.status)

    async with ClientBuilder().max_connections(at_once).no_proxy().build() as client:
        yield post


@asynccontextmanager
async def with_pyqwest(url: str, at_once: int) -> AsyncIterator[Post]:
    """Post with pyqwest."""
    from pyqwest import Client, HTTPTransport

    async def post(body: bytes) -> None:
        response = await client.post(url, headers=HEADERS, content=body)
        _check(response.status)

    async with HTTPTransport(pool_max_idle_per_host=at_once, enable_otel=False) as transport:
        client = Client(transport)
        yield post


@asynccontextmanager
async def with_curl(url: str, at_once: int) -> AsyncIterator[Post]:
    """Post with curl_cffi."""
    from curl_cffi.requests import AsyncSession

    async def post(body: bytes) -> None:
        response = await session.post(url, data=body, headers=HEADERS)
        _check(response.status_code)

    async with AsyncSession(max_clients=at_once, trust_env=False) as session:
        yield post


class Raw(asyncio.Protocol):
    """One connection with one request at a time and a known answer."""

    def __init__(self) -> None:
        self.answered: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Take the whole answer: it is short."""
        assert data == ANSWER
        if self.answered is not None:
            self.answered.set_result(None)


@asynccontextmanager
async def with_nothing(url: str, at_once: int) -> AsyncIterator[Post]:
    """Post with a bare protocol."""
    loop = asyncio.get_running_loop()
    parts = urlsplit(url)
    made = [await loop.create_connection(Raw, parts.hostname, parts.port) for _ in range(at_once)]
    idle = [protocol for _, protocol in made]
    head = f"POST {parts.path} HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"

    async def post(body: bytes) -> None:
        connection = idle.pop()
        connection.answered = loop.create_future()
        connection.transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head.encode(), len(body), body))
        await connection.answered
        idle.append(connection)

    yield post
    for transport, _ in made:
        transport.close()


OWN_TRANSPORT = "own transport over httpcore"
FIXED_MAP = "no: a fixed map of names"
CLIENTS = {
    "aiohttp": Client(
        "aiohttp",
        with_aiohttp,
        Hooks("resolver", "stream, headers", "yes", "all, connect, read, total", "SSLContext"),
    ),
    "httpx": Client(
        "httpx",
        with_httpx("httpx"),
        Hooks(OWN_TRANSPORT, "stream", "yes", "connect, read, write, pool", "SSLContext"),
    ),
    "httpx2": Client(
        "httpx2",
        with_httpx("httpx2"),
        Hooks(OWN_TRANSPORT, "stream", "yes", "connect, read, write, pool", "SSLContext"),
    ),
    "niquests": Client(
        "niquests",
        with_niquests,
        Hooks("resolver", "stream", "yes", "connect, read, total", "own settings"),
    ),
    "pyreqwest": Client(
        "pyreqwest",
        with_pyreqwest,
        Hooks(FIXED_MAP, "stream", "yes", "connect, read, pool, total", "own settings"),
    ),
    "pyqwest": Client(
        "pyqwest",
        with_pyqwest,
        Hooks(FIXED_MAP, "stream", "yes", "connect, read, total", "own settings"),
    ),
    "curl_cffi": Client(
        "curl_cffi",
        with_curl,
        Hooks(FIXED_MAP, "stream", "yes", "connect, total", "own settings"),
    ),
    "raw": Client("asyncio", with_nothing, Hooks("–", "–", "–", "–", "–")),
}


async def measure(client: str, url: str, seconds: float, at_once: int) -> Cost:
    """Post for ``seconds``, after a warm-up of a quarter of that.

    Even a slow client uses each of its connections several times in both parts, so that requests are measured
    and not connecting.
    """
    end, posted, warm = 0.0, 0, 0

    async def work() -> None:
        nonlocal posted
        mine = 0
        while mine < LEAST or time.monotonic() < end:
            await post(BODY)
            mine += 1
            posted += 1

    async with CLIENTS[client].open(url, at_once) as post:
        for length in (seconds / 4, seconds):
            warm, began, used = posted, begin(), _cpu()
            end = began + length
            await asyncio.gather(*(work() for _ in range(at_once)))
        took, cpu = time.monotonic() - began, _cpu() - used
    return Cost((posted - warm) / took, 1e6 * cpu / (posted - warm), posted=posted)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def checked(client: str, loop: Loop, target: tuple[str, Seen], seconds: float, at_once: int) -> Cost:
    """Run ``measure`` in a process of its own; fail if the receiver did not get every request."""
    url, seen = target
    before = list(seen)
    limit = PATIENCE + 10 * seconds
    cost: Cost = await apart(measure, client, url, seconds, at_once, seconds=limit, loop=loop)
    # The receiver records its cost a little later.
    await asyncio.sleep(0.15)
    answered, used = (now - then for now, then in zip(seen, before, strict=True))
    if answered != cost.posted:
        raise AssertionError(f"{client} on {loop}: {cost.posted} posted, {answered} seen by the receiver")
    return cost._replace(its=used / 1000 / answered)


async def compare(seconds: float, rounds: int, at_once: int, only: list[str]) -> None:
    """Let all installed clients take turns, and print the results."""
    loops: list[Loop] = [loop for loop in LOOPS if importlib.util.find_spec(loop)]
    names = [name for name in only or CLIENTS if importlib.util.find_spec(CLIENTS[name].module)]
    costs: dict[str, list[Cost]] = {}
    with counting_receiver() as target:

        def taking(client: str, loop: Loop) -> Take:
            async def take() -> float:
                cost = await checked(client, loop, target, seconds, at_once)
                costs.setdefault(f"{client} on {loop}", []).append(cost)
                return cost.rate

            return take

        variants = {f"{name} on {loop}": taking(name, loop) for name in names for loop in loops}
        await interleave(variants, rounds, warm_up=0)
    lines = [_line(variant, costs[variant]) for variant in variants]
    facts = {variant: [cost._asdict() for cost in costs[variant]] for variant in variants}
    columns = ["", "version", "requests/s", "CPU µs", "receiver's", *Hooks._fields]
    report(f"HTTP clients, POSTs for {seconds:g} s, {at_once} at once", columns, lines, facts)


def _line(variant: str, costs: list[Cost]) -> list[str]:
    client = CLIENTS[variant.partition(" ")[0]]
    version = "" if client.module == "asyncio" else importlib.metadata.version(client.module)
    rates, cpu, its, _ = zip(*costs, strict=True)
    return [variant, version, *(Sample(values).show() for values in (rates, cpu, its)), *client.hooks]


def main() -> None:
    """Compare the named clients, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", help=", ".join(CLIENTS))
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--at-once", type=int, default=100)
    given = parser.parse_args()
    asyncio.run(compare(given.seconds, given.rounds, given.at_once, given.clients))


if __name__ == "__main__":
    main()
