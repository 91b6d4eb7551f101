"""What a receiver gets, by format."""

from __future__ import annotations

import json
from base64 import b64encode
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Retry
from relaybox.errors import PayloadError
from relaybox.testing.sink_contract import make_delivery
from relaybox.wire.envelope import Envelope, event_of, packer

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FORMATS = ["json", "flat", "cloudevents", "payload"]


def make_with(**fields: Any) -> Delivery:
    return msgspec.structs.replace(make_delivery(), **fields)


def body(envelope: Envelope) -> Any:
    return json.loads(envelope.body)


def test_json_wraps_the_payload_and_flat_puts_it_beside_the_id() -> None:
    delivery = make_delivery()
    envelope = packer("json")(delivery)
    assert body(envelope) == {
        "id": str(delivery.event_id),
        "type": "order.paid",
        "timestamp": "2025-01-31T12:00:00.250000Z",
        "aggregate_type": "Order",
        "aggregate_id": "1",
        "data": {"total": 42},
    }
    assert (envelope.content_type, envelope.headers) == ("application/json", {})
    delivery = make_delivery('{"total": 42, "lines": [1, 2]}')
    assert body(packer("flat")(delivery)) == {
        "id": str(delivery.event_id),
        "type": "order.paid",
        "aggregate_id": "1",
        "timestamp": "2025-01-31T12:00:00.250000Z",
        "total": 42,
        "lines": [1, 2],
    }


@pytest.mark.parametrize("name", ["id", "type", "aggregate_id", "timestamp", "\\u0069d"])
def test_in_flat_a_payload_cannot_replace_what_receivers_deduplicate_by(name: str) -> None:
    delivery = make_delivery(f'{{"{name}": "forged", "total": 42}}')
    text = packer("flat")(delivery).body.decode()
    assert "forged" not in text
    assert json.loads(text) == body(
        packer("flat")(msgspec.structs.replace(delivery, payload='{"total": 42}'))
    )


@pytest.mark.parametrize("payload", ["[1, 2]", '"text"', "7", "null", "{}"])
def test_in_flat_a_payload_that_is_not_an_object_is_under_data(payload: str) -> None:
    seen = body(packer("flat")(make_delivery(payload)))
    assert seen.get("data", {}) == json.loads(payload)


def test_cloudevents_are_structured() -> None:
    delivery = make_delivery(headers=f'{{"traceparent": "{TRACEPARENT}"}}')
    envelope = packer("cloudevents")(delivery)
    assert body(envelope) == {
        "specversion": "1.0",
        "id": str(delivery.event_id),
        "source": "/Order",
        "type": "order.paid",
        "subject": "1",
        "time": "2025-01-31T12:00:00.250000Z",
        "aggregatetype": "Order",
        "datacontenttype": "application/json",
        "traceparent": TRACEPARENT,
        "data": {"total": 42},
    }
    assert envelope.content_type == "application/cloudevents+json"


def test_source_time_and_text_of_any_kind_are_written_well() -> None:
    delivery = make_with(aggregate_type="Große Bestellung/x")
    assert body(packer("cloudevents")(delivery))["source"] == "/Gro%C3%9Fe%20Bestellung%2Fx"
    local = datetime(2025, 1, 31, 12, 0, tzinfo=timezone(timedelta(hours=2)))
    delivery = make_with(created_at=local)
    assert body(packer("json")(delivery))["timestamp"] == "2025-01-31T10:00:00Z"
    delivery = make_with(aggregate_type='O"\\\n', aggregate_id="1, \x1f ü", event_type='a","id":"forged')
    seen = body(packer("json")(delivery))
    assert (seen["id"], seen["aggregate_type"]) == (str(delivery.event_id), 'O"\\\n')
    assert (seen["aggregate_id"], seen["type"]) == ("1, \x1f ü", 'a","id":"forged')


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    "payload", ['{"n": 1.10, "big": 123456789012345678901234567890, "s": "ü\\u00fc"}', "1.0", "null"]
)
def test_the_stored_text_is_sent_as_it_is(format: Any, payload: str) -> None:
    text = packer(format)(make_delivery(payload)).body.decode()
    for part in payload.strip("{}").split(", "):
        assert part.rpartition(": ")[2] in text


