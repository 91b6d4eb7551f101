"""``areindex`` where a step goes wrong halfway, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox.errors import StoreError
from relaybox.indexing.desk import open_desk
from relaybox.indexing.failure import ReindexFailed
from relaybox.indexing.leftovers import Leftovers
from relaybox.indexing.reindex import Reindexed, aabort, areindex
from relaybox.outcome import Unavailable
from relaybox.sinks.meilisearch import MeilisearchEngine
from tests.integration.library import SOURCE, Library, key_in_url
from tests.servers import meilisearch
from tests.waiting import await_for


@pytest.fixture(scope="module")
def server() -> Iterator[meilisearch.Server]:
    with meilisearch.imitation() as started:
        yield started


@pytest.fixture
def library(migrated_database: Callable[[str], str], server: meilisearch.Server) -> Library:
    library = Library(migrated_database("sqlite"), key_in_url(server))
    library.fill(range(1, 31))
    library.write(("7", None), ("1001", {"id": 1001}))
    return library


def rebuild(library: Library, **options: Any) -> Reindexed:
    async def main() -> Reindexed:
        async with library.outbox.relay():
            return await areindex(library.outbox, "search", SOURCE, **options)

    return asyncio.run(main())


def operations(library: Library) -> list[str]:
    operation = library.outbox.tables.operation
    found = sa.select(operation.c.state).where(operation.c.action == "reindex")
    return [row.state for row in library.execute(found)]


def hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Algolia does with one that is not marked: it is there, but nobody is to write to it."""
    present = MeilisearchEngine.present

    async def hiding(self: MeilisearchEngine, names: Sequence[str]) -> Mapping[str, str]:
        found = await present(self, names)
        return {name: one for name, one in found.items() if not name.endswith("__building")}

    monkeypatch.setattr(MeilisearchEngine, "present", hiding)


def test_a_reindex_that_serves_did_not_fail(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    async def replace(self: MeilisearchEngine, live: str, fresh: str) -> None:
        await self._swap(live, fresh)
        raise Unavailable("the old one is not dropped")

    monkeypatch.setattr(MeilisearchEngine, "replace", replace)

    assert rebuild(library).documents == 30
    assert library.indexed() == library.rows()
    assert library.present() == {library.index}
    assert operations(library) == ["done"]


def test_a_database_that_is_away_after_the_swap_is_no_failure(
    library: Library, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def sweep(self: Leftovers) -> None:
        raise StoreError("the database is away")

    monkeypatch.setattr(Leftovers, "sweep", sweep)

    assert rebuild(library).documents == 30
    assert library.indexed() == library.rows()
    assert operations(library) == ["done"]
    assert "may be left behind (the database is away)" in caplog.text


def test_it_gives_signs_of_life_while_it_replaces(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = library.outbox.tables.operation
    replace = MeilisearchEngine.replace
    seen: set[Any] = set()

    def has_beaten() -> bool:
        [[at]] = library.execute(sa.select(operation.c.updated_at).where(operation.c.action == "reindex"))
        seen.add(at)
        return len(seen) == 3

    async def slow(self: MeilisearchEngine, live: str, fresh: str) -> None:
        await await_for(has_beaten)
        await replace(self, live, fresh)

    monkeypatch.setattr(MeilisearchEngine, "replace", slow)

    assert rebuild(library).documents == 30


def test_one_whose_creation_is_not_seen_is_dropped(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    create = MeilisearchEngine.create

    async def interrupted(self: MeilisearchEngine, name: str, *, like: str | None = None) -> None:
        await create(self, name, like=like)
        raise Unavailable("the answer was lost")

    with monkeypatch.context() as patch:
        hide(patch)
        patch.setattr(MeilisearchEngine, "create", interrupted)
        with pytest.raises(ReindexFailed, match="the answer was lost"):
            rebuild(library)
    assert library.present() == {library.index}
    assert "7" not in library.indexed()


def test_one_that_is_hidden_is_cleared_away(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    library.ask(lambda engine: engine.create(f"{library.index}__building"))
    with monkeypatch.context() as patch:
        hide(patch)
        assert asyncio.run(aabort(library.outbox, "search")) == 0
    assert library.present() == {library.index}


def test_a_backfill_that_is_cancelled_ends_it(library: Library) -> None:
    async def main() -> None:
        rebuilding = asyncio.ensure_future(areindex(library.outbox, "search", SOURCE, rate=1, batch=1))
        async with open_desk(library.outbox, "operator") as desk:

            async def begun() -> list[Any]:
                known = await desk.admin.journal.operations(10)
                return [one for one in known if one.action == "backfill" and one.done]

            [backfill] = await await_for(begun)
            await desk.admin.cancel(backfill.id)
        with pytest.raises(ReindexFailed, match="its backfill was cancelled"):
            await rebuilding

    asyncio.run(main())
    assert library.present() == {library.index}
    assert not {"pending", "failed"} & set(library.statuses())
