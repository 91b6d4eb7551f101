"""Write documents into search engines, against a bare loop of bulk requests: ``python -m benchmarks.search``.

Both write the same documents of 1 kB to the same server, with the same number per request and of requests at
once. Both wait until the documents are written and not only queued. Relay and loop run in separate processes,
in turns, and the arrived documents are counted. Then documents are committed at a steady rate, to measure how
long each takes until a search finds it. At last a table is backfilled, to measure its memory.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import aiohttp
import psycopg
import sqlalchemy as sa
from msgspec import json
from uvloop import new_event_loop

from benchmarks.findings import Facts, Findings, Options
from benchmarks.harness import Sample, Take, interleave, outbox, run, server, settle_down
from benchmarks.process import PATIENCE, SLOWEST, apart, begin
from relaybox import Destination, Outbox, Route
from relaybox.search import Source, abackfill
from tests.servers import meilisearch, opensearch

BAR = 0.6
IN_A_REQUEST = 1000
AT_ONCE = 4
"""Requests of the bare loop: as many as those of the sink."""
NAME = "documents"
BODY = "the quick brown fox jumps over the lazy dog and runs on; " * 16
PER_SECOND = 100
SECONDS = 20
WARM_UP = 5
"""Seconds that are ignored: a Java program is slow at everything it does for the first time."""
LOOK = 0.01
"""Seconds between two searches for new documents."""
REFRESH = "200ms"
"""How often OpenSearch makes new documents visible; the default is once per second."""


def document(number: int) -> dict[str, Any]:
    """Return a document of about 1 kB."""
    return {"id": number, "n": number, "title": f"Document {number}", "body": BODY}


class Engine(Protocol):
    """Fill, empty and query one engine."""

    auth: str | None

    def destination(self) -> str:
        """Return the URL of the sink."""
        ...

    async def clear(self, http: aiohttp.ClientSession) -> None:
        """Create an empty index."""
        ...

    async def write(self, http: aiohttp.ClientSession, documents: Sequence[dict[str, Any]]) -> None:
        """Send one bulk request, and wait until it is written."""
        ...

    async def found(self, http: aiohttp.ClientSession, after: int) -> list[int]:
        """Return the numbers of the documents after this one that a search finds, or of the next ones."""
        ...

    async def count(self, http: aiohttp.ClientSession) -> int:
        """Return the number of documents."""
        ...


@dataclass(frozen=True)
class OpenSearch:
    """A real node."""

    base: str
    auth: str | None = None

    def destination(self) -> str:
        return f"{self.base.replace('http:', 'opensearch:')}/{NAME}"

    async def clear(self, http: aiohttp.ClientSession) -> None:
        await http.delete(f"{self.base}/{NAME}")
        settings = {"number_of_shards": 1, "number_of_replicas": 0, "refresh_interval": REFRESH}
        await _asked(http, "PUT", f"{self.base}/{NAME}", {"settings": settings})

    async def write(self, http: aiohttp.ClientSession, documents: Sequence[dict[str, Any]]) -> None:
        lines = (
            json.encode({"index": {"_index": NAME, "_id": str(one["id"])}}) + b"\n" + json.encode(one) + b"\n"
            for one in documents
        )
        answer = await _asked(http, "POST", f"{self.base}/_bulk", b"".join(lines))
        if answer["errors"]:
            raise RuntimeError(answer)

    async def found(self, http: aiohttp.ClientSession, after: int) -> list[int]:
        query = {"size": 1000, "_source": False, "query": {"range": {"n": {"gt": after}}}}
        answer = await _asked(http, "POST", f"{self.base}/{NAME}/_search", query)
        return [int(hit["_id"]) for hit in answer["hits"]["hits"]]

    async def count(self, http: aiohttp.ClientSession) -> int:
        await _asked(http, "POST", f"{self.base}/{NAME}/_refresh")
        return int((await _asked(http, "GET", f"{self.base}/{NAME}/_count"))["count"])


@dataclass(frozen=True)
class Meilisearch:
    """An imitation in Python: its speed says nothing about the real engine."""

    base: str
    auth: str | None

    def destination(self) -> str:
        return f"{self.base.replace('http:', 'meilisearch:')}/{NAME}"

    async def clear(self, http: aiohttp.ClientSession) -> None:
        await self._done(http, await self._ask(http, "DELETE", f"/indexes/{NAME}"), failing=True)
        await self._done(http, await self._ask(http, "POST", "/indexes", {"uid": NAME, "primaryKey": "id"}))

    async def write(self, http: aiohttp.ClientSession, documents: Sequence[dict[str, Any]]) -> None:
        path = f"/indexes/{NAME}/documents"
        await self._done(http, await self._ask(http, "POST", path, json.encode(documents)))

    async def found(self, http: aiohttp.ClientSession, after: int) -> list[int]:
        path = f"/indexes/{NAME}/documents?offset={after + 1}&limit=1000&fields=id"
        return [one["id"] for one in (await self._ask(http, "GET", path))["results"]]

    async def count(self, http: aiohttp.ClientSession) -> int:
        return int((await self._ask(http, "GET", f"/indexes/{NAME}/stats"))["numberOfDocuments"])

    async def _ask(self, http: aiohttp.ClientSession, method: str, path: str, body: Any = None) -> Any:
        return await _asked(http, method, f"{self.base}{path}", body, Authorization=f"Bearer {self.auth}")

    async def _done(
        self, http: aiohttp.ClientSession, task: dict[str, Any], *, failing: bool = False
    ) -> None:
        while (said := await self._ask(http, "GET", f"/tasks/{task['taskUid']}"))["status"] != "succeeded":
            if said["status"] == "failed" and failing:
                return
            if said["status"] in ("failed", "canceled"):
                raise RuntimeError(said)
            await asyncio.sleep(0.005)


async def _asked(http: aiohttp.ClientSession, method: str, url: str, body: Any = None, **headers: str) -> Any:
    data = body if body is None or isinstance(body, bytes) else json.encode(body)
    kind = "application/x-ndjson" if url.endswith("/_bulk") else "application/json"
    async with http.request(method, url, data=data, headers={"Content-Type": kind, **headers}) as answer:
        answer.raise_for_status()
        return json.decode(await answer.read())


@contextmanager
def _opensearch() -> Iterator[Engine]:
    with opensearch.node() as node:
        yield OpenSearch(f"http://127.0.0.1:{node.port}")


@contextmanager
def _meilisearch() -> Iterator[Engine]:
    with meilisearch.server() as started:
        yield Meilisearch(started.url, started.key)


MAKERS = {"OpenSearch": _opensearch, "Meilisearch (imitated)": _meilisearch}


def made(url: str, engine: Engine) -> Outbox:
    """Return an outbox with the engine as its destination."""
    search = Destination("search", engine.destination(), auth=engine.auth, batch_size=1000)
    return Outbox(url, destinations=[search], routes=[Route("document.*", to="search")])


def emit(url: str, engine: Engine, documents: int) -> None:
    """Emit the events of this many documents, and do what autovacuum would do later."""
    here = made(url, engine)
    with psycopg.connect(url) as connection:
        connection.execute("TRUNCATE outbox_event")
        for begin in range(0, documents, 1000):
            calls = [
                ("Document", number, "document.created", document(number))
                for number in range(begin, min(begin + 1000, documents))
            ]
            keys = ("aggregate_type", "aggregate_id", "event_type", "payload")
            here.emit_many(connection, [dict(zip(keys, call, strict=True)) for call in calls])
    settle_down(url)


async def relayed(url: str, engine: Engine) -> float:
    """Drain with a relay; return the seconds."""
    relay = made(url, engine).relay()
    began = begin()
    await relay.drain()
    return time.monotonic() - began


async def into_nothing(url: str) -> float:
    """Drain the same events to a function that does nothing: no engine can make a relay faster than that."""
    here = Outbox(url)

    async def nothing(_: object) -> None: ...

    here.handler("document.*", name="search", ordered=True, batch_size=1000)(nothing)
    relay = here.relay()
    began = begin()
    await relay.drain()
    return time.monotonic() - began


async def bare(engine: Engine, documents: int) -> float:
    """Send bulk requests without a relay; return the seconds."""
    left = [range(at, min(at + IN_A_REQUEST, documents)) for at in range(0, documents, IN_A_REQUEST)]
    left.reverse()
    async with aiohttp.ClientSession() as http:

        async def work() -> None:
            while left:
                await engine.write(http, [document(number) for number in left.pop()])

        began = begin()
        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        return time.monotonic() - began


def variants(url: str, engine: Engine, documents: int) -> dict[str, Take]:
    """Return the relay and the loop."""
    limit = PATIENCE + documents / SLOWEST

    async def counted(work: Callable[..., Any], *given: Any) -> float:
        async with aiohttp.ClientSession() as http:
            await engine.clear(http)
            seconds = float(await apart(work, *given, seconds=limit))
            if (arrived := await engine.count(http)) != documents:
                raise RuntimeError(f"{arrived} documents arrived of {documents}")
        return documents / seconds

    async def relay() -> float:
        emit(url, engine, documents)
        return await counted(relayed, url, engine)

    async def loop() -> float:
        return await counted(bare, engine, documents)

    async def nothing() -> float:
        emit(url, engine, documents)
        return documents / float(await apart(into_nothing, url, seconds=limit))

    return {"relay": relay, "bare loop": loop, "into nothing": nothing}


async def searchable(url: str, engine: Engine, seconds: int) -> list[float]:
    """Return how long each document took from its commit until a search found it, at a steady rate."""
    run(url, "TRUNCATE outbox_event")
    here = made(url, engine)
    committed: dict[int, float] = {}
    found: dict[int, float] = {}
    async with aiohttp.ClientSession() as http:
        await engine.clear(http)
        async with running(here), await psycopg.AsyncConnection.connect(url) as connection:
            emitting = asyncio.create_task(_emit_steadily(here, connection, committed, seconds))
            while not emitting.done() or len(found) < len(committed):
                emitted = len(committed)
                first = next((n for n in range(emitted) if n not in found), emitted)
                for number in await engine.found(http, first - 1):
                    found.setdefault(number, time.monotonic())
                await asyncio.sleep(LOOK)
            await emitting
    return [found[number] - at for number, at in committed.items()]


@asynccontextmanager
async def running(here: Outbox) -> AsyncIterator[None]:
    """Run a relay while this process does other work."""
    async with here.relay():
        yield


async def _emit_steadily(here: Outbox, connection: Any, committed: dict[int, float], seconds: int) -> None:
    began = time.monotonic()
    for number in range(seconds * PER_SECOND):
        await asyncio.sleep(max(0.0, began + number / PER_SECOND - time.monotonic()))
        async with here.transaction(connection):
            await here.aemit(connection, "Document", number, "document.created", document(number))
        committed[number] = time.monotonic()


async def backfilled(url: str, engine: Engine, documents: int) -> float:
    """Backfill a table; return its peak memory in MiB."""
    run(url, "TRUNCATE outbox_event")
    run(url, "DROP TABLE IF EXISTS documents")
    run(url, "CREATE TABLE documents (id int PRIMARY KEY, title text, body text)")
    rows = {"documents": documents, "body": BODY}
    run(
        url,
        "INSERT INTO documents SELECT n, 'Document ' || n, %(body)s FROM generate_series(1, %(documents)s) n",
        rows,
    )
    return float(await apart(_backfill, url, engine, documents, seconds=PATIENCE + documents / SLOWEST))


async def _backfill(url: str, engine: Engine, documents: int) -> float:
    columns = (sa.column("id", sa.Integer), sa.column("title"), sa.column("body"))
    source = Source(sa.select(sa.table(NAME, *columns)), aggregate_type="Document")
    done = await abackfill(made(url, engine), "search", source, max_pending=10 * documents)
    if done.done != documents:
        raise RuntimeError(f"{done.done} of {documents} were emitted")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


async def measure(server_url: str, options: Options, names: Sequence[str]) -> Facts:
    """Measure each engine: its rate against the bare loop, and the time from commit to search."""
    findings = Findings()
    rates, waits, memory = [], [], []
    for name in names:
        with outbox(server_url) as (url, _), MAKERS[name]() as engine:
            taken = await interleave(variants(url, engine, options.rows), options.rounds, warm_up=0)
            ratio = taken["relay"].over(taken["bare loop"])
            of_store = taken["relay"].over(taken["into nothing"])
            rates.append([name, *(rate.show() for rate in taken.values()), ratio.show(2), of_store.show(2)])
            limit = f"the store: {of_store.show(2)} of a drain into nothing"
            findings.at_least(f"documents into {name}", BAR, "× the bare loop", ratio, limit=limit)
            await searchable(url, engine, WARM_UP)
            took = sorted(await searchable(url, engine, options.size(SECONDS, 3)))
            p50, p99 = took[len(took) // 2], took[len(took) * 99 // 100]
            waits.append([name, f"{1000 * p50:.0f}", f"{1000 * p99:.0f}", f"{1000 * took[-1]:.0f}"])
            findings.at_most(f"commit to searchable in {name}, p99", 1.0, "s", Sample([p99]))
            if not memory:
                sizes = (options.rows // 10, options.rows)
                peaks = [await backfilled(url, engine, size) for size in sizes]
                memory = [[f"{size:,}", f"{peak:.0f}"] for size, peak in zip(sizes, peaks, strict=True)]
                findings.at_most(
                    "memory of a backfill, ten times the documents", 1.2, "×", Sample([peaks[1] / peaks[0]])
                )
    findings.table(
        f"{options.rows:,} documents of 1 kB into an index, documents/s",
        ["", "relay", "bare loop", "into nothing", "× the bare loop", "× into nothing"],
        rates,
    )
    findings.table(
        f"from commit to searchable at {PER_SECOND} documents/s, ms", ["", "p50", "p99", "longest"], waits
    )
    findings.table("a backfill's memory", ["documents", "MiB at most"], memory)
    return findings.facts(rows=options.rows)


def main() -> None:
    """Measure the named engines, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__)
    parser.add_argument("engines", nargs="*", metavar="engine", help=f"{', '.join(MAKERS)}; all by default")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say little")
    given = parser.parse_args()
    if unknown := set(given.engines) - set(MAKERS):
        parser.error(f"no engine is called {', '.join(sorted(unknown))}; there are {', '.join(MAKERS)}")
    options = Options(2_000, 1, quick=True) if given.quick else Options(given.rows, given.rounds)
    with server() as url, asyncio.Runner(loop_factory=new_event_loop) as runner:
        facts = runner.run(measure(url, options, given.engines or list(MAKERS)))
    for bar in facts["bars"]:
        print(f"{bar['bar']}: {bar['measured']} (wanted {bar['wanted']}), limited by {bar['limit']}")


if __name__ == "__main__":
    main()
