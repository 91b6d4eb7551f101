"""An event out of what a receiver got of it: the other side of ``envelope``.

Which ``format`` a body has is told by its content type and its fields. What the headers of a broker's message
say of the event goes before what the body says; under ``payload`` they say all there is, and of a webhook,
which has no such headers, neither the type nor the aggregate is known: both are empty.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple
from uuid import UUID

from msgspec import DecodeError, ValidationError, convert, json

from relaybox.core.event import Event
from relaybox.wire.envelope import BYTES, CLOUDEVENTS, JSON

CONTENT_TYPES = (JSON, CLOUDEVENTS, BYTES)

_JSON_FIELDS = {"id", "type", "timestamp", "aggregate_type", "aggregate_id"}
_FLAT_FIELDS = {"id", "type", "timestamp", "aggregate_id"}
_OURS = ("event-id", "event-type", "aggregate-type", "aggregate-id")


class Malformed(ValueError):
    """A message that holds no event; the text says what is wrong and shows nothing of it."""


class Received(NamedTuple):
    """A message as it arrived. ``message_id`` is the event's; ``sent_at`` stands in for an unknown time."""

    message_id: str
    body: bytes
    content_type: str
    headers: Mapping[str, str]
    sent_at: datetime
    attempt: int = 1


class _Content(NamedTuple):
    """What a body says."""

    payload: Any
    type: Any = ""
    aggregate_type: Any = ""
    aggregate_id: Any = ""
    timestamp: Any = None


def media_type(content_type: str) -> str:
    """The content type without its parameters."""
    return content_type.partition(";")[0].strip().lower()


def unpack(message: Received) -> Event:
    """The event that a message holds; raises ``Malformed``."""
    event_id = _event_id(message.message_id)
    content = _content(message, event_id)
    headers = message.headers
    return Event(
        event_id,
        headers.get("event-type") or _text(content.type, "type"),
        headers.get("aggregate-type") or _text(content.aggregate_type, "aggregate_type"),
        headers.get("aggregate-id") or _text(content.aggregate_id, "aggregate_id"),
        content.payload,
        {name: value for name, value in headers.items() if name not in _OURS},
        message.attempt,
        message.sent_at if content.timestamp is None else _moment(content.timestamp),
    )


def _event_id(text: str) -> UUID:
    if not text:
        raise Malformed("the message has no id")
    try:
        return UUID(text)
    except ValueError:
        raise Malformed("the message's id is no UUID") from None


def _content(message: Received, event_id: UUID) -> _Content:
    kind = media_type(message.content_type)
    if kind not in CONTENT_TYPES:
        raise Malformed(f"the content type is none of {', '.join(CONTENT_TYPES)}")
    if kind == BYTES:
        return _Content(message.body)
    try:
        body = json.decode(message.body)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        raise Malformed("the body is not JSON") from None
    if kind == CLOUDEVENTS:
        return _cloudevent(body, event_id)
    if not isinstance(body, dict) or not body.keys() >= _FLAT_FIELDS or body["id"] != str(event_id):
        return _Content(body)
    return _enveloped(body) if _is_json(body) else _flat(body)


def _is_json(body: dict[str, Any]) -> bool:
    return body.keys() in ({*_JSON_FIELDS, "data"}, {*_JSON_FIELDS, "data_base64"})


def _enveloped(body: dict[str, Any]) -> _Content:
    kind, key = body["aggregate_type"], body["aggregate_id"]
    return _Content(_payload(body), body["type"], kind, key, body["timestamp"])


def _flat(body: dict[str, Any]) -> _Content:
    own = body.keys() - _FLAT_FIELDS
    bare = own in ({"data"}, {"data_base64"})
    # Under ``data`` stands a payload that is no object: one that is would have its fields here.
    if bare and not isinstance(body.get("data"), dict):
        payload = _payload(body)
    else:
        payload = {name: value for name, value in body.items() if name in own}
    return _Content(payload, body["type"], "", body["aggregate_id"], body["timestamp"])


def _cloudevent(body: Any, event_id: UUID) -> _Content:
    if not isinstance(body, dict) or body.get("specversion") != "1.0":
        raise Malformed("the body is no CloudEvent of version 1.0")
    if body.get("id") != str(event_id):
        raise Malformed("the CloudEvent's id is not that of the message")
    kind, key = body.get("aggregatetype", ""), body.get("subject", "")
    return _Content(_payload(body), body.get("type"), kind, key, body.get("time"))


def _payload(body: dict[str, Any]) -> Any:
    if "data_base64" not in body:
        return body.get("data")
    try:
        return convert(body["data_base64"], bytes)
    except ValidationError:
        raise Malformed("data_base64 is not base64") from None


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise Malformed(f"{field} is no text")
    return value


def _moment(value: Any) -> datetime:
    try:
        moment = convert(value, datetime)
    except ValidationError:
        raise Malformed("the event's time is not written as RFC 3339 says") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
