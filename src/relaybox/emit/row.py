"""From a call of ``emit`` to the rows it writes: routing, checks and encoding, without a database."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import EllipsisType
from typing import Any, NamedTuple, TypedDict
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.codec import Limits, encode_headers, encode_payload
from relaybox.config import Destination, Settings
from relaybox.errors import InvalidField, PayloadError
from relaybox.routing import Routes, resolve
from relaybox.stores.dialects import Dialect

DEFAULT_MAX_ATTEMPTS = 5


class Call(msgspec.Struct, frozen=True):
    """The arguments of one ``emit``, for ``emit_many`` and for functions that make ordering keys."""

    aggregate_type: str
    aggregate_id: Any
    event_type: str
    payload: Any
    idempotency_key: str | None = None
    key: str | EllipsisType | None = ...
    headers: Mapping[str, Any] | None = None
    tenant: str | None = None
    max_attempts: int | None = None
    deliver_at: datetime | None = None
    destinations: Sequence[str] | None = None


class EmitOptions(TypedDict, total=False):
    """The optional arguments of ``emit``, as ``Call`` has them."""

    idempotency_key: str | None
    key: str | EllipsisType | None
    headers: Mapping[str, Any] | None
    tenant: str | None
    max_attempts: int | None
    deliver_at: datetime | None
    destinations: Sequence[str] | None


class Emission(NamedTuple):
    """One event as it will be written: a row for each destination, values in the order of ``INSERTED``."""

    event_id: UUID
    event_type: str
    idempotency_key: str | None
    destinations: tuple[str, ...]
    rows: list[tuple[Any, ...]]


class RowBuilder:
    """Builds rows by the routes, destinations and limits of one outbox."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._routes = Routes(settings.routes)
        self._destinations = {destination.name: destination for destination in settings.destinations}
        self._limits: dict[str, Limits] = {}

    def build(self, call: Call, dialect: Dialect) -> Emission:
        """The rows of one event; raises a typed error for whatever could not be stored."""
        limits = self._limits.get(dialect.name) or self._limit(dialect)
        aggregate = _text("aggregate_type", call.aggregate_type, 100), _aggregate_id(call.aggregate_id)
        event_type = _text("event_type", call.event_type, 100)
        if call.idempotency_key is not None:
            _text("idempotency_key", call.idempotency_key, 255)
        names = resolve(
            event_type, call.destinations, self._routes, self._destinations, self._settings.unrouted
        )
        payload = encode_payload(call.payload, limits)
        headers = _headers(call, limits)
        event_id = uuid7()
        own = dialect.to_uuid(event_id)
        deliver_at = None if call.deliver_at is None else _deliver_at(call.deliver_at, dialect)
        rows = []
        for name in names:
            destination = self._destinations.get(name)
            rows.append(
                (
                    own if name is names[0] else dialect.to_uuid(uuid7()),
                    own,
                    name,
                    *aggregate,
                    event_type,
                    *payload,
                    headers,
                    own_key(call, event_id)
                    if destination is None
                    else ordering_key(call, aggregate, destination),
                    call.idempotency_key or str(event_id),
                    _max_attempts(call, destination),
                    deliver_at,
                )
            )
        return Emission(event_id, event_type, call.idempotency_key, names, rows)

    def _limit(self, dialect: Dialect) -> Limits:
        limits = dataclasses.replace(dialect.limits, max_bytes=self._settings.max_payload)
        return self._limits.setdefault(dialect.name, limits)


def _text(field: str, value: Any, longest: int) -> str:
    if not isinstance(value, str):
        raise InvalidField(field, value, "it must be text")
    # Not all drivers know subclasses, and one may lie about itself.
    text: str = value if type(value) is str else str.__str__(value)
    if not text:
        raise InvalidField(field, text, "it must not be empty")
    if len(text) > longest:
        raise InvalidField(field, text, f"it has {len(text)} characters and may have at most {longest}")
    if not (text.isascii() and text.isprintable()) and not _storable(text):
        raise InvalidField(field, text, "it holds a NUL or a lone surrogate; remove it")
    return text


def _storable(value: str) -> bool:
    return "\0" not in value and not any("\ud800" <= character <= "\udfff" for character in value)


