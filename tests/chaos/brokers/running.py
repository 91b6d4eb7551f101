"""Brokers by name, each a server of its own for as long as it is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib import import_module

from tests.chaos.brokers.base import Broker

BROKERS = ("redis", "nats", "rabbitmq", "kafka")
SINKS = tuple(f"relaybox.sinks.{broker}" for broker in BROKERS)
"""The modules that send to them."""


def running(name: str) -> AbstractContextManager[Broker]:
    """A server of this kind; entering raises ``tests.servers.base.Unavailable`` where it cannot be had."""
    module = import_module(f"tests.chaos.brokers.{name}")
    start: Callable[[], AbstractContextManager[Broker]] = module.running
    return start()
