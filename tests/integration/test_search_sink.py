"""Documents of real search engines that follow a database: through a relay, and through the sink alone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any
from uuid import uuid4

import msgspec
import pytest
import sqlalchemy as sa

from relaybox import Call, Destination, Event, Route
from relaybox.core.outcome import Delivered, Reject, Unavailable, Unreachable
from relaybox.search.engine import Change, Engine, open_engine
from relaybox.search.indexes import LOOK
from tests.conftest import available
from tests.integration.shop import Shop
from tests.integration.sinking import sink_to
from tests.servers import meilisearch
from tests.unit.searching import event
from tests.waiting import await_for

QUICK: dict[str, Any] = {"poll_interval": 0.05, "timeout": "10s", "backoff": {"base": 0.1, "cap": 0.5}}
KEYS = [str(at) for at in range(20)]
BAD: dict[str, tuple[Callable[[int], str], dict[str, Any], str]] = {
    "meilisearch": (lambda n: f"no id: {n}", {"title": "x"}, "no id"),
    "algolia": (str, {"title": "x" * 200_000}, "too big"),
    "opensearch": (str, {"title": "x", "pages": "many"}, "pages"),
}
"""By engine: what it calls a document, or has it hold, that it never takes; and what it says to it."""


class Place:
    """An index of its own on one engine."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind, self.index = kind, f"documents-{uuid4().hex[:12]}"
        base, mark, query = url.partition("?")
        self.base = base.rstrip("/")
        self.query = f"{mark}{query}"
        self.url = f"{self.base}/{self.index}{self.query}"

    def another(self) -> Place:
        """Name another index on the same engine, which does not exist."""
        return Place(self.kind, f"{self.base}{self.query}")

    async def ask(self, question: Callable[[Engine], Awaitable[Any]]) -> Any:
        engine = open_engine(Destination("search", self.url))
        try:
            return await question(engine)
        finally:
            await engine.close()

    async def create(self) -> None:
        await self.ask(lambda engine: engine.create(self.index))

    async def drop(self) -> None:
        await self.ask(lambda engine: engine.drop(self.index))

    async def count(self) -> int:
        return await self._read(lambda engine: engine.count(self.index))

    async def titles(self, *ids: str) -> dict[str, str]:
        found = await self._read(lambda engine: engine.get(self.index, ids))
        return {id_: document["title"] for id_, document in found.items()}

    async def _read(self, question: Callable[[Engine], Awaitable[Any]]) -> Any:
        await self.ask(lambda engine: engine.refresh(self.index))
        return await self.ask(question)


@pytest.fixture(params=["meilisearch", "algolia", "opensearch"])
async def place(request: pytest.FixtureRequest) -> AsyncIterator[Place]:
    place = Place(request.param, request.getfixturevalue(f"{request.param}_url"))
    await place.create()
    yield place
    await place.drop()


@pytest.fixture
def stoppable() -> Iterator[meilisearch.Server]:
    """Run a server that a test may stop and that counts its requests."""
    with available("Meilisearch", meilisearch.imitation()) as started:
        yield started


class Library(Shop):
    """Writes documents, and says so to the search index."""

    def __init__(self, database: str, url: str, **settings: Any) -> None:
        destination = Destination("search", url, **{**QUICK, **settings})
        super().__init__(database, destinations=[destination], routes=[Route("document.*", to="search")])

    def write(self, *documents: tuple[str, dict[str, Any] | None]) -> None:
        calls = [
            Call("Document", id_, "document.deleted" if body is None else "document.updated", body or {})
            for id_, body in documents
        ]
        with self.engine.begin() as connection:
            self.outbox.emit_many(connection, calls)

    async def why(self, status: str) -> list[str]:
        row = self.outbox.tables.event.c
        with self.engine.connect() as connection:
            ids = connection.scalars(sa.select(row.event_id).where(row.status == status)).all()
        async with self.outbox.admin() as admin:
            return [reason.text for id_ in ids for reason in await admin.why(id_)]


LibraryOn = Callable[..., Library]


@pytest.fixture
def library_on(migrated_database: Callable[[str], str]) -> LibraryOn:
    return lambda url, **settings: Library(migrated_database("postgresql-18"), url, **settings)


async def test_of_500_documents_three_are_refused(place: Place, library_on: LibraryOn) -> None:
    library = library_on(place.url)
    called, bad, said = BAD[place.kind]
    documents: list[Any] = [(str(n), {"title": f"t{n}", "pages": n}) for n in range(500)]
    library.write(documents[0])
    async with library.outbox.relay():
        await await_for(lambda: library.states() == {"delivered": 1}, "the index knows its fields")
        for n in (123, 250, 499):
            documents[n] = called(n), bad
        library.write(*documents[1:])
        done = {"delivered": 497, "failed": 3}
        await await_for(lambda: library.states() == done, "497 are delivered and three failed")
    assert await place.count() == 497
    reasons = [error for status, _, error in library.rows() if status == "failed"]
    assert all(said in (reason or "") for reason in reasons), reasons
    assert all(said in text for text in await library.why("failed"))


