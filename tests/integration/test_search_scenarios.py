"""Outages of a search engine after which its index has what the database has, without anybody's help."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relaybox import Destination
from relaybox.search.engine import open_engine
from tests.conftest import available
from tests.integration.archive import Archive
from tests.integration.search_engines import ENGINES, Subject, engine
from tests.waiting import wait_for

pytestmark = pytest.mark.full

IMPORT = range(500)


@pytest.fixture(scope="module", params=ENGINES)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with available(request.param, engine(request.param)) as subject:
        yield subject


@pytest.fixture
def archive(
    request: pytest.FixtureRequest, subject: Subject, migrated_database: Callable[[str], str], tmp_path: Path
) -> Iterator[Archive]:
    index = request.node.originalname.removeprefix("test_")
    archive = Archive(migrated_database("postgresql-18"), tmp_path, subject.sink(index), subject.auth)
    yield archive
    subject.network.set()
    subject.heal()
    # A quota is one for all indexes.
    asyncio.run(dropped(archive.outbox.settings.destinations[0], index))
    archive.engine.dispose()


async def dropped(destination: Destination, index: str) -> None:
    engine = open_engine(destination)
    await engine.drop(index)
    await engine.close()


def test_a_rate_limit_in_the_middle_of_an_import(subject: Subject, archive: Archive) -> None:
    if "throttled" not in subject.harms:
        pytest.skip("this engine has no rate limit of its own")
    with archive.relays():
        archive.save(IMPORT[:100], "early")
        until_sent(archive)
        subject.harms["throttled"]()
        archive.save(IMPORT[100:], "late")
        until_sent(archive)

    assert_same(archive, 500)
    assert archive.attempted("429")


def test_a_partition_during_an_update(subject: Subject, archive: Archive) -> None:
    with archive.relays():
        archive.save(IMPORT[:50], "first")
        until_sent(archive)
        subject.network.set(hole=True)
        archive.save(IMPORT[:50], "second")
        wait_for(lambda: archive.attempted(""), archive.troubles)
        archive.save([7], "third")
        subject.network.set(refuse=True)
        subject.network.reset()
        archive.save([8], "fourth")
        subject.network.set()
        until_sent(archive)

    assert_same(archive, 50)


def test_an_import_of_500_that_is_over_the_quota_at_247(subject: Subject, archive: Archive) -> None:
    if "full at 247" not in subject.harms:
        pytest.skip("this engine has no quota of documents")
    subject.harms["full at 247"]()
    with archive.relays():
        for begin in range(0, 500, 50):
            archive.save(IMPORT[begin : begin + 50], "imported")
        wait_for(lambda: archive.attempted(subject.full), archive.troubles)
        assert archive.left() >= 500 - 247
        subject.heal()
        until_sent(archive)

    assert_same(archive, 500)


def assert_same(archive: Archive, count: int) -> None:
    assert archive.failed() == []
    compared = archive.compare()
    assert (compared.documents, compared.matched, compared.consistency) == (count, count, 100.0), compared


def until_sent(archive: Archive) -> None:
    wait_for(lambda: archive.left() == 0, archive.troubles)
