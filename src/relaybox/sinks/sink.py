"""The contract of a sink: hand deliveries to a destination and say of each what became of it.

A sink knows nothing of leases, retries or circuits. It answers every delivery with one of

- ``Delivered()``: the destination acknowledged it,
- ``Retry``, ``Reject`` or ``Unavailable``: an exception, returned or raised as a value,
- ``Released()``: it was not tried, because an earlier one of its key did not arrive.

``send`` itself does not raise: whatever goes wrong with one delivery is that delivery's answer. Only a
caller that cancels it gets its ``CancelledError``.

A sink asks before it begins with a delivery, and reports each answer as it comes: so it can be settled while
the rest of the batch is still under way, and what must not be sent any more is left.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

from relaybox.core.event import Delivery
from relaybox.core.outcome import Delivered, Reject, Released, Retry, Unavailable
from relaybox.errors import PayloadError

T = TypeVar("T")
Answer: TypeAlias = Delivered | Released | Retry | Reject | Unavailable


class LeftRunning(asyncio.CancelledError):
    """The caller is cancelled, and what it called runs on: it was tried, and ``answer`` says so."""

    def __init__(self, answer: Retry) -> None:
        super().__init__(answer.reason)
        self.answer = answer


DELIVERED, RELEASED = Delivered(), Released()
AT_A_STRETCH = 50
"""Deliveries that did not wait, after which others have a turn of the loop: claims and settles go on."""


class Progress(Protocol):
    """Whoever called ``send`` and wants to know how it goes."""

    def begin(self, delivery: Delivery) -> bool:
        """Whether it may be sent now; if not, its answer is ``Released()``."""
        ...

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """It was answered so."""
        ...


class Regardless:
    """The ``Progress`` of a caller that waits for the whole batch."""

    def begin(self, delivery: Delivery) -> bool:
        """Yes."""
        return True

    def report(self, delivery: Delivery, answer: Answer) -> None:
        """Not of interest."""


REGARDLESS = Regardless()


class Sink(Protocol):
    """Hands deliveries to a destination. See the module's text for what it promises."""

    keeps_order: bool
    """Whether several deliveries of one key may be in one ``send`` and still arrive in order."""

    def limit(self, concurrency: int) -> None:
        """From now on have no more than so many deliveries (or requests of many) under way at once."""
        ...

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """One answer for each delivery, in the same order."""
        ...

    async def close(self) -> None:
        """Give up connections and threads."""
        ...


class Workers:
    """Run one function in as many tasks as it asks for, by ``add``.

    A function that started itself again would be a cycle, and keep its batch until a garbage collection.
    """

    def __init__(
        self, tasks: asyncio.TaskGroup, work: Callable[[Workers], Coroutine[Any, Any, None]]
    ) -> None:
        self._tasks = tasks
        self._work = work

    def add(self) -> None:
        """Run the function in one more task."""
        self._tasks.create_task(self._work(self))


async def run_workers(work: Callable[[Workers], Coroutine[Any, Any, None]]) -> None:
    """Run the function, and wait until it and all the workers that it added have returned."""
    async with asyncio.TaskGroup() as tasks:
        Workers(tasks, work).add()


class Limited:
    """Holds for all calls of ``send`` together: no more than ``concurrency`` places are taken at once."""

    keeps_order = True

    def __init__(self, concurrency: int) -> None:
        self._places = Places(concurrency)

    def limit(self, concurrency: int) -> None:
        """From now on have no more than so many deliveries, or requests of many, under way at once."""
        self._places.limit(concurrency)

    async def close(self) -> None:
        """Nothing is held."""


