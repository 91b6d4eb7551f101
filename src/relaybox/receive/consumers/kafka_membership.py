"""A Kafka client's life in its group: partitions come and go, and each is worked on in a lane of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeAlias

from relaybox.errors import MissingExtra
from relaybox.receive.consumers.loop import PATIENCE, pause

try:
    import confluent_kafka as kafka
except ImportError:
    raise MissingExtra("confluent-kafka", "kafka") from None

log = logging.getLogger("relaybox.consumer")

POLL_SECONDS = 0.2
BUSY_POLL_SECONDS = 0.02
PAUSE_SECONDS = 0.5
"""How long a partition may be full before it is paused. A pause makes the client drop what it has fetched, so
that one which is only busy is better waited for; one that waits for its next attempt must not hold up others.
"""
CLOSE_SECONDS = 10.0
"""How long a broker that does not answer is waited for at the end."""

Partition: TypeAlias = tuple[str, int]
Attend: TypeAlias = Callable[[Any, asyncio.Event], Awaitable[bool]]
"""Brings a message to its end; False where the event was set first."""


class Thread:
    """The thread that a client is used in: a daemon, so that a call that never returns holds up no exit."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="relaybox-kafka", daemon=True).start()

    def call(self, function: Callable[..., Any], *given: Any) -> asyncio.Future[Any]:
        """What the function returns or raises there."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def run() -> None:
            try:
                settle, value = _succeed, function(*given)
            except Exception as error:
                settle, value = _fail, error
            # The loop may have ended before a call that was left to itself.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(settle, answer, value)

        self._calls.put(run)
        return answer

    def stop(self) -> None:
        """End it after the call it is in."""
        self._calls.put(None)

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()


def _succeed(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_result(value)


def _fail(answer: asyncio.Future[Any], value: Any) -> None:
    if not answer.done():
        answer.set_exception(value)


class Lane:
    """The messages of one partition that wait here, and the task that works on the first of them."""

    def __init__(self, attend: Attend, moved: asyncio.Event) -> None:
        self.waiting: deque[Any] = deque()
        self.next_offset: int | None = None
        """What may be committed: all before it is done."""
        self.committed: int | None = None
        self.full_since: float | None = None
        self.paused = False
        self._attend = attend
        self._moved = moved
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def put(self, message: Any) -> None:
        self.waiting.append(message)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self.waiting and await self._attend(self.waiting[0], self._ending):
            self.next_offset = self.waiting.popleft().offset() + 1
            self._moved.set()

    async def end(self) -> None:
        """Finish the message in hand, if it does not take too long, and leave the others."""
        self._ending.set()
        if self._task is None:
            return
        done, _ = await asyncio.wait([self._task], timeout=PATIENCE)
        if not done:
            log.warning("a handler did not finish in %gs; its message will be delivered again", PATIENCE)
            self._task.cancel()


class Membership:
    """One life of the client, from joining the group to leaving it. The client is used in one thread only."""

    def __init__(self, settings: Mapping[str, Any], topics: list[str], prefetch: int, attend: Attend) -> None:
        self._topics = topics
        self._prefetch = prefetch
        self._attend = attend
        self._lanes: dict[Partition, Lane] = {}
        self._assigned: dict[Partition, object] = {}
        """What is ours, as the client's thread knows it; the values tell one assignment from the next."""
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._said: set[int] = set()
        self._client = kafka.Consumer({**settings, "error_cb": self._on_error, "on_commit": self._on_commit})
        # After the client, which refuses settings: nobody would end the thread.
        self._thread = Thread()

    async def run(self, stopping: asyncio.Event) -> None:
        """Consume until it is time to stop; raises where the client is of no more use."""
        await self._thread.call(self._subscribe)
        while not stopping.is_set():
            if self._crowded():
                self._moved.clear()
                await pause(self._moved, BUSY_POLL_SECONDS)
                continue
            for message in await self._thread.call(self._fetch, *self._flow()):
                self._take(message)

    async def end(self) -> None:
        """Finish what is in hand, commit it, and leave the group."""
        offsets = await self._leave(list(self._lanes))
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._thread.call(self._close, offsets)
        except TimeoutError:
            log.warning("Kafka does not answer; the group is left without a word; messages may come again")
        self._thread.stop()

    def _take(self, message: Any) -> None:
        error = message.error()
        if error is not None:
            if error.fatal():
                raise kafka.KafkaException(error)
            self._on_error(error)
            return
        self._said.clear()
        place = _place(message)
        if place not in self._lanes:
            self._lanes[place] = Lane(self._attend, self._moved)
        self._lanes[place].put(message)

    def _crowded(self) -> bool:
        """Whether a partition is full, and not for long: it makes room soon, or is paused."""
        now, crowded = time.monotonic(), False
        for lane in self._lanes.values():
            if len(lane.waiting) < self._prefetch:
                lane.full_since = None
            elif not lane.paused:
                lane.full_since = lane.full_since or now
                crowded |= now - lane.full_since < PAUSE_SECONDS
        return crowded

    def _flow(self) -> tuple[list[Any], list[Any], list[Any], float]:
        """What to pause, what to resume, what to commit, and how long to wait for messages."""
        pause, resume, done = [], [], []
        for place, lane in self._lanes.items():
            if not lane.paused and lane.full_since is not None:
                pause.append(kafka.TopicPartition(*place))
                lane.paused = True
            elif lane.paused and len(lane.waiting) <= self._prefetch // 2:
                resume.append(kafka.TopicPartition(*place))
                lane.paused = False
            if lane.next_offset is not None and lane.next_offset != lane.committed:
                done.append(kafka.TopicPartition(*place, lane.next_offset))
                lane.committed = lane.next_offset
        paused = any(lane.paused for lane in self._lanes.values())
        return pause, resume, done, BUSY_POLL_SECONDS if paused else POLL_SECONDS

    async def _leave(self, places: Iterable[Partition]) -> list[Any]:
        """Give up partitions; the offsets up to which they are done."""
        lanes = {place: self._lanes.pop(place) for place in places if place in self._lanes}
        await asyncio.gather(*(lane.end() for lane in lanes.values()))
        done = ((place, lane.next_offset) for place, lane in lanes.items() if lane.next_offset is not None)
        return [kafka.TopicPartition(*place, offset) for place, offset in done]

    # What follows runs in the client's thread.

    def _subscribe(self) -> None:
        self._client.subscribe(
            self._topics, on_assign=self._on_assign, on_revoke=self._on_revoke, on_lost=self._on_lost
        )

    def _fetch(self, pause: list[Any], resume: list[Any], done: list[Any], seconds: float) -> list[Any]:
        if pause:
            self._client.pause(pause)
        if resume:
            self._client.resume(resume)
        if done:
            self._client.commit(offsets=done, asynchronous=True)
        found = []
        message = self._client.poll(seconds)
        while message is not None:
            found.append((message, self._assigned.get(_place(message))))
            message = self._client.poll(0) if len(found) < self._prefetch else None
        # One whose partition was taken away meanwhile belongs to somebody else, as do those before it: to
        # commit what follows it would lose them.
        return [
            message
            for message, assignment in found
            if message.error() is not None or assignment is self._assigned.get(_place(message), self)
        ]

    def _on_assign(self, _: Any, partitions: list[Any]) -> None:
        self._assigned.update({(found.topic, found.partition): object() for found in partitions})

    def _on_revoke(self, _: Any, partitions: list[Any]) -> None:
        self._commit(self._given_up(partitions))

    def _on_lost(self, _: Any, partitions: list[Any]) -> None:
        # Others have them by now, and the offsets are theirs.
        self._given_up(partitions)

    def _given_up(self, partitions: list[Any]) -> list[Any]:
        places = [(found.topic, found.partition) for found in partitions]
        for place in places:
            self._assigned.pop(place, None)
        # A pause would hold when they come back.
        self._client.resume(partitions)
        if not self._lanes:
            return []
        return asyncio.run_coroutine_threadsafe(self._leave(places), self._loop).result()

    def _commit(self, offsets: list[Any]) -> None:
        if not offsets:
            return
        try:
            self._client.commit(offsets=offsets, asynchronous=False)
        except kafka.KafkaException as error:
            self._on_commit(error.args[0], offsets)

    def _close(self, offsets: list[Any]) -> None:
        self._commit(offsets)
        self._client.close()

    def _on_commit(self, error: Any, _: list[Any]) -> None:
        if error is not None:
            log.warning("an offset was not committed: %s; messages may come again", error.str())

    def _on_error(self, error: Any) -> None:
        """Said once, until a message comes: the client goes on trying, and would say it again and again."""
        if error.code() not in self._said and error.code() != kafka.KafkaError._PARTITION_EOF:
            self._said.add(error.code())
            log.warning("Kafka: %s", error.str())


def _place(message: Any) -> Partition:
    return message.topic(), message.partition()
