"""What asyncmy's driver makes of cancellations and of errors that come together with others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from asyncmy.errors import OperationalError

from relaybox.database.pools.mysql import CHECK_FAILED, DEADLOCK, TRIES, Asyncmy
from relaybox.database.steps import Steps
from relaybox.errors import StoreError
from tests.waiting import cancel


class Answering(Asyncmy):
    """A driver whose answer comes when a test says so, and which waits for it as asyncmy does."""

    def __init__(self) -> None:
        super().__init__("mysql://127.0.0.1/none", 1, True)
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def _transaction(self, *_: Any) -> Any:
        return await asyncio.wait_for(self.answer, 60)


@pytest.mark.parametrize("error", [None, OperationalError(2013, "Lost connection")])
async def test_neither_an_answer_nor_an_error_hides_a_cancellation(error: Exception | None) -> None:
    driver = Answering()
    task = asyncio.create_task(driver.run(lambda: iter(())))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    if error is None:
        driver.answer.set_result("answered")
    else:
        driver.answer.set_exception(error)
    await cancel(task)


async def test_an_answer_without_a_cancellation_is_the_result() -> None:
    driver = Answering()
    driver.answer.set_result("answered")
    assert await driver.run(lambda: iter(())) == "answered"  # type: ignore[arg-type]


async def test_a_task_that_tidies_up_after_its_cancellation_gets_its_answers() -> None:
    driver = Answering()
    driver.answer.set_result("answered")

    async def tidy_up() -> str:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return await driver.run(lambda: iter(()))  # type: ignore[arg-type]
        return "not cancelled"

    task = asyncio.create_task(tidy_up())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == "answered"


class Failing(Asyncmy):
    """A driver whose transactions fail in turn with these errors."""

    def __init__(self, *codes: int) -> None:
        super().__init__("mysql://127.0.0.1/none", 1, True)
        self.codes = list(codes)

    async def _transaction(self, *_: Any) -> Any:
        if not self.codes:
            return "answered"
        raise OperationalError(self.codes.pop(0), "x")


async def test_a_broken_check_is_tried_once_more_without_checks() -> None:
    driver = Failing(*[DEADLOCK] * (TRIES - 1), CHECK_FAILED)
    assert await driver.run(lambda: iter(())) == "answered"  # type: ignore[arg-type]
    driver = Failing(CHECK_FAILED, CHECK_FAILED)
    with pytest.raises(StoreError, match=str(CHECK_FAILED)):
        await driver.run(lambda: iter(()))  # type: ignore[arg-type]


class Connection:
    """A connection whose COMMITs fail one after the other, with these errors."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.ended: list[str] = []

    async def begin(self) -> None:
        pass

    async def commit(self) -> None:
        if self._errors:
            raise self._errors.pop(0)
        self.ended.append("commit")

    async def rollback(self) -> None:
        self.ended.append("rollback")

    def close(self) -> None:
        self.ended.append("close")


class Committing(Asyncmy):
    def __init__(self, connection: Connection) -> None:
        super().__init__("mysql://127.0.0.1/none", 1, True)
        self._connection = connection

    async def _open(self) -> Any:
        return self

    @asynccontextmanager
    async def acquire(self) -> AsyncIterator[Connection]:
        yield self._connection


def work() -> Steps[str]:
    yield from ()
    return "done"


async def test_a_connection_whose_commit_was_not_answered_is_closed() -> None:
    connection = Connection(OperationalError(2013, "Lost connection"))
    with pytest.raises(StoreError, match="Lost connection"):
        await Committing(connection).run(work)
    assert connection.ended == ["close"]


async def test_a_commit_that_met_a_deadlock_is_rolled_back_and_tried_again() -> None:
    connection = Connection(OperationalError(DEADLOCK, "Deadlock found"))
    assert await Committing(connection).run(work) == "done"
    assert connection.ended == ["rollback", "commit"]
