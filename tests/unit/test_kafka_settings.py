"""What a Kafka destination's URL and options may say."""

from __future__ import annotations

from typing import Any

import pytest

from relaybox.config import Destination
from relaybox.errors import ConfigError
from relaybox.parts import open_sink
from relaybox.sinks.kafka_settings import KafkaSettings


@pytest.mark.parametrize(
    ("sink", "options", "message"),
    [
        ("kafka://h/x?comprssion=lz4", {}, "did you mean 'compression'"),
        ("kafka://h/x", {"options": {"lingr": "5ms"}}, "did you mean 'linger'"),
        ("kafka://h/x?compression=rar", {}, "choose 'none', 'gzip'"),
        ("kafka://h/x?linger=soon", {}, "linger = 'soon': write a duration"),
        ("kafka://h/x?linger=2h", {}, "no more than 60s"),
        ("kafka://h/x?max_message=10", {}, "from 1000 to"),
        ("kafka://h/x?max_message=many", {}, "write a size"),
        ("kafka://h/x?ca=/no/such/file", {}, "there is no such file"),
        ("kafka://h/x?security=sasl_ssl", {}, "needs a user and a password"),
        ("kafka://u:p@h/x?security=ssl", {}, "takes no user"),
        ("kafka://h/x?mechanism=PLAIN", {}, "there is no user"),
        (f"kafka://u:p@h/x?security=sasl_plaintext&ca={__file__}", {}, "uses no ca"),
        (f"kafka://h/x?certificate={__file__}", {}, "belong together"),
        ("kafka://h/a b", {}, "1 to 249 letters"),
        ("kafka://h/{tenant}/x", {}, "1 to 249 letters"),
        ("kafka://h/{agregate_type}", {}, "did you mean 'aggregate_type'"),
        ("kafka://", {}, "write host:port"),
        ("kafka://h/x?partitioner=random", {"ordered": True}, "would be in several partitions"),
        ("kafka://u:p@h/x", {"auth": "p"}, "keep one of them"),
    ],
)
def test_a_wrong_setting_is_refused_when_the_sink_is_made(
    sink: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sink(Destination("shop", sink, **options), {})


def test_credentials_go_over_tls_unless_it_says_otherwise() -> None:
    def protocol(sink: str) -> Any:
        configuration = KafkaSettings(Destination("shop", sink)).configuration
        return configuration["security.protocol"]

    assert protocol("kafka://h") == "PLAINTEXT"
    assert protocol("kafka://user:secret@h") == "SASL_SSL"
    assert protocol(f"kafka://h?ca={__file__}") == "SSL"
    assert protocol("kafka://user:secret@h?security=sasl_plaintext") == "SASL_PLAINTEXT"


def test_the_producer_gives_up_before_the_sink_does() -> None:
    for timeout in (0.001, 0.5, 3.0, 30.0, 86_400.0 * 60):
        destination = Destination("shop", "kafka://h?linger=0", timeout=timeout, lease=timeout + 1)
        configured = KafkaSettings(destination).configuration["message.timeout.ms"]
        assert 1 <= configured < max(timeout * 1000, 2)
