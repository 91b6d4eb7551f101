"""What a RabbitMQ sink is told, checked before anything is connected to."""

from __future__ import annotations

import re

import pytest

from relaybox.config import Destination
from relaybox.errors import ConfigError
from relaybox.parts import open_sink

SECRET = "hush-hush"


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("amqp://host?exchang=x", "no setting 'exchang'; did you mean 'exchange'"),
        ("amqp://host?exchange=", "write a text"),
        ("amqp://host?exchange=a%22b", "AMQP takes no such name"),
        ("amqp://host?routing_key={evnt_type}", "did you mean 'event_type'"),
        ("amqp://host?heartbeat=70000", "no more than 65534"),
        ("amqp://host?ca=/etc/ca.pem", "amqps://"),
        ("amqps://host?ca=/no/such/file", "/no/such/file"),
        ("amqp://u:hush-hush@host:port", "host:port"),
    ],
)
def test_a_setting_that_is_wrong_is_told_when_the_sink_is_made(url: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as raised:
        open_sink(Destination("shop", url), {})
    assert SECRET not in str(raised.value)