async def test_the_index_ends_as_the_database(place: Place, library_on: LibraryOn) -> None:
    library = library_on(place.url, batch_size=7)
    library.write(*[(str(n % 5), None if n % 4 == 3 else {"title": f"t{n}"}) for n in range(38)])
    async with library.outbox.relay():
        await await_for(lambda: library.states() == {"delivered": 38}, "all are delivered")
    # Of 0 to 4 the last writes are 35, 36, 37, 33 and 34; each fourth, such as 35, deletes.
    assert await place.titles(*"01234") == {"1": "t36", "2": "t37", "3": "t33", "4": "t34"}


async def test_an_index_that_is_deleted_meanwhile_loses_nothing(place: Place, library_on: LibraryOn) -> None:
    library = library_on(place.url)
    missing = f"the index '{place.index}' does not exist"

    def is_reported() -> bool:
        return any(missing in (error or "") for _, _, error in library.rows())

    async with library.outbox.relay():
        # Within a second of its last look, an engine that makes an index for its first document may make it.
        for n in range(1, 100):
            library.write((str(n), {"title": f"t{n}"}))
            now = {"delivered": n}
            await await_for(
                lambda now=now: library.states() == now or is_reported(), "it has arrived or failed"
            )  # type: ignore[misc]
            if is_reported():
                break
            await place.drop()
        assert library.states() == {"delivered": n - 1, "pending": 1}
        await place.create()
        await await_for(lambda: library.states() == {"delivered": n}, "it is delivered")
    assert await place.titles(*map(str, range(n + 1))) == {str(n): f"t{n}"}


async def test_a_wrong_key_is_reported_without_showing_it(place: Place) -> None:
    if place.kind == "opensearch":
        pytest.skip("the server of the tests knows no users")
    wrong = place.url.replace(place.base.partition("://:")[2].partition("@")[0], "wr0ng-key")
    async with sink_to(wrong) as sink:
        [answer] = await sink.send([event("1", "x")])
        assert isinstance(answer, Unavailable)
        assert "auth" in answer.reason
        assert "wr0ng" not in answer.reason
        with pytest.raises(Unavailable, match="auth"):
            await sink.check()


async def test_a_missing_index_is_reported_and_not_created(place: Place) -> None:
    async with sink_to(place.url) as sink:
        await sink.check()
    absent = place.another()
    async with sink_to(absent.url) as sink:
        with pytest.raises(Unavailable, match=f"the index '{absent.index}' does not exist on .*create_index"):
            await sink.check()
        for one in (event("1", "x"), event("1")):
            [answer] = await sink.send([one])
            assert isinstance(answer, Unavailable)
            assert "set create_index = true" in answer.reason
    assert await absent.ask(lambda engine: engine.present([absent.index])) == {}


async def test_an_index_is_created_where_that_is_wanted(place: Place) -> None:
    fresh = place.another()
    async with sink_to(fresh.url, options={"create_index": True}) as sink:
        assert await sink.send([event("1", "x")]) == [Delivered()]
    assert await fresh.titles("1") == {"1": "x"}
    await fresh.drop()


async def test_a_batch_leaves_the_newest_of_each_document(place: Place) -> None:
    changed = [event(key, f"{turn}-{key}") for turn in range(5) for key in KEYS]
    async with sink_to(place.url) as sink:
        answers = await sink.send([*changed, *(event(key) for key in KEYS[:3])])
    assert answers == [Delivered()] * 103
    assert await place.titles(*KEYS) == {key: f"4-{key}" for key in KEYS[3:]}


@pytest.mark.parametrize("place", ["opensearch"], indirect=True)
@pytest.mark.parametrize("whole", [True, False], ids=["replaced", "given up"])
async def test_nothing_is_lost_while_the_index_is_rebuilt_under_it(place: Place, whole: bool) -> None:
    engine = open_engine(Destination("search", place.url))
    building, old = f"{place.index}__building", [event(key, "old") for key in KEYS]
    written: dict[str, str] = {}
    enough = asyncio.Event()

    async def write(sink: Any) -> None:
        for at in itertools.count():
            newest = event(KEYS[at % len(KEYS)], f"{at}")
            # The relay tries again what was refused.
            while (answers := await sink.send([newest])) != [Delivered()]:
                assert isinstance(answers[0], Unavailable), answers
            written[newest.aggregate_id] = f"{at}"
            if enough.is_set():
                return

    async with sink_to(place.url) as sink, asyncio.TaskGroup() as tasks:
        await sink.send(old)
        tasks.create_task(write(sink))
        await engine.create(building, like=place.index)
        await asyncio.sleep(2 * LOOK)
        # What the database had at some moment before: always older than what comes by the events.
        documents = [Change(one.aggregate_id, {"title": "old"}, one.position) for one in old]
        await engine.write(building, documents)
        await (engine.replace(place.index, building) if whole else engine.drop(building))
        await await_for(lambda: len(written) == len(KEYS))
        enough.set()
    assert await place.titles(*KEYS) == written
    assert list(await engine.present([place.index, building])) == [place.index]
    await engine.close()


