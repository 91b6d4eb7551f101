"""A handler that does not return is given up: its message comes again, and a stop does not wait for it."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from relaybox import Event
from relaybox.consumer import Crashed, Done, Later
from relaybox.consumers import loop
from relaybox.errors import ConfigError
from tests.integration.consuming import until
from tests.unit.test_consumers import (
    FakeDelivery,
    FakeMessage,
    aopened,
    event,
    kafka_consumer,
    rabbitmq_consumer,
)


async def test_a_thread_that_hangs_is_left_and_its_event_waits_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    consumer, called, go_on = kafka_consumer(timeout="50ms"), [], threading.Event()

    @consumer.on("order.*")
    def hang(event: Event) -> None:
        called.append(event.attempt)
        go_on.wait(60)

    attending = asyncio.create_task(consumer._attend(FakeMessage(), asyncio.Event()))
    await until(lambda: caplog.text.count("has not returned yet") > 2, 10)
    assert "took longer than 0.05s" in caplog.text
    assert called == [1]
    go_on.set()
    assert await asyncio.wait_for(attending, 10) is True
    assert len(called) == 2


async def test_threads_that_hang_take_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "AT_ONCE", 1)
    consumer, go_on = kafka_consumer(timeout="50ms"), threading.Event()
    monkeypatch.setattr(loop, "AT_ONCE", 3)

    @consumer.on("order.*")
    def hang(event: Event) -> None:
        go_on.wait(60)

    try:
        verdicts = await asyncio.gather(*(consumer.ahandle(event()) for _ in range(3)))
    finally:
        go_on.set()
    assert verdicts == [Later("the handler took longer than 0.05s")] * 3


async def test_no_more_than_so_many_threads_hang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loop, "AT_ONCE", 2)
    consumer, go_on, called = kafka_consumer(timeout="50ms"), threading.Event(), []

    @consumer.on("order.*")
    def hang(event: Event) -> None:
        called.append(event.id)
        go_on.wait(60)

    try:
        for _ in range(3):
            verdicts = await asyncio.gather(*(consumer.ahandle(event()) for _ in range(10)))
    finally:
        go_on.set()
    # Those that were under way when the others came to hang are among them.
    hanging = len(called)
    assert 2 <= hanging < 4
    refused = f"{hanging} handlers hang, and no other is called before one of them is over"
    assert verdicts == [Later(refused)] * 10
    assert caplog.text.count("handlers hang; none is called") == 1
    await until(lambda: not consumer._hanging(), 10)
    assert await consumer.ahandle(event()) == Done()


async def test_an_async_handler_that_hangs_is_cancelled_and_called_again() -> None:
    consumer, attempts = kafka_consumer(transaction=aopened, timeout="50ms"), []

    @consumer.on("order.*")
    async def hang(event: Event) -> None:
        attempts.append(event.attempt)
        if event.attempt == 1:
            await asyncio.Event().wait()

    assert await asyncio.wait_for(consumer._attend(FakeMessage(), asyncio.Event()), 10) is True
    assert attempts == [1, 2]


async def test_a_time_limit_of_the_handlers_own_is_its_failure() -> None:
    consumer = kafka_consumer(transaction=aopened)

    @consumer.on("order.*")
    async def give_up(event: Event) -> None:
        async with asyncio.timeout(0.01):
            await asyncio.Event().wait()

    assert await consumer.ahandle(event()) == Crashed("TimeoutError")


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
async def test_a_dead_letter_function_that_hangs_is_called_again(asynchronous: bool) -> None:
    calls, go_on = [], threading.Event()

    def bury(message: Any, reason: str) -> None:
        calls.append(reason)
        if len(calls) == 1:
            go_on.wait(60)

    async def abury(message: Any, reason: str) -> None:
        calls.append(reason)
        if len(calls) == 1:
            await asyncio.Event().wait()

    consumer = kafka_consumer(dead_letter=abury if asynchronous else bury, timeout="50ms")
    message = FakeMessage()
    message.headers = list  # type: ignore[method-assign]
    try:
        assert await asyncio.wait_for(consumer._attend(message, asyncio.Event()), 10) is True
    finally:
        go_on.set()
    assert len(calls) == 2


def test_a_stop_does_not_wait_for_a_thread_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PATIENCE", 0.1)
    consumer, delivery = rabbitmq_consumer(timeout="1h"), FakeDelivery()
    begun, go_on = threading.Event(), threading.Event()

    @consumer.on("order.*")
    def hang(event: Event) -> None:
        begun.set()
        go_on.wait(60)

    async def consume() -> None:
        work = loop.Work()
        work.start(consumer._attend(delivery, work.ending))  # type: ignore[arg-type]
        await until(begun.is_set, 10)
        consumer.stop()
        await work.end()

    monkeypatch.setattr(consumer, "_consume", consume)
    began = time.monotonic()
    try:
        # Its end waits for the threads of asyncio.
        asyncio.run(consumer.run())
        assert time.monotonic() - began < 10
    finally:
        go_on.set()
    assert delivery.answers == []


def test_a_timeout_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="timeout"):
        kafka_consumer(timeout="0s")