def _aggregate_id(value: Any) -> str:
    if isinstance(value, str):
        return _text("aggregate_id", value, 255)
    if isinstance(value, UUID):
        return UUID.__str__(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidField("aggregate_id", value, "give text, an integer or a UUID")
    value = int.__int__(value)
    # Beyond some thousand digits Python refuses to print an integer at all.
    if value.bit_length() > 800:
        seen = f"an integer of {value.bit_length()} bits"
        raise InvalidField("aggregate_id", seen, "it may have at most 240 digits")
    return str(value)


def _deliver_at(value: Any, dialect: Dialect) -> Any:
    if not isinstance(value, datetime):
        raise InvalidField("deliver_at", value, "give a datetime with a time zone")
    if value.tzinfo is None or _offset(value) is None:
        fix = "it has no time zone; write datetime.now(UTC) + … or add tzinfo=UTC"
        raise InvalidField("deliver_at", value, fix)
    try:
        moment = datetime.astimezone(value, UTC)
    except OverflowError:
        raise InvalidField("deliver_at", value, "it is outside the years that UTC can write") from None
    # Not all drivers know subclasses.
    return dialect.to_time(datetime.combine(datetime.date(moment), datetime.timetz(moment)))


def _offset(value: datetime) -> timedelta | None:
    try:
        return datetime.utcoffset(value)
    except Exception as error:
        problem = f"its time zone fails with {type(error).__name__}; give one such as UTC"
        raise InvalidField("deliver_at", value, problem) from error


def _headers(call: Call, limits: Limits) -> str:
    if call.headers is None and call.tenant is None:
        return "{}"
    try:
        headers = dict(call.headers) if isinstance(call.headers, Mapping) else call.headers or {}
    except Exception as error:
        raise PayloadError("headers", f"{type(error).__name__} while they were read; give a dict") from error
    if call.tenant is not None and isinstance(headers, dict):
        headers["tenant"] = _text("tenant", call.tenant, 255)
    return encode_headers(headers, limits)


def _max_attempts(call: Call, destination: Destination | None) -> int:
    if call.max_attempts is not None:
        if isinstance(call.max_attempts, bool) or not isinstance(call.max_attempts, int):
            raise InvalidField("max_attempts", call.max_attempts, "give a whole number, 1 or more")
        attempts = int.__int__(call.max_attempts)
        if not 1 <= attempts <= 2**31 - 1:
            raise InvalidField("max_attempts", call.max_attempts, "give a whole number, 1 or more")
        return attempts
    return DEFAULT_MAX_ATTEMPTS if destination is None else destination.max_attempts


def own_key(call: Call, event_id: UUID) -> str | None:
    """What is kept of ``key`` while no destination is known: null where it was left out.

    An event that asked for no order has a key that is no other's.
    """
    if call.key is ...:
        return None
    return str(event_id) if call.key is None else _fitting(_text("key", call.key, 10_000))


def ordering_key(call: Call, aggregate: tuple[str, str], destination: Destination) -> str | None:
    """The key under which this event is ordered at a destination; None: it needs no order there."""
    if not destination.ordered:
        return None
    key = call.key if call.key is not ... else _strategy_key(call, aggregate, destination)
    if key is None:
        return None
    if call.deliver_at is not None:
        fix = f"destination {destination.name!r} is ordered and would hold its key up; emit it when it is due"
        raise InvalidField("deliver_at", call.deliver_at, fix)
    return _fitting(_text("key", key, 10_000))


def _strategy_key(call: Call, aggregate: tuple[str, str], destination: Destination) -> str | None:
    match destination.ordering:
        case "aggregate":
            return ":".join(aggregate)
        case "event_type":
            return call.event_type
        case "tenant":
            if call.tenant is None:
                fix = f"destination {destination.name!r} is ordered by tenant; give tenant= or key="
                raise InvalidField("tenant", None, fix)
            return call.tenant
        case "none":
            return None
    return _function_key(call, destination.ordering)


def _function_key(call: Call, function: Callable[..., Any]) -> str | None:
    key = function(call)
    if key is not None and not isinstance(key, str):
        raise InvalidField("key", key, "the ordering function must return text or None")
    return key


def _fitting(key: str) -> str:
    """The key, or for one that is too long its beginning and a digest: two keys never become one."""
    if len(key) <= 255:
        return key
    return f"{key[:190]}#{hashlib.sha256(key.encode()).hexdigest()}"
