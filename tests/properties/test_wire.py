"""Whatever is signed, verified or put into an envelope: an answer, or a typed error."""

from __future__ import annotations

import json
import math
from base64 import b64decode
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from random import Random
from typing import Any

import msgspec

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Retry
from relaybox.errors import ConfigError, PayloadError
from relaybox.testing.sink_contract import make_delivery
from relaybox.wire.codec import Limits, encode_headers, encode_payload
from relaybox.wire.envelope import event_of, packer
from relaybox.wire.signature import parse_keys, sign, verify
from tests.properties import values
from tests.properties.conftest import Feed
from tests.properties.values import REFUSED, depth, same
from tests.properties.volume import attempt, each

SECRETS = (
    *("whsec_c2VjcmV0IGtleSBmb3IgdGVzdHM=", "plain text", "whsk_" + "A" * 43),
    "whsec_c2VjcmV0 whsec_b3RoZXI=",
)
FORMATS: tuple[Any, ...] = ("json", "flat", "cloudevents", "payload", lambda event: event.payload)
NOW = 1_738_324_800


def test_signatures_and_envelopes_are_right_or_typed_errors(feed: Feed) -> None:
    feed("signatures and envelopes", each(lambda r: r.choice((signature, envelope, broken))(r)), size=100)


def signature(r: Random) -> None:
    """Check that a signature verifies, fails after a change, and only raises for a bad secret."""
    secret = _slip(r, r.choice(SECRETS)) if r.random() < 0.4 else r.choice(SECRETS)
    keys, error = attempt(lambda: parse_keys(secret), ConfigError)
    if keys is None:
        assert secret not in str(error) or len(secret) < 4
        return
    body, id_ = r.randbytes(r.choice((0, 1, 200))), values.text(r)
    signed = sign(keys, id_, NOW, body)
    headers: dict[Any, Any] = {"Webhook-Id": id_, "webhook-timestamp": str(NOW), "WEBHOOK-SIGNATURE": signed}
    if id_ == id_.strip() and "." not in id_ and any(key.sign is not None for key in keys):
        assert verify(body, headers, secret, now=NOW)
    name = r.choice(list(headers))
    headers[name] = r.choice(
        (_slip(r, headers[name]), r.randbytes(9), None, 5, values.bad_text(r), "v1,", "v1a,AAAA" * 99)
    )
    said = verify(r.choice((body, values.bad_text(r))), headers, secret, now=r.choice((NOW, math.nan, 1e30)))
    assert said is True or said is False


def _slip(r: Random, text: str) -> str:
    place = r.randint(0, len(text))
    return text[:place] + r.choice(("", "A", "=", " ", "é", "\0", "_", ",")) + text[place + r.randint(0, 1) :]


def envelope(r: Random) -> None:
    """Check that a stored payload is in the body byte for byte."""
    value, plain = values.value(r)
    headers, of_headers = values.value(r, 2)
    try:
        payload, data, _ = encode_payload(value, Limits())
        carried = encode_headers(headers if type(headers) is dict else {"traceparent": headers}, Limits())
    except PayloadError:
        assert (
            REFUSED in (plain, of_headers)
            or depth(plain) > 350
            or depth(of_headers) > 350
            or _odd_names(headers)
        )
        return
    delivery = msgspec.structs.replace(
        make_delivery(payload, data=data, headers=carried), created_at=_moment(r)
    )
    format = r.choice(FORMATS)
    packed = packer(format)(delivery)
    assert all(name.isascii() and text.isprintable() for name, text in packed.headers.items())
    if data is not None:
        assert packed.body == data or data in (b64decode(json.loads(packed.body)["data_base64"]),)
        return
    assert payload is not None
    if format != "flat" or not isinstance(plain, dict):
        assert payload.encode() in packed.body
    else:
        body = json.loads(packed.body)
        own = {"id", "type", "aggregate_id", "timestamp"}
        assert all(same(body[name], item) for name, item in plain.items() if name not in own)


def _odd_names(headers: Any) -> bool:
    return isinstance(headers, dict) and not all(isinstance(name, str) and name for name in headers)


def _moment(r: Random) -> datetime:
    zone = timezone(timedelta(hours=r.randint(-12, 14)))
    return r.choice(
        (datetime(2025, 1, 31, tzinfo=zone), datetime(1, 1, 2, tzinfo=UTC), datetime.max.replace(tzinfo=UTC))
    )


def broken(r: Random) -> None:
    """Check that a row that somebody edited becomes an envelope, or an error that a relay knows."""
    edits: dict[str, Any] = {
        "payload": r.choice(
            (None, "", "{", "nul", "[1,", '"\\ud800"', '"\ud800"', "1e999", "NaN", "[" * 5000, values.text(r))
        ),
        "payload_data": r.choice((None, b"", b"\xff\x00")),
        "payload_encoding": r.choice((None, None, "binary", "zstd", "", values.text(r))),
        "headers": r.choice(
            (
                *("", "[]", "5", "{", '{"traceparent": 5}', '{"relaybox-replay": "\\ud800"}'),
                *('{"traceparent"', "null"),
            )
        ),
        "event_type": r.choice((values.text(r), values.bad_text(r), "")),
        "aggregate_id": r.choice((values.text(r), "")),
        "attempts": r.choice((-5, 0, 2**31 - 1)),
    }
    chosen = {name: edits[name] for name in r.sample(list(edits), r.randint(1, 3))}
    delivery = msgspec.structs.replace(make_delivery(), **chosen)
    answered(lambda: packer(r.choice(FORMATS))(delivery), delivery)
    made = answered(lambda: event_of(delivery), delivery)
    assert made is None or isinstance(made, Event)


def answered(work: Callable[[], Any], delivery: Delivery) -> Any:
    """Return what it makes, or None if it raises an error that a sink turns into an answer."""
    made, error = attempt(work, PayloadError, Retry, UnicodeEncodeError)
    assert error is None or str(error)
    if isinstance(error, Retry):
        assert "payload_encoding" in error.reason
    if isinstance(error, UnicodeEncodeError):
        assert not (delivery.event_type + (delivery.payload or "")).isprintable()
    return made