async def test_event_types_with_and_without_a_version_and_of_ones_own(place: Place) -> None:
    actions = {"*.archived": "delete", "*.viewed": "ignore", "*.published": "index"}
    batch = [
        event("1", "a", type_="document.created.v2"),
        event("2", "b", type_="document.published"),
        event("3", "c"),
        event("3", type_="document.archived.v7"),
        event("1", "not this", type_="document.viewed"),
        event("4", "d", type_="document.moved"),
    ]
    async with sink_to(place.url, options={"actions": actions}) as sink:
        *others, moved = await sink.send(batch)
    assert others == [Delivered()] * 5
    assert isinstance(moved, Reject)
    assert "'document.moved'" in moved.reason
    assert await place.titles("1", "2", "3", "4") == {"1": "a", "2": "b"}


async def test_a_function_makes_the_documents_and_what_is_read_again_is_the_newest(place: Place) -> None:
    newest: dict[str, str] = {"1": "first", "2": "first"}

    def document(event: Event) -> dict[str, Any] | None:
        title = newest.get(event.aggregate_id)
        return None if title is None else {"title": title}

    async with sink_to(place.url, options={"document": document, "reread": True}) as sink:
        batch = [event("1", "of the event"), event("2", "of the event")]
        assert await sink.send(batch) == [Delivered()] * 2
        assert await place.titles("1", "2") == {"1": "first", "2": "first"}
        newest["2"] = "created again"
        del newest["1"]
        batch = [event("1", "an update that came too late"), event("2")]
        assert await sink.send(batch) == [Delivered()] * 2
    assert await place.titles("1", "2") == {"2": "created again"}


@pytest.mark.parametrize("place", ["opensearch"], indirect=True)
async def test_a_stale_update_never_overwrites_a_newer_one(place: Place) -> None:
    old, new, gone = event("1", "old"), event("1", "new"), event("2")
    late = msgspec.structs.replace(event("2", "late"), position=old.position)
    async with sink_to(place.url) as sink:
        for one in (new, old, gone, late):
            assert await sink.send([one]) == [Delivered()]
    assert await place.titles("1", "2") == {"1": "new"}


async def test_many_changes_are_few_requests(stoppable: meilisearch.Server, library_on: LibraryOn) -> None:
    url = meilisearch.destination_url(stoppable, "documents?create_index=true")
    library = library_on(url, auth=stoppable.key, batch_size=500)
    library.write(*[(str(n % 3), {"title": f"t{n}"}) for n in range(300)])
    await library.outbox.adrain()
    assert library.states() == {"delivered": 300}
    writes = {name: count for name, count in stoppable.asked().items() if "/documents" in name}
    assert sum(writes.values()) < 10, writes


async def test_an_outage_loses_nothing(stoppable: meilisearch.Server, library_on: LibraryOn) -> None:
    url = meilisearch.destination_url(stoppable, "documents?create_index=true")
    library = library_on(url, auth=stoppable.key)
    library.write(("1", {"title": "before"}))
    async with library.outbox.relay():
        await await_for(lambda: library.states() == {"delivered": 1}, "one is delivered")
        await asyncio.to_thread(stoppable.stop)
        library.write(("1", {"title": "during"}))
        await await_for(lambda: library.circuit("search") == "open", "the circuit is open")

        async def is_reported() -> bool:
            return any("cannot connect to 127.0.0.1" in why for why in await library.why("pending"))

        await await_for(is_reported, "the error is reported")
        await asyncio.to_thread(stoppable.start)
        await await_for(lambda: library.states() == {"delivered": 2}, "it is delivered")
    assert stoppable.ask("GET", "/indexes/documents/documents/1")["title"] == "during"


async def test_nobody_at_the_address_is_unreachable() -> None:
    for url in ("meilisearch://127.0.0.1:1/x", "opensearch://127.0.0.1:1,127.0.0.1:2/x"):
        async with sink_to(url) as sink:
            [answer] = await sink.send([event("1", "x")])
        assert isinstance(answer, Unreachable)
        assert "cannot connect to 127.0.0.1:" in answer.reason
