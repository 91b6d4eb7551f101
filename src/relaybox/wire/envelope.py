"""Pack a delivery into the body, content type and headers that a receiver gets, and unpack the event.

``docs/how-to/receive.md`` shows the bodies. Bytes are sent as base64 in ``data_base64`` instead of ``data``;
with ``payload`` they are the body. Stored JSON text is copied without decoding it.

``unpack`` recognizes the format by the content type and the fields of the body. Headers of a broker's message
override the body; with ``payload`` they are the only source. A webhook has no such headers, so the type and
aggregate of a ``payload`` webhook are empty.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote
from uuid import UUID

from msgspec import UNSET, DecodeError, Raw, Struct, UnsetType, ValidationError, convert, json

from relaybox.core.event import Delivery, Event
from relaybox.core.outcome import Retry
from relaybox.core.settings import Format
from relaybox.wire.codec import BINARY, Limits, decode, encode_payload

JSON = "application/json"
BYTES = "application/octet-stream"
CLOUDEVENTS = "application/cloudevents+json"
CONTENT_TYPES = (JSON, CLOUDEVENTS, BYTES)

_LONGEST_MARK = 200
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_TRACESTATE = re.compile(r"[!-~](?:[ -~]{0,510}[!-~])?")
_ENCODE = json.Encoder().encode


class Envelope(NamedTuple):
    """The body, content type and headers to send for one delivery."""

    body: bytes
    content_type: str
    headers: dict[str, str]


Pack: TypeAlias = Callable[[Delivery], Envelope]
"""Returns the envelope of a delivery; raises ``PayloadError`` if it cannot be written."""


def packer(format: Format | Callable[[Event], Any]) -> Pack:
    """Return the function that packs deliveries in this format."""
    if not isinstance(format, str):
        return lambda delivery: _by_function(format, delivery)
    return {"json": _json, "flat": _flat, "cloudevents": _cloudevents, "payload": _payload}[format]


def event_of(delivery: Delivery) -> Event:
    """Return the event as a handler sees it. Raise ``PayloadError`` if it does not decode."""
    if delivery.payload_encoding is not None:
        _check_encoding(delivery)
    return Event(
        delivery.event_id,
        delivery.event_type,
        delivery.aggregate_type,
        delivery.aggregate_id,
        decode(delivery.payload, delivery.payload_data, delivery.payload_encoding),
        {} if delivery.headers == "{}" else decode(delivery.headers, None, None),
        delivery.attempts,
        delivery.created_at,
    )


class _Json(Struct, gc=False):
    id: UUID
    type: str
    timestamp: datetime
    aggregate_type: str
    aggregate_id: str
    data: Raw | UnsetType
    data_base64: bytes | UnsetType


def _json(delivery: Delivery) -> Envelope:
    data, binary = _data(delivery)
    body = _Json(
        delivery.event_id,
        delivery.event_type,
        _timestamp(delivery),
        delivery.aggregate_type,
        delivery.aggregate_id,
        data,
        binary,
    )
    return Envelope(_ENCODE(body), JSON, _headers(delivery))


def _flat(delivery: Delivery) -> Envelope:
    """Put the payload's fields next to ours. Ours win, because receivers deduplicate by ``id``."""
    own = {
        "id": delivery.event_id,
        "type": delivery.event_type,
        "aggregate_id": delivery.aggregate_id,
        "timestamp": _timestamp(delivery),
    }
    data, binary = _data(delivery)
    if data is UNSET:
        fields: dict[str, Any] = {"data_base64": binary}
    else:
        try:
            fields = json.decode(data, type=dict[str, Raw])
        except DecodeError:
            fields = {"data": data}
    return Envelope(_ENCODE({**own, **fields, **own}), JSON, _headers(delivery))


class _CloudEvent(Struct, gc=False):
    specversion: str
    id: UUID
    source: str
    type: str
    subject: str
    time: datetime
    aggregatetype: str
    datacontenttype: str
    traceparent: str | UnsetType
    tracestate: str | UnsetType
    data: Raw | UnsetType
    data_base64: bytes | UnsetType


def _cloudevents(delivery: Delivery) -> Envelope:
    data, binary = _data(delivery)
    headers = _headers(delivery)
    body = _CloudEvent(
        "1.0",
        delivery.event_id,
        # CloudEvents requires a URI reference.
        f"/{quote(delivery.aggregate_type, safe='')}",
        delivery.event_type,
        delivery.aggregate_id,
        _timestamp(delivery),
        delivery.aggregate_type,
        BYTES if data is UNSET else JSON,
        headers.get("traceparent", UNSET),
        headers.get("tracestate", UNSET),
        data,
        binary,
    )
    return Envelope(_ENCODE(body), CLOUDEVENTS, headers)


def _payload(delivery: Delivery) -> Envelope:
    data, binary = _data(delivery)
    if isinstance(data, UnsetType):
        assert not isinstance(binary, UnsetType)
        return Envelope(binary, BYTES, _headers(delivery))
    return Envelope(bytes(data), JSON, _headers(delivery))


def _by_function(function: Callable[[Event], Any], delivery: Delivery) -> Envelope:
    # The default limit is for what a database stores; receivers have their own.
    text, data, _ = encode_payload(function(event_of(delivery)), Limits(max_bytes=1 << 40))
    if text is None:
        return Envelope(data or b"", BYTES, _headers(delivery))
    return Envelope(text.encode(), JSON, _headers(delivery))


def _data(delivery: Delivery) -> tuple[Raw | UnsetType, bytes | UnsetType]:
    if delivery.payload_encoding == BINARY:
        return UNSET, delivery.payload_data or b""
    _check_encoding(delivery)
    return Raw("null" if delivery.payload is None else delivery.payload), UNSET


