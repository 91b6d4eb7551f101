"""Events from Kafka: each partition in its order, an offset committed after the transaction of its handlers.

    consumer = KafkaConsumer("kafka:9092", "order-events", group="billing", inbox=inbox, transaction=Session)

    @consumer.on("order.*")
    async def on_order(event: Event, session: AsyncSession) -> None: ...

    consumer.serve()

Partitions are worked on side by side, the messages of one of them one after the other. A message that is to
be tried again stays at the head of its partition, which waits for it; the others go on. Between the commit in
the database and that of the offset a message can come twice, here or to another consumer: the inbox knows it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, TypeAlias

from relaybox.core.settings import Backoff
from relaybox.core.values import Duration, parse_count, parse_name, parse_names
from relaybox.errors import ConfigError
from relaybox.receive.consumer import Crashed, Done, Once, Refused, Verdict
from relaybox.receive.consumers.kafka_membership import Membership
from relaybox.receive.consumers.loop import BACKOFF, TIMEOUT, Loop, pause, text_headers
from relaybox.sinks.sink import describe
from relaybox.wire.envelope import JSON, Received

DeadLetter: TypeAlias = Callable[[Any, str], Any]


class KafkaConsumer(Loop):
    """Consumes topics as a member of a group.

    ``settings`` are librdkafka's own, such as ``security.protocol``. ``dead_letter(message, reason)`` is
    called for what is refused, with the client's ``Message``; without one it is logged and passed over.
    ``prefetch`` bounds the messages that wait here for each partition. A handler, and ``dead_letter``, has
    ``timeout`` to return. The rest is ``Consumer``'s; its name is the group's.
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
        dead_letter: DeadLetter | None = None,
        prefetch: int = 100,
        timeout: Duration = TIMEOUT,
        backoff: Backoff | Mapping[str, Any] = BACKOFF,
    ) -> None:
        name = consumer or inbox.consumer or parse_name(group, "group")
        super().__init__(
            inbox=inbox, transaction=transaction, consumer=name, timeout=timeout, backoff=backoff
        )
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
        """Bring a message to its end; False where ``ending`` came first."""
        attempt = 0
        while not ending.is_set():
            attempt += 1
            verdict = await self._guard(self._decide(message, attempt))
            if isinstance(verdict, Done | Refused):
                self._connected()
                return True
            seconds = self._delay(verdict, attempt)
            self._report(_id(message), verdict, f"its partition waits {seconds:.1f}s")
            await pause(ending, seconds)
        return False

    async def _decide(self, message: Any, attempt: int) -> Verdict:
        verdict = await self._judge(_received(message, attempt))
        return await self._refuse(message, verdict) if isinstance(verdict, Refused) else verdict

    async def _refuse(self, message: Any, verdict: Refused) -> Refused | Crashed:
        if self._dead_letter is None:
            self._report(_id(message), verdict, "passed over")
            return verdict
        try:
            await self._ask(self._dead_letter, message, verdict.reason)
        except Exception as error:
            return Crashed(f"dead_letter failed with {describe(error)}")
        self._report(_id(message), verdict, "given to dead_letter")
        return verdict


def _id(message: Any) -> str:
    return text_headers(dict(message.headers() or ())).get("event-id", "")


def _received(message: Any, attempt: int) -> Received:
    headers = text_headers(dict(message.headers() or ()))
    return Received(
        headers.get("event-id", ""),
        message.value() or b"",
        headers.pop("content-type", JSON),
        headers,
        _sent_at(*message.timestamp()),
        attempt,
    )


def _sent_at(kind: int, milliseconds: int) -> datetime:
    # No kind: the message has no time of its own. Producers may also write one that no calendar has.
    with suppress(ValueError, OverflowError, OSError):
        if kind:
            return datetime.fromtimestamp(milliseconds / 1000, UTC)
    return datetime.now(UTC)


_OWN_SETTINGS = ("bootstrap.servers", "group.id", "enable.auto.commit", "enable.auto.offset.store")


def _settings(servers: str, group: str, given: Mapping[str, Any]) -> dict[str, Any]:
    for name in _OWN_SETTINGS:
        if name in given:
            raise ConfigError(f"settings: {name} is not yours to set here; leave it out")
    return {
        "auto.offset.reset": "earliest",
        # A partition that is resumed waits for the fetch of the others that is under way.
        "fetch.wait.max.ms": 100,
        # What matters comes by way of callbacks.
        "log_level": 0,
        **given,
        "bootstrap.servers": parse_name(servers, "servers"),
        "group.id": group,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
    }
