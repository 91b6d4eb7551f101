"""Share code between the loops: run until stopped, reconnect after a failure, stop on a signal."""

from __future__ import annotations

import asyncio
import math
import random
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from relaybox.core.event import Event
from relaybox.core.outcome import delay
from relaybox.core.settings import Backoff
from relaybox.core.values import Duration, Secret, duration_from, mask_url, parse_secret
from relaybox.receive.consumer import Consumer, Crashed, Done, Later, Once, Rejected, Verdict, cancelled, log
from relaybox.receive.consumers.calls import LimitedCalls
from relaybox.sinks.sink import describe
from relaybox.wire.envelope import Malformed, Received, unpack

BACKOFF = Backoff(base=1, cap=60)
TIMEOUT = 30.0
"""Seconds that a handler has by default."""
PATIENCE = 30.0
"""Seconds that handlers have to finish when the loop stops; then their messages are delivered again."""


class Loop(Consumer):
    """A consumer that fetches its own messages; subclasses define how.

    A handler that exceeds ``timeout`` is given up, and its message comes again. An async handler is
    cancelled; a thread cannot be, but the inbox knows if its handler still commits.
    """

    def __init__(
        self,
        inbox: Once,
        transaction: Any,
        consumer: str,
        timeout: Duration,
        backoff: Backoff | Mapping[str, Any],
    ) -> None:
        super().__init__(inbox=inbox, transaction=transaction, consumer=consumer)
        self._calls = LimitedCalls(consumer, duration_from(0.001)(timeout, "timeout"))
        self._backoff = backoff if isinstance(backoff, Backoff) else Backoff.from_mapping(backoff)
        self._stopping = asyncio.Event()
        self._failures = 0
        """The number of failed connections in a row; subclasses reset it."""

    async def run(self) -> None:
        """Consume until ``stop()``; if the broker fails, connect again."""
        try:
            while not self._stopping.is_set():
                try:
                    await self._consume()
                except (Exception, asyncio.CancelledError) as error:
                    # A client that gives up its connection may cancel what waits for an answer.
                    if cancelled(error):
                        raise
                    if not self._stopping.is_set():
                        await self._wait_after(error)
        finally:
            self._calls.close()
            # The next run may be in another event loop.
            self._stopping = asyncio.Event()

    async def _wait_after(self, error: BaseException) -> None:
        self._failures += 1
        seconds = delay(self._backoff, self._failures, random.random)
        log.warning("%s: %s; connecting again in %.1fs", self._consumer, mask_url(describe(error)), seconds)
        await pause(self._stopping, seconds)

    def stop(self) -> None:
        """Take no more messages; ``run`` returns after the current ones. Call it in the loop's thread."""
        self._stopping.set()

    def serve(self) -> None:
        """Run as a process until SIGTERM or SIGINT."""
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop)
        await self.run()

    async def _consume(self) -> None:
        """Connect and consume until stopped; raise if the connection is lost."""
        raise NotImplementedError

    async def _judge(self, message: Received) -> Verdict:
        try:
            event = unpack(message)
        except Malformed as error:
            return Rejected(str(error))
        return await self.ahandle(event)

    async def _in_loop(self, event: Event) -> Verdict:
        try:
            async with asyncio.timeout(self._calls.timeout):
                return await super()._in_loop(event)
        except TimeoutError:
            return self._calls.late

    async def _in_thread(self, event: Event) -> Verdict:
        return await self._calls.judge(event.id, lambda: self.handle(event))

    async def _guard(self, work: Awaitable[Verdict]) -> Verdict:
        """Return the verdict, or ``Crashed`` for any exception; raise only if the caller was cancelled."""
        try:
            return await work
        except (Exception, asyncio.CancelledError) as error:
            if cancelled(error):
                raise
            log.error("%s: %s", self._consumer, describe(error), exc_info=error)
            return Crashed(describe(error))

    async def _try(
        self,
        judge: Callable[[int], Awaitable[Verdict]],
        message_id: str,
        ending: asyncio.Event,
        then: str,
        most: float = math.inf,
    ) -> Done | Rejected | None:
        """Return how a message ended, or None if ``ending`` was set or ``most`` seconds passed first."""
        since, attempt = time.monotonic(), 0
        while not ending.is_set() and time.monotonic() - since < most:
            attempt += 1
            verdict = await self._guard(judge(attempt))
            if isinstance(verdict, Done | Rejected):
                return verdict
            seconds = min(self._delay(verdict, attempt), most)
            self._report(message_id, verdict, f"{then} {seconds:.1f}s")
            await pause(ending, seconds)
        return None

    def _report(self, message_id: str, verdict: Later | Crashed | Rejected, then: str) -> None:
        name = message_id or "without an id"
        log.warning("%s: message %s: %s; %s", self._consumer, name, verdict.reason, then)

    def _delay(self, verdict: Later | Crashed, attempt: int) -> float:
        if isinstance(verdict, Later) and verdict.after is not None:
            return verdict.after
        return delay(self._backoff, attempt, random.random)


class Work:
    """The messages in progress: a task for each, which checks ``ending`` before it tries again."""

    def __init__(self) -> None:
        self.ending = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task for a message."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def any(self) -> None:
        """Wait until one of them has ended."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)

    async def __aenter__(self) -> Work:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Finish them, if that does not take too long."""
        self.ending.set()
        await finish(self._tasks)


async def finish(tasks: Collection[asyncio.Task[None]]) -> None:
    """Wait for tasks that process messages; cancel those that take too long."""
    _, late = await asyncio.wait(tasks, timeout=PATIENCE) if tasks else ((), ())
    for task in late:
        log.warning("a handler did not finish in %gs; its message will be delivered again", PATIENCE)
        task.cancel()


def parse_url(url: str | Secret) -> Secret:
    """Parse a broker's URL, ``env:NAME`` or ``file:PATH``; raise ``ConfigError`` if it cannot be read."""
    secret = parse_secret(url, "url")
    secret.reveal()
    return secret


async def pause(ending: asyncio.Event, seconds: float) -> None:
    """Wait for ``seconds``, or until ``ending`` is set."""
    with suppress(TimeoutError):
        await asyncio.wait_for(ending.wait(), seconds)


def text_headers(headers: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the headers that are text, or bytes decoded as text."""
    texts = {}
    for name, value in (headers or {}).items():
        if isinstance(value, str | bytes):
            texts[name] = value if isinstance(value, str) else value.decode("utf-8", "replace")
    return texts