def _check_encoding(delivery: Delivery) -> None:
    if delivery.payload_encoding not in (None, BINARY):
        # Retry: a newer emitter wrote it, and the next relay to claim it may be newer too.
        raise Retry(
            f"this version does not know payload_encoding {delivery.payload_encoding!r}; upgrade the relay"
        )


def _timestamp(delivery: Delivery) -> datetime:
    """Return the time in UTC, so that receivers see one notation for every database timezone."""
    created_at = delivery.created_at
    return created_at if not created_at.utcoffset() else created_at.astimezone(UTC)


class _Sent(Struct, gc=False, rename="kebab"):
    traceparent: str = ""
    tracestate: str = ""
    relaybox_replay: str = ""
    relaybox_dead_letter_from: str = ""
    relaybox_dead_letter_reason: str = ""


_decode_sent = json.Decoder(_Sent).decode
_MARKS = ("relaybox-replay", "relaybox-dead-letter-from", "relaybox-dead-letter-reason")


def _headers(delivery: Delivery) -> dict[str, str]:
    """Return the trace context and our marks; the application's headers could pass for the sender's."""
    if '"traceparent"' not in delivery.headers and '"relaybox-' not in delivery.headers:
        return {}
    try:
        sent = _decode_sent(delivery.headers)
    except DecodeError:
        return {}
    found = {name: _one_line(getattr(sent, name.replace("-", "_"))) for name in _MARKS}
    if _TRACEPARENT.fullmatch(sent.traceparent):
        found["traceparent"] = sent.traceparent
        if _TRACESTATE.fullmatch(sent.tracestate):
            found["tracestate"] = sent.tracestate
    return {name: value for name, value in found.items() if value}


def _one_line(text: str) -> str:
    return "".join(c if " " <= c <= "~" else "?" for c in text[:_LONGEST_MARK]).strip()


_FLAT_FIELDS = {"id", "type", "timestamp", "aggregate_id"}
_JSON_FIELDS = {*_FLAT_FIELDS, "aggregate_type"}
_OURS = ("event-id", "event-type", "aggregate-type", "aggregate-id")


class Malformed(ValueError):
    """A message without a valid event; the text says what is wrong, and quotes nothing of the message."""


class Received(NamedTuple):
    """A message as it arrived. ``message_id`` is the event's id; ``sent_at`` replaces a missing time."""

    message_id: str
    body: bytes
    content_type: str
    headers: Mapping[str, str]
    sent_at: datetime
    attempt: int = 1


def media_type(content_type: str) -> str:
    """Return the content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def unpack(message: Received) -> Event:
    """Return the event that a message holds. Raise ``Malformed``."""
    if not message.message_id:
        raise Malformed("the message has no id")
    try:
        event_id = UUID(message.message_id)
    except ValueError:
        raise Malformed("the message's id is not a UUID") from None
    payload, fields = _content(message, event_id)
    headers, timestamp = message.headers, fields.get("timestamp")
    return Event(
        event_id,
        headers.get("event-type") or _text(fields, "type"),
        headers.get("aggregate-type") or _text(fields, "aggregate_type"),
        headers.get("aggregate-id") or _text(fields, "aggregate_id"),
        payload,
        {name: value for name, value in headers.items() if name not in _OURS},
        message.attempt,
        message.sent_at if timestamp is None else _moment(timestamp),
    )


def _content(message: Received, event_id: UUID) -> tuple[Any, Mapping[str, Any]]:
    """Return the payload, and the fields of the body that are about the event."""
    kind = media_type(message.content_type)
    if kind not in CONTENT_TYPES:
        raise Malformed(f"the content type is not one of {', '.join(CONTENT_TYPES)}")
    if kind == BYTES:
        return message.body, {}
    try:
        body = json.decode(message.body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        raise Malformed("the body is not JSON") from None
    if kind == CLOUDEVENTS:
        return _cloudevent(body, event_id)
    if not isinstance(body, dict) or not body.keys() >= _FLAT_FIELDS or body["id"] != str(event_id):
        return body, {}
    if body.keys() in ({*_JSON_FIELDS, "data"}, {*_JSON_FIELDS, "data_base64"}):
        return _payload_of(body), body
    own, about = body.keys() - _FLAT_FIELDS, {name: body[name] for name in _FLAT_FIELDS}
    # A payload that is an object has its fields at this level; any other payload is under ``data``.
    if own in ({"data"}, {"data_base64"}) and not isinstance(body.get("data"), dict):
        return _payload_of(body), about
    return {name: value for name, value in body.items() if name in own}, about


def _cloudevent(body: Any, event_id: UUID) -> tuple[Any, Mapping[str, Any]]:
    if not isinstance(body, dict) or body.get("specversion") != "1.0":
        raise Malformed("the body is not a CloudEvent of version 1.0")
    if body.get("id") != str(event_id):
        raise Malformed("the CloudEvent's id is not that of the message")
    return _payload_of(body), {
        "type": body.get("type"),
        "aggregate_type": body.get("aggregatetype", ""),
        "aggregate_id": body.get("subject", ""),
        "timestamp": body.get("time"),
    }


def _payload_of(body: dict[str, Any]) -> Any:
    if "data_base64" not in body:
        return body.get("data")
    try:
        return convert(body["data_base64"], bytes)
    except ValidationError:
        raise Malformed("data_base64 is not base64") from None


def _text(fields: Mapping[str, Any], name: str) -> str:
    value = fields.get(name, "")
    if not isinstance(value, str):
        raise Malformed(f"{name} is not a string")
    return value


def _moment(value: Any) -> datetime:
    try:
        moment = convert(value, datetime)
    except ValidationError:
        raise Malformed("the event's time is not written as RFC 3339 says") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
