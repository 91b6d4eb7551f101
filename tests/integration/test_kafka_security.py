"""Brokers of Kafka that show a certificate, or ask for one, or for a user and a password."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from relaybox.config import Destination
from relaybox.outcome import Delivered, Unavailable, Unreachable
from relaybox.sinks.kafka import KafkaSink
from relaybox.testing.sink_contract import make_delivery
from tests.integration.kafka_log import make_user
from tests.integration.test_kafka_sink import broker, send, topic  # noqa: F401
from tests.servers import kafka

# ruff: noqa: F811


async def test_a_port_that_speaks_no_tls_is_unreachable(broker: kafka.Broker, topic: str) -> None:
    [answer] = await send(f"{broker.url}/{topic}?security=ssl", make_delivery(), timeout="10s")
    assert isinstance(answer, Unreachable)


async def test_a_broker_is_trusted_by_whom_its_certificate_is_signed(
    broker: kafka.Broker, topic: str, tmp_path: Path
) -> None:
    url, delivery = f"{broker.tls_url}/{topic}", make_delivery()
    assert await send(f"{url}?ca={broker.certificate}", delivery) == [Delivered()]
    kafka.certify(tmp_path / "other.pem", tmp_path / "keystore.pem")
    [answer] = await send(f"{url}?ca={tmp_path / 'other.pem'}", delivery, timeout="10s")
    assert isinstance(answer, Unreachable)
    assert "certificate" in answer.reason


async def test_a_user_with_the_right_password_is_let_in(broker: kafka.Broker, topic: str) -> None:
    sink = broker.sasl_url.replace("?", f"/{topic}?")
    assert await send(sink, make_delivery()) == [Delivered()]
    by_auth = sink.replace(f":{kafka.PASSWORD}@", "@")
    assert await send(by_auth, make_delivery(), auth=kafka.PASSWORD) == [Delivered()]


async def test_a_broker_may_ask_for_a_certificate(broker: kafka.Broker, topic: str) -> None:
    url, trusted = f"{broker.mutual_url}/{topic}", {"ca": str(broker.certificate)}
    own = {"certificate": str(broker.certificate), "key": str(broker.keystore)}
    assert await send(url, make_delivery(), options={**trusted, **own}) == [Delivered()]
    [answer] = await send(url, make_delivery(), options=trusted)
    assert isinstance(answer, Unreachable)


async def test_a_user_may_be_asked_by_scram(broker: kafka.Broker, topic: str) -> None:
    make_user(broker.bootstrap, "books", "s3cret")
    options = {"security": "sasl_plaintext", "mechanism": "SCRAM-SHA-256"}
    url = f"kafka://books@127.0.0.1:{broker.sasl_port}/{topic}"
    assert await send(url, make_delivery(), auth="s3cret", options=options) == [Delivered()]
    [answer] = await send(url, make_delivery(), auth="hunter2", options=options)
    assert type(answer) is Unavailable
    assert "uthentication" in answer.reason
    assert "hunter2" not in answer.reason


async def test_a_wrong_password_is_said_and_not_shown(
    broker: kafka.Broker, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    url = broker.sasl_url.replace("?", f"/{topic}?").replace(kafka.PASSWORD, "hunter2")
    sink = KafkaSink(Destination("shop", url, timeout="10s"))
    [answer] = await sink.send([make_delivery()])
    assert type(answer) is Unavailable
    assert "uthentication" in answer.reason
    with pytest.raises(Unavailable, match="uthentication"):
        await sink.check()
    await sink.close()
    assert "hunter2" not in f"{answer.reason}{sink!r}{caplog.text}"