@pytest.mark.parametrize("format", ["json", "flat", "cloudevents"])
def test_bytes_are_base64(format: Any) -> None:
    seen = body(packer(format)(make_delivery(data=b"\x00\xff")))
    assert seen["data_base64"] == b64encode(b"\x00\xff").decode()
    assert "data" not in seen
    assert seen.get("datacontenttype", "application/octet-stream") == "application/octet-stream"


def test_a_bare_payload_is_the_body() -> None:
    assert packer("payload")(make_delivery()) == Envelope(b'{"total": 42}', "application/json", {})
    for data in (b"\x00\xff", b""):
        assert packer("payload")(make_delivery(data=data)) == Envelope(data, "application/octet-stream", {})


@dataclass
class Line:
    price: float


@pytest.mark.parametrize(
    ("made", "content", "content_type"),
    [
        ({"a": Line(1.5)}, b'{"a":{"price":1.5}}', "application/json"),
        ("text", b'"text"', "application/json"),
        (None, b"null", "application/json"),
        (b"\xff", b"\xff", "application/octet-stream"),
        (b"", b"", "application/octet-stream"),
    ],
)
def test_a_function_makes_the_body(made: Any, content: bytes, content_type: str) -> None:
    seen: list[Event] = []
    delivery = make_delivery(attempts=3)
    assert packer(lambda event: seen.append(event) or made)(delivery)[:2] == (content, content_type)
    assert seen == [event_of(delivery)]
    with pytest.raises(PayloadError, match=r"\$\.a"):
        packer(lambda event: {"a": object()})(delivery)


@pytest.mark.parametrize("format", [*FORMATS, lambda event: 1])
def test_the_trace_context_travels(format: Any) -> None:
    delivery = make_delivery(headers=f'{{"tenant": 7, "traceparent": "{TRACEPARENT}"}}')
    assert packer(format)(delivery).headers == {"traceparent": TRACEPARENT}


@pytest.mark.parametrize(
    "value",
    [
        '"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\\r\\nx-admin: 1"',
        *('"00-0AF7651916CD43DD8448EB211C80319C-b7ad6b7169203331-01"', '""', '"x"', "7", "null", '["a"]'),
        '{"traceparent": "x"}',
    ],
)
def test_an_invalid_trace_context_is_left_out(value: str) -> None:
    assert packer("json")(make_delivery(headers=f'{{"traceparent": {value}}}')).headers == {}


@pytest.mark.parametrize("format", [*FORMATS, lambda event: 1])
def test_an_encoding_of_a_newer_version_is_for_a_newer_relay(format: Any) -> None:
    delivery = msgspec.structs.replace(make_delivery(data=b"x"), payload_encoding="zstd")
    with pytest.raises(Retry, match="does not know payload_encoding 'zstd'; upgrade the relay"):
        packer(format)(delivery)


def test_an_event_is_what_was_emitted() -> None:
    delivery = make_delivery(headers='{"tenant": "acme"}', attempts=2)
    about = (delivery.event_id, "order.paid", "Order", "1", {"total": 42}, {"tenant": "acme"})
    assert event_of(delivery) == Event(*about, 2, delivery.created_at)
    assert event_of(make_delivery(data=b"\xff")).payload == b"\xff"
    assert event_of(make_delivery("null")).payload is None
    with pytest.raises(PayloadError, match="does not decode"):
        event_of(make_delivery("{"))


def test_a_replay_and_a_dead_letter_say_so_in_headers_of_one_line() -> None:
    headers = {
        "relaybox-replay": "01a1de11",
        "relaybox-dead-letter-from": "runner",
        "relaybox-dead-letter-reason": "500 Oops\r\nx-evil: 1 – " + "x" * 500,
        "authorization": "mine",
        "tenant": "acme",
    }
    sent = packer("json")(make_delivery(headers=json.dumps(headers))).headers
    assert sent.keys() == {"relaybox-replay", "relaybox-dead-letter-from", "relaybox-dead-letter-reason"}
    assert sent["relaybox-replay"] == "01a1de11"
    assert sent["relaybox-dead-letter-reason"].startswith("500 Oops??x-evil: 1 ? xxx")
    assert len(sent["relaybox-dead-letter-reason"]) == 200
