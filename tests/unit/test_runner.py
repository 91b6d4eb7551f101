"""The runner of operations: its heartbeats, what interrupts its work, and the record of its end."""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import UUID

import pytest

from relaybox.errors import RelayboxError, StoreError
from relaybox.operate import runner as module
from relaybox.operate.runner import Cancelled, Runner
from relaybox.stores.journal import OperationState
from tests.waiting import await_for, cancel


class Record:
    """In memory; ``trouble`` is raised by whatever is written next."""

    def __init__(self) -> None:
        self.beats = 0
        self.cancelled = self.hangs = False
        self.trouble: list[Exception] = []
        self.ended: list[tuple[OperationState, str | None]] = []

    async def advance(self, id_: UUID, done: int, skipped: int) -> bool:
        self.beats += 1
        self._fail()
        return not self.cancelled

    async def finish(
        self, id_: UUID, state: OperationState, done: int, skipped: int, error: str | None = None
    ) -> None:
        self._fail()
        await asyncio.sleep(3600 if self.hangs else 0)
        self.ended.append((state, error))

    def _fail(self) -> None:
        if self.trouble:
            raise self.trouble.pop()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    monkeypatch.setattr(module, "BEAT", 0.001)
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    return Record()


def run(record: Record, **options: Any) -> Runner:
    return Runner(UUID(int=1), record, "interrupted", **options)


async def under_way(runner: Runner) -> None:
    async with runner:
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "text"),
    [(StoreError("the table is gone"), "the table is gone"), (KeyError("a"), "KeyError: 'a'")],
)
async def test_an_error_of_the_work_is_on_record_and_goes_on(
    record: Record, error: Exception, text: str
) -> None:
    with pytest.raises(type(error)):
        async with run(record):
            raise error
    assert record.ended == [("failed", text)]


async def test_no_beat_comes_after_the_end(record: Record) -> None:
    async with run(record) as runner:
        await await_for(lambda: record.beats > 2)
        runner.end_as("cancelled", "half-way")
    beats = record.beats
    await asyncio.sleep(0.01)
    assert (record.beats, record.ended) == (beats, [("cancelled", "half-way")])


async def test_what_a_beat_raises_interrupts_nothing(record: Record) -> None:
    record.trouble = [RuntimeError("broken"), StoreError("away")]
    async with run(record) as runner:
        assert await runner.guard(await_for(lambda: record.beats > 3)) is True
    assert record.ended == [("done", None)]


async def test_a_reason_to_end_is_kept_and_interrupts_what_is_guarded(record: Record) -> None:
    async with run(record) as runner:
        runner.check()
        record.cancelled = True
        with pytest.raises(Cancelled):
            await runner.guard(asyncio.Event().wait())
        runner.stop(RelayboxError("another"))
        with pytest.raises(Cancelled):
            runner.check()


async def test_a_database_that_does_not_answer_ends_it_where_that_is_asked_for(record: Record) -> None:
    async with run(record, failure=KeyError, silence=0.01) as runner:
        record.trouble = [StoreError("away")] * 10_000
        with pytest.raises(KeyError, match="the database does not answer: away"):
            await runner.guard(asyncio.Event().wait())
        record.trouble = []
    assert record.ended == [("done", None)]


async def test_a_guard_that_raises_interrupts_the_work(record: Record) -> None:
    async def guard() -> None:
        raise KeyError("a")

    async with run(record) as runner:
        with pytest.raises(KeyError):
            await runner.guard(asyncio.Event().wait(), guard())
    assert record.ended == [("done", None)]


async def test_a_database_that_stays_away_does_not_hold_up_the_end(record: Record) -> None:
    async with run(record):
        record.trouble = [StoreError("away")] * 10_000
    assert record.ended == []


@pytest.mark.parametrize("times", [1, 2])
async def test_a_record_that_hangs_does_not_hold_up_one_who_cancels_again(record: Record, times: int) -> None:
    record.hangs = True
    working = asyncio.create_task(under_way(run(record)))
    await await_for(lambda: record.beats)
    for _ in range(times):
        working.cancel()
        await asyncio.sleep(0.01)
    await cancel(working)
    assert record.ended == []
