"""Wrap a librdkafka producer, and track the messages in it.

The event loop polls for delivery reports, every millisecond while messages are in progress: in another
thread, every report would wait for the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from confluent_kafka import KafkaError, KafkaException, Producer

from relaybox.core.outcome import Retry, Unavailable
from relaybox.sinks.broker import Address
from relaybox.sinks.kafka.brokers import LATE, Brokers, classify, is_fatal, text_of
from relaybox.sinks.sink import DELIVERED

if TYPE_CHECKING:
    from relaybox.sinks.kafka.sink import Sent

Headers: TypeAlias = dict[str, str | bytes | None]

SOON, LATER, IDLE = 0.001, 0.01, 0.5
"""Seconds between polls: while reports arrive, while none arrive, and while none are expected."""
LIVELY = 0.05
"""Seconds to keep polling fast after a report, or after the first message."""
IN_THE_MAKING = 2.0
"""Seconds that a topic may take to appear if the broker creates it on first use."""
LONGEST_END = 5.0
"""Seconds that a close waits for librdkafka's threads."""
A_LOOK = 0.5
"""Seconds that one request for metadata may take."""

_inherited: list[Producer | None] = []
"""Producers of a parent process. Freeing one would wait forever for threads that do not exist here."""


class _Debug:
    """The logger of librdkafka; its errors are logged as debug, because answers carry the same reasons."""

    _log = logging.getLogger("relaybox.kafka")

    def log(self, _level: int, text: str, *values: object) -> None:
        self._log.debug(text, *values)


class KafkaProducer:
    """One producer, in one event loop of one process; make another when it is ``broken``."""

    def __init__(self, address: Address, configuration: Mapping[str, Any], timeout: float) -> None:
        self.broken: Retry | Unavailable | None = None
        self.reports: list[tuple[Sent, KafkaError | None]] = []
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._brokers = Brokers(address, timeout)
        self._under_way: dict[Sent, None] = {}
        self._lively = self._loop.time() + LIVELY
        self._ending: threading.Thread | None = None
        own = {"error_cb": self._notice, "logger": _Debug()}
        try:
            self._producer: Producer | None = Producer({**configuration, **own})
        except KafkaException as error:
            raise Unavailable(f"no producer: {text_of(error.args[0])}") from None
        self._timer = self._loop.call_later(SOON, self._look)

    @property
    def usable(self) -> bool:
        """True if messages can be handed to this producer from this process and event loop."""
        return self.broken is None and self._pid == os.getpid() and self._loop is asyncio.get_running_loop()

    def produce(self, sent: Sent, topic: str, value: bytes, key: str | None, headers: Headers) -> None:
        """Hand over a message; if this raises, the message is not in progress."""
        if self._producer is None:
            raise self.broken or Retry("the sink is closed")
        sent.producer, sent.end = self, self._loop.time() + self._timeout
        try:
            self._producer.produce(topic, value, key, on_delivery=sent, headers=headers)
        except KafkaException as error:
            if is_fatal(error.args[0]):
                self.give_up(self._brokers.stopped(error.args[0]))
            raise
        if not self._under_way:
            self._lively = sent.end - self._timeout + LIVELY
            self._look_in(SOON)
        self._under_way[sent] = None

    async def ask(self, topic: str | None) -> None:
        """Reach the brokers, and find the topic if one is given; raise ``Unavailable``."""
        began = self._loop.time()
        while self._producer is not None:
            asking = asyncio.to_thread(_list_topics, self._producer, topic, min(A_LOOK, self._timeout))
            try:
                found = await asking
            except KafkaException as error:
                if self._loop.time() >= began + self._timeout:
                    raise self._brokers.late(error.args[0]) from None
                continue
            self._brokers.worked = True
            missing = None if topic is None else found.topics[topic].error
            if topic is None or missing is None:
                return
            if self._loop.time() >= began + min(IN_THE_MAKING, self._timeout / 2):
                raise classify(missing, topic)
            # The broker may still be creating it.
            await asyncio.sleep(A_LOOK / 5)
        raise self.broken or Unavailable("the sink is closed")

    async def close(self) -> None:
        """Give up everything, and wait a few seconds for librdkafka's threads."""
        self.give_up(Retry(f"the delivery to {self._brokers.where} was given up: the sink is closed"))
        if self._ending is not None:
            await asyncio.to_thread(self._ending.join, LONGEST_END)

    def give_up(self, answer: Retry | Unavailable) -> None:
        """Stop using this producer, and answer all its messages with ``answer``."""
        if self.broken is not None:
            return
        self.broken = answer
        self._timer.cancel()
        messages, self._under_way = self._under_way, {}
        producer, self._producer = self._producer, None
        if self._pid != os.getpid():
            _inherited.append(producer)
            return
        # Ending may block on a DNS lookup, so a thread does it. That thread must hold the last reference.
        self._ending = threading.Thread(target=_end, args=[producer], name="relaybox-kafka", daemon=True)
        del producer
        self._ending.start()
        for sent in messages:
            sent.landed(answer)

    def _look_in(self, seconds: float) -> None:
        self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Poll for delivery reports, record answers, and give up a producer that cannot continue."""
        if self._producer is None:
            return
        waiting = IDLE
        try:
            self._producer.poll(0)
            reports, self.reports = self.reports, []
            late = self._take_in(reports) | self._expire()
            if (hopeless := self._brokers.hopeless(late=late)) is not None:
                self.give_up(hopeless)
            elif self._under_way:
                now = self._loop.time()
                if reports:
                    self._lively = now + LIVELY
                waiting = SOON if now < self._lively else LATER
        finally:
            if self.broken is None:
                self._look_in(waiting)

    def _take_in(self, reports: list[tuple[Sent, KafkaError | None]]) -> bool:
        """Record the answers of reports; return True if a message timed out."""
        late = False
        self._brokers.take_in([error for _, error in reports])
        for sent, error in reports:
            if sent not in self._under_way:
                continue
            del self._under_way[sent]
            if error is None:
                sent.landed(DELIVERED)
            elif error.code() in LATE:
                late = True
                sent.landed(self._brokers.late(error))
            else:
                if is_fatal(error):
                    self._notice(error)
                sent.refused(error)
        return late

    def _expire(self) -> bool:
        """Answer messages without a report in time; return True if any was late."""
        now, late = self._loop.time(), []
        for sent in self._under_way:
            if sent.end > now:
                break
            late.append(sent)
        for sent in late:
            del self._under_way[sent]
            sent.landed(self._brokers.late())
        return bool(late)

    def _notice(self, error: KafkaError) -> None:
        self._brokers.notice(error, len(self.reports))


def _list_topics(producer: Producer, topic: str | None, seconds: float) -> Any:
    return producer.list_topics(timeout=seconds) if topic is None else producer.list_topics(topic, seconds)


def _end(producer: Producer) -> None:
    with suppress(KafkaException):
        producer.purge()
        producer.flush(1.0)
