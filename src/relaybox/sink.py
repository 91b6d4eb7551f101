"""The contract of a sink: hand deliveries to a destination and say of each what became of it.

A sink knows nothing of leases, retries or circuits. It answers every delivery with one of

- ``Delivered()``: the destination acknowledged it,
- ``Retry``, ``Reject`` or ``Unavailable``: an exception, returned or raised as a value,
- ``Released()``: it was not tried, because an earlier one of its key did not arrive.

``send`` itself does not raise: whatever goes wrong with one delivery is that delivery's answer. Only a
caller that cancels it gets its ``CancelledError``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from relaybox.errors import PayloadError
from relaybox.event import Delivery
from relaybox.outcome import Delivered, Reject, Released, Retry, Unavailable

Answer: TypeAlias = Delivered | Released | Retry | Reject | Unavailable


class Sink(Protocol):
    """Hands deliveries to a destination. See the module's text for what it promises."""

    keeps_order: bool
    """Whether several deliveries of one key may be in one ``send`` and still arrive in order."""

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        """One answer for each delivery, in the same order."""
        ...

    async def close(self) -> None:
        """Give up connections and threads."""
        ...


class OneByOne:
    """A base for sinks that send one delivery at a time: many keys at once, each key in sequence.

    A subclass writes ``deliver``, which returns when the destination acknowledged and raises otherwise.
    After a delivery that did not arrive, the rest of its key is not tried. ``concurrency`` holds for all
    calls of ``send`` together.
    """

    keeps_order = True

    def __init__(self, concurrency: int) -> None:
        self._concurrency = concurrency
        self._places: asyncio.Semaphore | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def deliver(self, delivery: Delivery) -> None:
        """Hand over one delivery; raise ``Retry``, ``Reject``, ``Unavailable`` or anything else."""
        raise NotImplementedError

    async def send(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        """One answer for each delivery, in the same order."""
        answers: list[Answer] = [Released()] * len(deliveries)
        queue = _runs(deliveries)[::-1]
        places = self._places_here()

        async def work() -> None:
            async with places:
                while queue:
                    for index in queue.pop():
                        answers[index] = await self._answer(deliveries[index])
                        if not isinstance(answers[index], Delivered):
                            break

        async with asyncio.TaskGroup() as workers:
            for _ in range(min(self._concurrency, len(queue))):
                workers.create_task(work())
        return answers

    async def close(self) -> None:
        """Nothing is held."""

    def _places_here(self) -> asyncio.Semaphore:
        """The semaphore of this loop: one sink may serve a loop after the other, and a semaphore may not."""
        loop = asyncio.get_running_loop()
        if self._places is None or self._loop is not loop:
            self._places, self._loop = asyncio.Semaphore(self._concurrency), loop
        return self._places

    async def _answer(self, delivery: Delivery) -> Answer:
        try:
            await self.deliver(delivery)
        except (Retry, Reject, Unavailable) as answer:
            return answer
        except PayloadError as error:
            return Reject(str(error))
        except Exception as error:
            return Retry(describe(error))
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            return Retry(describe(error))
        return Delivered()


def being_cancelled() -> bool:
    """Whether the running task was cancelled, and not only something that it waits for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def describe(error: BaseException) -> str:
    """``SystemExit: 3``: what happened, for the reason of an answer."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception:
        # A handler's own exception may fail at anything, also at this.
        return name
    return f"{name}: {text}" if text else name


def _runs(deliveries: Sequence[Delivery]) -> list[list[int]]:
    """The places in the batch of each key's deliveries; one without a key is a run by itself."""
    runs: list[list[int]] = []
    of_key: dict[str, list[int]] = {}
    for index, delivery in enumerate(deliveries):
        key = delivery.ordering_key
        if key in of_key:
            of_key[key].append(index)
            continue
        runs.append([index])
        if key is not None:
            of_key[key] = runs[-1]
    return runs
