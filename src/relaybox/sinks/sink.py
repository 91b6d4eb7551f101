"""Define the contract of a sink, and the base classes that sinks build on.

A sink hands deliveries to a destination and knows nothing of leases, retries or circuits. Its answer is
``Delivered()``, or a ``Retry``, ``Reject`` or ``Unavailable`` exception as a value. ``Released()`` means that
it was not tried, because an earlier delivery of its key failed. ``send`` raises only the ``CancelledError``
of its caller. ``Progress`` lets the relay settle, and hold back, deliveries while the batch is being sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence, Sized
from typing import Any, Protocol, TypeAlias, TypeVar

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.core.scrub import scrub
from relaybox.errors import PayloadError

T = TypeVar("T")
Answer: TypeAlias = Delivered | Released | Retry | Reject | Unavailable


class CancelledWithAnswer(asyncio.CancelledError):
    """The caller of a sink was cancelled, and this is the answer about the delivery it was sending."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


DELIVERED, RELEASED = Delivered(), Released()
AT_A_STRETCH = 50
"""Yield to the event loop after this many deliveries that did not wait, so that claims and settles go on."""


class Progress(Protocol):
    """The callbacks of a ``send``."""

    def begin(self, delivery: Delivery) -> bool:
        """True if the delivery may be sent now; if not, its answer is ``Released()``."""
        ...

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """Take the answer of one delivery."""
        ...


class Regardless:
    """The ``Progress`` of a caller that waits for the whole batch."""

    def begin(self, delivery: Delivery) -> bool:
        """Return True."""
        return True

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """Do nothing."""


REGARDLESS = Regardless()


class Sink(Protocol):
    """Hands deliveries to a destination; the module docstring is the contract."""

    keeps_order: bool
    """True if one ``send`` may hold several deliveries of one key and still keep their order."""

    def limit(self, concurrency: int) -> None:
        """Set how many deliveries, or batch requests, may be in progress at once."""
        ...

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """Return one answer for each delivery, in the same order."""
        ...

    async def close(self) -> None:
        """Close connections and threads."""
        ...


class Workers:
    """Runs one function in several tasks; a closure that started itself again would be a reference cycle."""

    def __init__(
        self, tasks: asyncio.TaskGroup, work: Callable[[Workers], Coroutine[Any, Any, None]]
    ) -> None:
        self._tasks = tasks
        self._work = work

    def add(self) -> None:
        """Run the function in one more task."""
        self._tasks.create_task(self._work(self))


async def run_workers(work: Callable[[Workers], Coroutine[Any, Any, None]]) -> None:
    """Run the function, and wait until it and all workers that it added have returned."""
    async with asyncio.TaskGroup() as tasks:
        Workers(tasks, work).add()


async def run_batches(
    places: Places, ready: Sized, take: Callable[[], list[T]], send: Callable[[list[T]], Awaitable[None]]
) -> None:
    """Take batches of what is ready and send them, as many at once as there are places."""

    async def work(workers: Workers) -> None:
        async with places:
            while batch := take():
                if ready:
                    workers.add()
                await send(batch)
                if places.crowded and ready:
                    workers.add()
                    return

    await run_workers(work)


class Limited:
    """A base for sinks with one limit of ``concurrency`` for all calls of ``send`` together."""

    keeps_order = True

    def __init__(self, concurrency: int) -> None:
        self._places = Places(concurrency)

    def limit(self, concurrency: int) -> None:
        """Set how many deliveries, or batch requests, may be in progress at once."""
        self._places.limit(concurrency)

    async def close(self) -> None:
        """Do nothing: there is nothing to close."""


class OneByOne(Limited):
    """A base for sinks of single deliveries: many keys at once, each in sequence until one fails."""

    async def deliver(self, delivery: Delivery) -> None:
        """Return once the destination acknowledged it; raise an answer or any other exception."""
        raise NotImplementedError

    def begin(self, delivery: Delivery) -> Awaitable[None] | None:
        """Start ``deliver`` and return what is left to await, or None if it is done."""
        return self.deliver(delivery)

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """Return one answer for each delivery, in the same order."""
        answers: list[Answer] = [RELEASED] * len(deliveries)
        sender = asyncio.current_task()
        heads, following = runs(deliveries)
        heads.reverse()

        async def work(workers: Workers) -> None:
            # Each worker that gets a place starts the next; if deliveries never wait, the first does all.
            async with self._places:
                if len(heads) > 1:
                    workers.add()
                while heads:
                    at: int | None = heads.pop()
                    while at is not None:
                        delivery = deliveries[at]
                        if not progress.begin(delivery):
                            break
                        answer: Answer = DELIVERED
                        left: Awaitable[None] | None = None
                        try:
                            left = self.begin(delivery)
                            if left is not None:
                                await left
                        except CancelledWithAnswer as cancelled:
                            progress.report(delivery, cancelled.answer)
                            raise
                        except BaseException as error:
                            answer = _answer(error, sender)
                        answers[at] = answer
                        progress.report(delivery, answer)
                        if left is None and not at % AT_A_STRETCH:
                            await asyncio.sleep(0)
                        at = following.get(at) if answer is DELIVERED else None
                    if self._places.crowded and heads:
                        workers.add()
                        return

        await run_workers(work)
        return answers


