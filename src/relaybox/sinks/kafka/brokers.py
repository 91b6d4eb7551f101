"""What librdkafka reports of its brokers, and the answers that its errors stand for."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from confluent_kafka import KafkaError

from relaybox.core.outcome import Reject, Retry, Unavailable, Unreachable
from relaybox.sinks.broker import Address
from relaybox.sinks.sink import clean

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
