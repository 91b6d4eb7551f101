"""Consume events from Kafka, each partition in order; commit an offset after its handlers' transaction.

A message to be retried stays at the head of its partition, and only that partition waits. A message can come
again between the database's commit and the offset's, and the inbox detects that.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

from relaybox.core.settings import Backoff
from relaybox.core.values import Duration, parse_count, parse_name, parse_names
from relaybox.errors import ConfigError, MissingExtra
from relaybox.receive.consumer import Crashed, Once, Rejected, Verdict, log
from relaybox.receive.consumers.loop import BACKOFF, TIMEOUT, Loop, finish, pause, text_headers
from relaybox.sinks.sink import describe
from relaybox.wire.envelope import JSON, Received

try:
    import confluent_kafka as kafka
except ImportError:
    raise MissingExtra("confluent-kafka", "kafka") from None

POLL_SECONDS = 0.2
BUSY_POLL_SECONDS = 0.02
PAUSE_SECONDS = 0.5
"""Seconds for which a partition may be full before it is paused, which drops what the client has fetched."""
CLOSE_SECONDS = 10.0
"""Seconds to wait at the end for a broker that does not answer."""

Partition: TypeAlias = tuple[str, int]
Attend: TypeAlias = Callable[[Any, asyncio.Event], Awaitable[bool]]
"""Processes a message to its end; returns False if the event was set first."""


class KafkaConsumer(Loop):
    """Consumes topics as a member of a group.

    ``settings`` are librdkafka's. ``dead_letter(message, reason)`` gets each refused message as the client's
    ``Message``; without it they are logged and skipped. ``prefetch`` limits the waiting messages of each
    partition. ``consumer`` defaults to the inbox's, then ``group``.
    """

    def __init__(
        self,
        servers: str,
        topics: str | Iterable[str],
        *,
        group: str,
        inbox: Once,
        transaction: Any,
        consumer: str | None = None,
        settings: Mapping[str, Any] | None = None,
        dead_letter: Callable[[Any, str], Any] | None = None,
        prefetch: int = 100,
        timeout: Duration = TIMEOUT,
        backoff: Backoff | Mapping[str, Any] = BACKOFF,
    ) -> None:
        name = consumer or inbox.consumer or parse_name(group, "group")
        super().__init__(inbox, transaction, name, timeout, backoff)
        self._topics = list(parse_names(topics, "topics"))
        self._prefetch = parse_count(prefetch, "prefetch")
        self._settings = _settings(servers, group, settings or {})
        self._dead_letter = dead_letter

    async def _consume(self) -> None:
        membership = Membership(self._settings, self._topics, self._prefetch, self._attend)
        try:
            await membership.run(self._stopping)
        finally:
            await membership.end()

    async def _attend(self, message: Any, ending: asyncio.Event) -> bool:
        judge = partial(self._decide, message)
        message_id = _headers(message).get("event-id", "")
        if await self._try(judge, message_id, ending, "its partition waits") is None:
            return False
        self._failures = 0
        return True

    async def _decide(self, message: Any, attempt: int) -> Verdict:
        received, then = _received(message, attempt), "passed over"
        verdict = await self._judge(received)
        if not isinstance(verdict, Rejected):
            return verdict
        if self._dead_letter is not None:
            then = "given to dead_letter"
            try:
                await self._calls.ask(self._dead_letter, message, verdict.reason)
            except Exception as error:
                return Crashed(f"dead_letter failed with {describe(error)}")
        self._report(received.message_id, verdict, then)
        return verdict


def _headers(message: Any) -> dict[str, str]:
    return text_headers(dict(message.headers() or ()))


def _received(message: Any, attempt: int) -> Received:
    headers, sent_at = _headers(message), datetime.now(UTC)
    kind, milliseconds = message.timestamp()
    # Kind 0 means that there is no timestamp. Producers may also write one that is out of range.
    with suppress(ValueError, OverflowError, OSError):
        sent_at = datetime.fromtimestamp(milliseconds / 1000, UTC) if kind else sent_at
    message_id, content_type = headers.get("event-id", ""), headers.pop("content-type", JSON)
    return Received(message_id, message.value() or b"", content_type, headers, sent_at, attempt)


def _settings(servers: str, group: str, given: Mapping[str, Any]) -> dict[str, Any]:
    own = {
        "bootstrap.servers": parse_name(servers, "servers"),
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
    }
    for name in own:
        if name in given:
            raise ConfigError(f"settings: {name} is not yours to set here; leave it out")
    return {
        "auto.offset.reset": "earliest",
        # Keep it short: a resumed partition waits for the current fetch of the others.
        "fetch.wait.max.ms": 100,
        # Errors that matter arrive by callback.
        "log_level": 0,
        **given,
        **own,
    }


class Thread:
    """The thread of a client; a daemon, so that a call that never returns does not delay an exit."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="relaybox-kafka", daemon=True).start()

    def call(self, function: Callable[..., Any], *given: Any, **options: Any) -> asyncio.Future[Any]:
        """Run the function in the thread and return a future of its result."""
        answer: Future[Any] = Future()
        # Mark it as running, so that it is called even if the caller stops waiting.
        answer.set_running_or_notify_cancel()
        self._calls.put((answer, partial(function, *given, **options)))
        return asyncio.wrap_future(answer)

    def stop(self) -> None:
        """Stop the thread after its current call."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            answer, function = call
            try:
                answer.set_result(function())
            except Exception as error:
                answer.set_exception(error)


class PartitionQueue:
    """The waiting messages of one partition, and the task that processes the first of them."""

    def __init__(self, attend: Attend, moved: asyncio.Event) -> None:
        self.waiting: deque[Any] = deque()
        self.next_offset: int | None = None
        """The offset to commit: all messages before it are done."""
        self.committed: int | None = None
        self.full_since: float | None = None
        self.paused = False
        self._attend = attend
        self._moved = moved
        self._ending = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def put(self, message: Any) -> None:
        """Process the message after those before it."""
        self.waiting.append(message)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._work())

    async def _work(self) -> None:
        while self.waiting and await self._attend(self.waiting[0], self._ending):
            self.next_offset = self.waiting.popleft().offset() + 1
            self._moved.set()

    async def end(self) -> None:
        """Finish the current message, if it does not take too long, and leave the others."""
        self._ending.set()
        if self._task is not None:
            await finish([self._task])


class Membership:
    """One session of the client, from joining the group to leaving it. One thread uses the client."""

    def __init__(self, settings: Mapping[str, Any], topics: list[str], prefetch: int, attend: Attend) -> None:
        self._topics = topics
        self._prefetch = prefetch
        self._moved = asyncio.Event()
        self._queues: defaultdict[Partition, PartitionQueue] = defaultdict(
            lambda: PartitionQueue(attend, self._moved)
        )
        self._assigned: dict[Partition, object] = {}
        """Our partitions, as the client's thread sees them; each value identifies one assignment."""
        self._loop = asyncio.get_running_loop()
        self._said: set[int] = set()
        self._client = kafka.Consumer({**settings, "error_cb": self._on_error, "on_commit": self._on_commit})
        # After the client, which may refuse its settings: nothing would stop the thread then.
        self._thread = Thread()

    async def run(self, stopping: asyncio.Event) -> None:
        """Consume until ``stopping`` is set; raise if the client can no longer be used."""
        await self._thread.call(
            self._client.subscribe,
            self._topics,
            on_assign=self._on_assign,
            on_revoke=self._on_revoke,
            # Others own lost ones by now, so commit nothing.
            on_lost=self._given_up,
        )
        while not stopping.is_set():
            if self._crowded():
                self._moved.clear()
                await pause(self._moved, BUSY_POLL_SECONDS)
                continue
            for message in await self._thread.call(self._fetch, *self._flow()):
                self._take(message)

    async def end(self) -> None:
        """Finish the current messages, commit their offsets, and leave the group."""
        offsets = await self._leave(list(self._queues))
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await self._thread.call(self._close, offsets)
        except TimeoutError:
            log.warning("Kafka does not answer; the group is left without a word; messages may come again")
        self._thread.stop()

    def _take(self, message: Any) -> None:
        error = message.error()
        if error is None:
            self._said.clear()
            self._queues[_place(message)].put(message)
        elif error.fatal():
            raise kafka.KafkaException(error)
        else:
            self._on_error(error)

    def _crowded(self) -> bool:
        """True if a partition has just become full: wait for it, because a pause drops its messages."""
        now, crowded = time.monotonic(), False
        for queue in self._queues.values():
            if len(queue.waiting) < self._prefetch:
                queue.full_since = None
            elif not queue.paused:
                queue.full_since = queue.full_since or now
                crowded |= now - queue.full_since < PAUSE_SECONDS
        return crowded

    def _flow(self) -> tuple[list[Any], list[Any], list[Any], float]:
        pause, resume, done = [], [], []
        for place, queue in self._queues.items():
            if not queue.paused and queue.full_since is not None:
                pause.append(kafka.TopicPartition(*place))
                queue.paused = True
            elif queue.paused and len(queue.waiting) <= self._prefetch // 2:
                resume.append(kafka.TopicPartition(*place))
                queue.paused = False
            if queue.next_offset is not None and queue.next_offset != queue.committed:
                done.append(kafka.TopicPartition(*place, queue.next_offset))
                queue.committed = queue.next_offset
        paused = any(queue.paused for queue in self._queues.values())
        return pause, resume, done, BUSY_POLL_SECONDS if paused else POLL_SECONDS

    async def _leave(self, places: Iterable[Partition]) -> list[Any]:
        queues = {place: self._queues.pop(place) for place in places if place in self._queues}
        await asyncio.gather(*(queue.end() for queue in queues.values()))
        offsets = {place: queue.next_offset for place, queue in queues.items()}
        return [kafka.TopicPartition(*place, at) for place, at in offsets.items() if at is not None]

    # The methods below run in the client's thread.

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

        def is_ours(message: Any, assignment: object) -> bool:
            return message.error() is not None or assignment is self._assigned.get(_place(message), self)

        # A partition revoked during the poll is another consumer's now, with its earlier messages too. To
        # commit a later offset would lose them, so drop what was fetched.
        return [message for message, assignment in found if is_ours(message, assignment)]

    def _on_assign(self, _: Any, partitions: list[Any]) -> None:
        self._assigned.update({(found.topic, found.partition): object() for found in partitions})

    def _on_revoke(self, client: Any, partitions: list[Any]) -> None:
        self._commit(self._given_up(client, partitions))

    def _given_up(self, _: Any, partitions: list[Any]) -> list[Any]:
        places = [(found.topic, found.partition) for found in partitions]
        for place in places:
            self._assigned.pop(place, None)
        # A pause would still hold when they come back.
        self._client.resume(partitions)
        if not self._queues:
            return []
        return asyncio.run_coroutine_threadsafe(self._leave(places), self._loop).result()

    def _commit(self, offsets: list[Any]) -> None:
        try:
            if offsets:
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
        """Log an error once until a message arrives: the client repeats it while it retries."""
        if error.code() not in self._said and error.code() != kafka.KafkaError._PARTITION_EOF:
            self._said.add(error.code())
            log.warning("Kafka: %s", error.str())


def _place(message: Any) -> Partition:
    return message.topic(), message.partition()
