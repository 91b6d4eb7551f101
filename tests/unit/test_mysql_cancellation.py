"""A cancellation that comes together with the database's answer is not forgotten."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from asyncmy.errors import OperationalError

from relaybox.stores.mysql import Asyncmy


class Answering(Asyncmy):
    """A driver whose answer comes when it is told to, and which waits for it as asyncmy does."""

    def __init__(self) -> None:
        super().__init__("mysql://127.0.0.1/none", 1, True)
        self.answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def _transaction(self, *_: Any) -> Any:
        return await asyncio.wait_for(self.answer, 60)


async def test_an_answer_does_not_hide_a_cancellation() -> None:
    driver = Answering()
    task = asyncio.create_task(driver.run(lambda: iter(())))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    driver.answer.set_result("answered")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_does_not_hide_a_cancellation() -> None:
    driver = Answering()
    task = asyncio.create_task(driver.run(lambda: iter(())))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    driver.answer.set_exception(OperationalError(2013, "Lost connection"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_answer_without_a_cancellation_is_the_result() -> None:
    driver = Answering()
    driver.answer.set_result("answered")
    assert await driver.run(lambda: iter(())) == "answered"  # type: ignore[arg-type]
