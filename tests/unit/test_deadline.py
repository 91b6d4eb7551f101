"""One timer for many blocks: each ends in its time, and no other cancellation is swallowed."""

from __future__ import annotations

import asyncio
import time

import pytest

from relaybox.sinks.deadline import Block, Deadline
from tests.waiting import PATIENCE


async def test_a_block_that_takes_too_long_ends_with_a_timeout_and_others_do_not() -> None:
    deadline = Deadline(0.2)
    ended: list[str] = []

    async def work(name: str, turns: int | None = None) -> None:
        try:
            with deadline() as block:
                for _ in range(turns or 0):
                    await asyncio.sleep(0)
                if turns is None:
                    await asyncio.Event().wait()
        except TimeoutError:
            ended.append(f"{name} timed out")
            assert block.expired
        else:
            ended.append(name)
            assert not block.expired

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(work("quick", 0), work("first"), work("short", 3), work("second"))
        await work("later")
    assert ended == ["quick", "short", "first timed out", "second timed out", "later timed out"]


@pytest.mark.parametrize("times_out", [False, True])
async def test_a_task_that_is_cancelled_stays_so_even_in_the_moment_of_its_timeout(times_out: bool) -> None:
    deadline = Deadline(60)
    blocks: asyncio.Queue[Block] = asyncio.Queue()

    async def work() -> None:
        with deadline() as block:
            blocks.put_nowait(block)
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    block = await blocks.get()
    task.cancel()
    if times_out:
        block.expire(asyncio.get_running_loop(), 0)
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_answer_that_arrives_in_the_turn_of_the_timeout_is_taken() -> None:
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[str] = loop.create_future()
    deadline = Deadline(0.02)

    async def work() -> str:
        with deadline():
            return await answer

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    # The loop is busy until both are due.
    loop.call_later(0.01, answer.set_result, "it")
    loop.call_soon(time.sleep, 0.05)
    assert await task == "it"


def test_it_serves_one_loop_after_the_other() -> None:
    deadline = Deadline(0.01)

    async def late() -> None:
        with deadline():
            await asyncio.sleep(60)

    async def abandoned() -> None:
        task = asyncio.create_task(late())
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(abandoned())
    for _ in range(2):
        with pytest.raises(TimeoutError):
            asyncio.run(late())
