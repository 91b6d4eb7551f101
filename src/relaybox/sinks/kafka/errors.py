"""What an error of Kafka, or of its client library, means for a delivery."""

from __future__ import annotations

from confluent_kafka import KafkaError

from relaybox.core.outcome import Reject, Retry, Unavailable, Unreachable
from relaybox.sinks.broker import Address
from relaybox.sinks.sink import clean

TOO_LARGE = frozenset((KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE))
OF_A_BATCH = TOO_LARGE | {KafkaError.INVALID_RECORD, KafkaError.INVALID_MSG}
"""A broker refuses a whole batch for one message in it."""
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
"""What a producer is told of a connection that could not be made, or broke."""
IN_TROUBLE = frozenset(
    (
        *(KafkaError.LEADER_NOT_AVAILABLE, KafkaError.NOT_LEADER_FOR_PARTITION),
        *(KafkaError.NOT_ENOUGH_REPLICAS, KafkaError.NOT_ENOUGH_REPLICAS_AFTER_APPEND),
        *(KafkaError.KAFKA_STORAGE_ERROR, KafkaError.REPLICA_NOT_AVAILABLE, KafkaError.REQUEST_TIMED_OUT),
        *(KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT, KafkaError._DESTROY, KafkaError._INVALID_ARG),
    )
)


def is_fatal(error: KafkaError) -> bool:
    """Whether the producer is of no use any more."""
    return error.fatal() or error.code() == KafkaError._FATAL


def text_of(error: KafkaError, address: Address) -> str:
    """What the library says, as one line without secrets."""
    return clean(error.str(), address.secrets) or str(error.name())


def classify(error: KafkaError, topic: str, address: Address) -> Retry | Reject | Unavailable:
    """The answer to a delivery that failed so, all by itself."""
    code, why = error.code(), f"topic {topic!r}: {text_of(error, address)}"
    if code in TOO_LARGE:
        return Reject(f"{why}: the message is over max.message.bytes of the topic, or of the broker")
    if code in OF_A_BATCH or code == KafkaError.TOPIC_EXCEPTION:
        return Reject(why)
    if code in MISSING:
        return Unavailable(f"{why}: create the topic, or mend the sink's URL")
    if code in AWAY:
        return Unreachable(why)
    if code in REFUSED or code in LATE or code in IN_TROUBLE or is_fatal(error):
        return Unavailable(why)
    return Retry(f"{why} ({error.name()})")