class InBatches(Limited):
    """A base for sinks of up to ``size`` deliveries a request: one of each key, the next after it arrived."""

    def __init__(self, concurrency: int, size: int) -> None:
        super().__init__(concurrency)
        self._size = size

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        """Send a batch and return an answer for each; an exception is the answer for all of them."""
        raise NotImplementedError

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """Return one answer for each delivery, in the same order."""
        answers: list[Answer] = [RELEASED] * len(deliveries)
        sender = asyncio.current_task()
        heads, following = runs(deliveries)
        ready = deque(heads)

        def take() -> list[int]:
            batch: list[int] = []
            while ready and len(batch) < self._size:
                at = ready.popleft()
                if progress.begin(deliveries[at]):
                    batch.append(at)
            return batch

        async def deliver(batch: list[int]) -> None:
            try:
                answered = await self.deliver([deliveries[at] for at in batch])
            except BaseException as error:
                answered = [_answer(error, sender)] * len(batch)
            for at, answer in zip(batch, answered, strict=True):
                answers[at] = answer
                progress.report(deliveries[at], answer)
                if isinstance(answer, Delivered) and at in following:
                    ready.append(following[at])

        await run_batches(self._places, ready, take, deliver)
        return answers


def try_each(
    deliveries: Sequence[Delivery], make: Callable[[Delivery], T], answers: dict[int, Answer]
) -> dict[int, T]:
    """Return ``make(delivery)`` by index; if it raises, add that delivery's answer to ``answers`` instead."""
    made = {}
    for at, delivery in enumerate(deliveries):
        try:
            made[at] = make(delivery)
        except Exception as error:
            answers[at] = answer_of(error)
    return made


def answer_of(error: Exception) -> Answer:
    """Return the answer that an exception stands for."""
    match error:
        case Retry() | Reject() | Unavailable():
            # Answers are kept for a while, and the frames of a traceback can be large.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return error
        case PayloadError():
            return Reject(scrub(str(error)))
    return Retry(describe(error))


def _answer(error: BaseException, sender: asyncio.Task[Any] | None) -> Answer:
    """Return the answer that an exception stands for; raise it again if it is not about the delivery."""
    match error:
        case asyncio.CancelledError() if sender is not None and not sender.cancelling():
            # The caller was not cancelled: the called code cancelled itself, or something that it awaited.
            while being_cancelled():
                sending = asyncio.current_task()
                assert sending is not None
                sending.uncancel()
            return Retry(describe(error))
        case Exception():
            return answer_of(error)
    raise error


class Places:
    """A semaphore with a limit that can change; it can be used in one event loop after another."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def limit(self, limit: int) -> None:
        """Change the limit; tasks that are already in stay in."""
        self._limit = limit
        self._let_in()

    @property
    def crowded(self) -> bool:
        """True if more tasks are in than the limit now allows."""
        return self._taken > self._limit

    async def __aenter__(self) -> None:
        if self._taken < self._limit:
            self._taken += 1
            return
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        try:
            await place
        except asyncio.CancelledError:
            if not place.cancelled():
                self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._leave()

    def _leave(self) -> None:
        self._taken -= 1
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting and self._taken < self._limit:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(None)
                self._taken += 1


def being_cancelled() -> bool:
    """True if the running task itself was cancelled, not only something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def describe(error: BaseException) -> str:
    """Return an error as the reason of an answer, such as ``SystemExit: 3``."""
    name = type(error).__name__
    try:
        text = scrub(str(error))
    except Exception:
        # The ``__str__`` of an application's exception may fail too.
        return name
    return f"{name}: {text}" if text else name


_SHOWN = 200


def clean(text: str) -> str:
    """Return the beginning of a foreign text as one line, without control characters or secrets."""
    text = scrub(text)
    # White space is folded below, so take more characters than are shown.
    printable = "".join(c if c.isprintable() else " " for c in text[: 4 * _SHOWN])
    line = " ".join(printable.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def runs(deliveries: Sequence[Delivery]) -> tuple[list[int], dict[int, int]]:
    """Return the indexes where a key begins, and for each index the next one of the same key."""
    heads: list[int] = []
    following: dict[int, int] = {}
    last: dict[str, int] = {}
    for index, delivery in enumerate(deliveries):
        key = delivery.ordering_key
        if key is None:
            heads.append(index)
            continue
        if key in last:
            following[last[key]] = index
        else:
            heads.append(index)
        last[key] = index
    return heads, following
