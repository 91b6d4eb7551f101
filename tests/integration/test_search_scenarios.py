"""What hurts most when an index is to follow a database; nobody does anything about it, and all is well."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relaybox import Destination
from relaybox.parts import open_engine
from tests.conftest import available
from tests.integration.archive import Archive
from tests.integration.search_engines import ENGINES, Subject, engine

PATIENCE = 60.0
IMPORT = range(500)


@pytest.fixture(scope="module", params=ENGINES)
def subject(request: pytest.FixtureRequest) -> Iterator[Subject]:
    with available(request.param, engine(request.param)) as subject:
        yield subject


@pytest.fixture
def archive(
    request: pytest.FixtureRequest, subject: Subject, fresh_database: Callable[[str], str], tmp_path: Path
) -> Iterator[Archive]:
    index = request.node.originalname.removeprefix("test_")
    archive = Archive(fresh_database("postgresql-18"), tmp_path, subject.sink(index), subject.auth)
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
        until(lambda: archive.left() == 0, archive)
        subject.harms["throttled"]()
        archive.save(IMPORT[100:], "late")
        until(lambda: archive.left() == 0, archive)

    assert_same(archive, 500)
    assert archive.attempted("429")


def test_a_partition_during_an_update(subject: Subject, archive: Archive) -> None:
    with archive.relays():
        archive.save(IMPORT[:50], "first")
        until(lambda: archive.left() == 0, archive)
        subject.network.set(hole=True)
        archive.save(IMPORT[:50], "second")
        until(lambda: bool(archive.attempted("")), archive)
        archive.save([7], "third")
        subject.network.set(refuse=True)
        subject.network.reset()
        archive.save([8], "fourth")
        subject.network.set()
        until(lambda: archive.left() == 0, archive)

    assert_same(archive, 50)


def test_an_import_of_500_that_is_over_the_quota_at_247(subject: Subject, archive: Archive) -> None:
    if "full at 247" not in subject.harms:
        pytest.skip("this engine has no quota of documents")
    subject.harms["full at 247"]()
    with archive.relays():
        for begin in range(0, 500, 50):
            archive.save(IMPORT[begin : begin + 50], "imported")
        until(lambda: bool(archive.attempted(subject.full)), archive)
        assert archive.left() >= 500 - 247
        subject.heal()
        until(lambda: archive.left() == 0, archive)

    assert_same(archive, 500)


def assert_same(archive: Archive, count: int) -> None:
    assert archive.failed() == []
    compared = archive.compare()
    assert (compared.documents, compared.matched, compared.consistency) == (count, count, 100.0), compared


def until(reached: Callable[[], bool], archive: Archive) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        assert time.monotonic() < deadline, archive.troubles()
        time.sleep(0.05)