class OneByOne(Limited):
    """A base for sinks that send one delivery at a time: many keys at once, each key in sequence.

    A subclass writes ``deliver``, which returns when the destination acknowledged and raises otherwise.
    After a delivery that did not arrive, the rest of its key is not tried. ``concurrency`` holds for all
    calls of ``send`` together.
    """

    async def deliver(self, delivery: Delivery) -> None:
        """Hand over one delivery; raise ``Retry``, ``Reject``, ``Unavailable`` or anything else."""
        raise NotImplementedError

    def begin(self, delivery: Delivery) -> Awaitable[None] | None:
        """Begin with ``deliver``; what is left to wait for, if anything is."""
        return self.deliver(delivery)

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """One answer for each delivery, in the same order."""
        answers: list[Answer] = [RELEASED] * len(deliveries)
        sender = asyncio.current_task()
        heads, following = runs(deliveries)
        heads.reverse()

        async def work(workers: Workers) -> None:
            # Each worker that gets a place begins the next: where deliveries never wait, the first does all.
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
                        except LeftRunning as cut:
                            progress.report(delivery, cut.answer)
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
    """A base for sinks that send many deliveries in one request, each with an answer of its own.

    A subclass writes ``deliver``. Of one key no more than one delivery is in a request, and the next follows
    when it has arrived; ``size`` is what a request may hold. ``concurrency`` requests are under way at once,
    in all calls of ``send`` together.
    """

    def __init__(self, concurrency: int, size: int) -> None:
        super().__init__(concurrency)
        self._size = size

    async def deliver(self, deliveries: Sequence[Delivery]) -> Sequence[Answer]:
        """Hand over a batch: an answer for each, or one that is raised for all of them."""
        raise NotImplementedError

    async def send(self, deliveries: Sequence[Delivery], progress: Progress = REGARDLESS) -> Sequence[Answer]:
        """One answer for each delivery, in the same order."""
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

        async def work(workers: Workers) -> None:
            async with self._places:
                while batch := take():
                    if ready:
                        workers.add()
                    try:
                        answered = await self.deliver([deliveries[at] for at in batch])
                    except BaseException as error:
                        answered = [_answer(error, sender)] * len(batch)
                    for at, answer in zip(batch, answered, strict=True):
                        answers[at] = answer
                        progress.report(deliveries[at], answer)
                        if isinstance(answer, Delivered) and at in following:
                            ready.append(following[at])
                    if self._places.crowded and ready:
                        workers.add()
                        return

        await run_workers(work)
        return answers


def try_each(
    deliveries: Sequence[Delivery], make: Callable[[Delivery], T], answers: dict[int, Answer]
) -> dict[int, T]:
    """Make something of each delivery, by its place; what ``make`` raises is that delivery's answer."""
    made = {}
    for at, delivery in enumerate(deliveries):
        try:
            made[at] = make(delivery)
        except Exception as error:
            answers[at] = answer_of(error)
    return made


def answer_of(error: Exception) -> Answer:
    """What was raised of a delivery, as an answer."""
    match error:
        case Retry() | Reject() | Unavailable():
            # An answer is kept for a while, and what it was raised in the midst of can be large.
            error.__traceback__ = error.__context__ = error.__cause__ = None
            return error
        case PayloadError():
            return Reject(str(error))
    return Retry(describe(error))


def _answer(error: BaseException, sender: asyncio.Task[Any] | None) -> Answer:
    """What was raised, as an answer; raises it where it is not about the delivery."""
    match error:
        case asyncio.CancelledError() if sender is not None and not sender.cancelling():
            # Not whoever called: what was called cancelled itself, or what it waited for.
            while being_cancelled():
                sending = asyncio.current_task()
                assert sending is not None
                sending.uncancel()
            return Retry(describe(error))
        case Exception():
            return answer_of(error)
    raise error


class Places:
    """A semaphore whose limit can change; it may serve one loop after the other."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    def limit(self, limit: int) -> None:
        """Let in so many from now on; whoever is in stays."""
        self._limit = limit
        self._let_in()

    @property
    def crowded(self) -> bool:
        """Whether there are more in than the limit allows by now."""
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


_SHOWN = 200
"""Characters that a message shows of a text from outside."""


def clean(text: str, secrets: Iterable[str]) -> str:
    """Return the beginning of a text from outside, as one line without control characters or secrets."""
    for secret in secrets:
        text = text.replace(secret, "***")
    # White space is folded, so more than what is shown is looked at.
    printable = "".join(c if c.isprintable() else " " for c in text[: 4 * _SHOWN])
    line = " ".join(printable.split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}…"


def runs(deliveries: Sequence[Delivery]) -> tuple[list[int], dict[int, int]]:
    """The places in the batch where a key begins, and which place follows which; a key may be of one."""
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
