"""Wrap a librdkafka producer; track its messages, and what it reports of its brokers.

The event loop polls for delivery reports, every millisecond while messages are in progress: in another
thread, every report would wait for the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from confluent_kafka import KafkaError, KafkaException, Producer

from relaybox.core.outcome import Reject, Retry, Unavailable, Unreachable
from relaybox.sinks.broker import Address
from relaybox.sinks.sink import DELIVERED, clean

if TYPE_CHECKING:
    from relaybox.sinks.kafka.sink import Sent

FIRST_TRIES = 0.5
"""Seconds for which a new producer may fail to connect: a name's first address may be the wrong one."""
STALE = 2.0
"""Extra seconds for which a lost connection counts, because librdkafka reports it only now and then."""

# A leading underscore marks errors of librdkafka itself, not private names.
TOO_LARGE = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE))
OF_A_BATCH = TOO_LARGE | {KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG}
"""Errors for which a broker refuses a whole batch because of one message."""
LATE = frozenset((KafkaError._MSG_TIMED_OUT, KafkaError._TIMED_OUT, KafkaError._TIMED_OUT_QUEUE))
MISSING = frozenset(
    (
        *(KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION),
        *(KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.UNKNOWN_TOPIC_ID),
    )
)
AWAY = frozenset(
    (
        *(KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE, KafkaError._SSL),
        *(KafkaError.NETWORK_EXCEPTION, KafkaError.BROKER_NOT_AVAILABLE),
    )
)
REFUSED = frozenset(
    (
        *(KafkaError._AUTHENTICATION, KafkaError.SASL_AUTHENTICATION_FAILED),
        *(KafkaError.UNSUPPORTED_SASL_MECHANISM, KafkaError.ILLEGAL_SASL_STATE),
        *(KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED),
    )
)
NO_CONNECTION = REFUSED | {KafkaError._TRANSPORT, KafkaError._RESOLVE, KafkaError._SSL}
IN_TROUBLE = frozenset(
    (
        *(KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION),
        *(KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
        *(KafkaError.KAFKA_STORAGE_ERROR, KafkaError.REPLICA_NOT_AVAILABLE, KafkaError.REQUEST_TIMED_OUT),
        *(KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._DESTROY, KafkaError._INVALID_ARG),
    )
)


class Brokers:
    """The state of the connections of one producer, as far as it reports them."""

    def __init__(self, address: Address, timeout: float) -> None:
        self.where = ",".join(address.netlocs)
        self.worked = False
        """True if a broker has ever answered."""
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._began = self._loop.time()
        self._trouble: KafkaError | None = None
        self._fatal: KafkaError | None = None
        self._down_at = self._lost_at = -math.inf
        self._said_before = 0

    def notice(self, error: KafkaError, reports: int) -> None:
        """Take an error that came after this number of unread delivery reports."""
        if is_fatal(error):
            self._fatal = error
        elif error.code() == KafkaError._ALL_BROKERS_DOWN:
            self._down_at = self._lost_at = self._loop.time()
            self._said_before = reports
        else:
            self._trouble = error
            if error.code() in NO_CONNECTION:
                self._lost_at = self._loop.time()
                self._said_before = reports

    def take_in(self, reports: Sequence[KafkaError | None]) -> None:
        """Take the errors of delivery reports; None is a message that arrived."""
        # Reports from before the connection was lost do not show that it is back.
        said_before, self._said_before = self._said_before, 0
        if any(error is None for error in reports[said_before:]):
            self._down_at = self._lost_at = -math.inf
            self.worked, self._trouble = True, None

    def hopeless(self, *, late: bool) -> Unavailable | None:
        """Return why the producer cannot continue, or None; ``late``: a message was not answered in time."""
        if self._fatal is not None:
            return self.stopped(self._fatal)
        at_first = not self.worked and self._down_at > self._began + FIRST_TRIES
        return self._away() if self._down() and (late or at_first) else None

    def stopped(self, error: KafkaError) -> Unavailable:
        """Return the answer of a producer that stopped with a fatal error."""
        return Unavailable(f"the producer of {self.where} gave up: {text_of(error)}")

    def late(self, error: KafkaError | None = None) -> Unavailable:
        """Return the answer of a message that was not answered in time."""
        if self._down():
            return self._away()
        last = self._trouble or error
        more = "" if last is None else f": {text_of(last)}"
        return Unavailable(f"no answer from {self.where} within {self._timeout:g}s{more}")

    def _down(self) -> bool:
        """True if a connection was lost or refused lately (see ``STALE``), and nothing arrived since."""
        return self._loop.time() < self._lost_at + self._timeout + STALE

    def _away(self) -> Unavailable:
        if self._trouble is None:
            return Unreachable(f"no broker of {self.where} is there")
        kind = Unavailable if self._trouble.code() in REFUSED else Unreachable
        return kind(f"no broker of {self.where} is there: {text_of(self._trouble)}")


def is_fatal(error: KafkaError) -> bool:
    """True if the producer can no longer be used."""
    return error.fatal() or error.code() == KafkaError._FATAL


def text_of(error: KafkaError) -> str:
    """Return librdkafka's text as one line without secrets."""
    return clean(error.str()) or str(error.name())


def classify(error: KafkaError, topic: str) -> Retry | Reject | Unavailable:
    """Return the answer to a delivery that failed with this error."""
    code, why = error.code(), f"topic {topic!r}: {text_of(error)}"
    if code in TOO_LARGE:
        return Reject(f"{why}: the message is over max.message.bytes of the topic, or of the broker")
    if code in OF_A_BATCH or code == KafkaError.TOPIC_EXCEPTION:
        return Reject(why)
    if code in MISSING:
        return Unavailable(f"{why}: create the topic, or fix the sink's URL")
    if code in AWAY:
        return Unreachable(why)
    if code in REFUSED or code in LATE or code in IN_TROUBLE or is_fatal(error):
        return Unavailable(why)
    return Retry(f"{why} ({error.name()})")


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
