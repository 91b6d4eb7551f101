"""The kinds of sinks by URL scheme: the code that opens each, and the package it needs."""

from __future__ import annotations

from typing import NamedTuple


class SinkKind(NamedTuple):
    """``opens`` is the ``module:name`` to call with a destination; ``package`` comes with ``extra``."""

    opens: str
    package: str = ""
    extra: str = ""


_RABBITMQ = SinkKind("relaybox.sinks.rabbitmq.sink:RabbitMqSink", "aio_pika", "rabbitmq")
_REDIS = SinkKind("relaybox.sinks.redis:RedisSink", "redis", "redis")
_HTTP = SinkKind("relaybox.sinks.http.sink:HttpSink", "aiohttp", "http")
_MEILISEARCH = SinkKind("relaybox.search.meilisearch.engine:MeilisearchEngine", "aiohttp", "meilisearch")

SEARCH_ENGINES = {
    "meilisearch": _MEILISEARCH,
    "meilisearchs": _MEILISEARCH,
    "algolia": SinkKind("relaybox.search.algolia.engine:open_engine", "aiohttp", "algolia"),
    "opensearch": SinkKind("relaybox.search.opensearch.engine:OpenSearchEngine", "aiohttp", "opensearch"),
}
"""These open an engine; one sink wraps all of them."""

SINKS = {
    "http": _HTTP,
    "https": _HTTP,
    "kafka": SinkKind("relaybox.sinks.kafka.sink:KafkaSink", "confluent_kafka", "kafka"),
    "amqp": _RABBITMQ,
    "amqps": _RABBITMQ,
    "nats": SinkKind("relaybox.sinks.nats.sink:NatsSink", "nats", "nats"),
    "redis": _REDIS,
    "rediss": _REDIS,
    "sqs": SinkKind("relaybox.sinks.sqs.sink:SqsSink", "aiobotocore", "sqs"),
    "celery": SinkKind("relaybox.sinks.celery:CelerySink", "celery", "celery"),
    "console": SinkKind("relaybox.sinks.console:ConsoleSink"),
    "memory": SinkKind("relaybox.sinks.memory:MemorySink"),
}
"""Sinks that are opened with only their destination."""

SCHEMES = frozenset([*SINKS, *SEARCH_ENGINES, "handler", "debezium"])
