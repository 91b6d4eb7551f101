"""Build the rows of a call of ``emit``: route, check and encode, without a database."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from types import EllipsisType
from typing import Any, NamedTuple, TypeAlias, TypedDict
from uuid import UUID

import msgspec
from uuid_utils.compat import uuid7

from relaybox.core.event import beside
from relaybox.core.ordering import fitting
from relaybox.core.rollout import mark
from relaybox.core.routing import UNROUTED, Routes, resolve
from relaybox.core.settings import Destination, Settings, needs_postgresql
from relaybox.core.text import id_field, text_field
from relaybox.database.dialects import Dialect
from relaybox.errors import EmitError, InvalidField, PayloadError, did_you_mean, shorten
from relaybox.wire.codec import Limits, encode_headers, encode_payload
from relaybox.wire.tracing import current

DEFAULT_MAX_ATTEMPTS = 5
RESERVED = "relaybox-"
"""How the names of headers begin that decide what a relay does with a delivery."""


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


class MarkedCall(Call, frozen=True):
    """A call of Relaybox itself: ``marks`` are headers that callers of ``emit`` may not give."""

    marks: Mapping[str, str] = {}


Calls: TypeAlias = Iterable[Call | Mapping[str, Any]]


def as_calls(calls: Calls) -> list[Call]:
    """Return each as a ``Call``; raise ``InvalidField``."""
    if isinstance(calls, Call | Mapping | str | bytes) or not isinstance(calls, Iterable):
        raise InvalidField("calls", calls, "give a list of Call objects")
    return [call if isinstance(call, Call) else _as_call(number, call) for number, call in enumerate(calls)]


def _as_call(number: int, call: Any) -> Call:
    place = f"calls[{number}]"
    if not isinstance(call, Mapping):
        raise InvalidField(place, call, "give Call objects, or mappings of emit's arguments")
    for name in call:
        if name not in Call.__struct_fields__:
            problem = f"emit has no argument {name!r}"
            raise InvalidField(place, call, problem + did_you_mean(str(name), Call.__struct_fields__))
    try:
        return Call(**call)
    except TypeError as error:
        raise InvalidField(place, call, str(error)) from None


class EmitOptions(TypedDict, total=False):
    """The optional arguments of ``emit``."""

    idempotency_key: str | None
    key: str | EllipsisType | None
    headers: Mapping[str, Any] | None
    tenant: str | None
    max_attempts: int | None
    deliver_at: datetime | None
    destinations: Sequence[str] | None


class Emission(NamedTuple):
    """One event as rows of ``INSERTED``, one for each destination; ``handed_over`` are final at once."""

    event_id: UUID
    event_type: str
    idempotency_key: str | None
    destinations: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    handed_over: Sequence[tuple[Any, ...]] = ()


class RowBuilder:
    """Builds rows by the routes, destinations and limits of one outbox."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.routes = Routes(settings.routes)
        self._destinations = {destination.name: destination for destination in settings.destinations}
        self.handed_over = frozenset(name for name, one in self._destinations.items() if one.handed_over)
        self._limits: dict[str, Limits] = {}

    def build_all(self, calls: Sequence[Call], dialect: Dialect, many: bool) -> list[Emission]:
        """Return the rows of each call; with ``many``, an error names its call."""
        emissions = []
        for number, call in enumerate(calls):
            try:
                emissions.append(self.build(call, dialect))
            except EmitError as error:
                if many:
                    error.args = (f"calls[{number}]: {error}",)
                raise
        return emissions

    def build(self, call: Call, dialect: Dialect) -> Emission:
        """Return the rows of one event; raise a typed error if something cannot be stored."""
        limits = self._limits.get(dialect.name) or self._limit(dialect)
        aggregate = (
            text_field("aggregate_type", call.aggregate_type, 100),
            id_field("aggregate_id", call.aggregate_id),
        )
        event_type = text_field("event_type", call.event_type, 100)
        if call.idempotency_key is not None:
            text_field("idempotency_key", call.idempotency_key, 255)
        names = resolve(
            event_type, call.destinations, self.routes, self._destinations, self._settings.unrouted
        )
        shadowed: tuple[str, ...] = ()
        if self.routes.gradual and call.destinations is None and names != (UNROUTED,):
            names, shadowed = self.routes.narrow(event_type, aggregate[1])
        payload = encode_payload(call.payload, limits)
        headers = _headers(call, limits)
        event_id = uuid7()
        own = dialect.to_uuid(event_id)
        deliver_at = None if call.deliver_at is None else _deliver_at(call.deliver_at, dialect)
        rows: list[tuple[Any, ...]] = []
        final: list[tuple[Any, ...]] = []
        for number, name in enumerate(names):
            destination = self._destinations.get(name)
            if destination is not None and name in self.handed_over:
                if dialect.name != "postgresql":
                    raise needs_postgresql(destination, dialect.name)
                check_payload(payload[0], destination)
            (final if name in self.handed_over else rows).append(
                (
                    own if number == 0 else dialect.to_uuid(beside(event_id, number)),
                    own,
                    name,
                    *aggregate,
                    event_type,
                    *payload,
                    mark(headers) if name in shadowed else headers,
                    own_key(call, event_id)
                    if destination is None
                    else ordering_key(call, aggregate, destination),
                    call.idempotency_key or str(event_id),
                    _max_attempts(call, destination),
                    deliver_at,
                )
            )
        return Emission(event_id, event_type, call.idempotency_key, names, rows, final)

    def _limit(self, dialect: Dialect) -> Limits:
        limits = dataclasses.replace(dialect.limits, max_bytes=self._settings.max_payload)
        return self._limits.setdefault(dialect.name, limits)


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
    # Some drivers do not accept subclasses of datetime.
    return dialect.to_time(datetime.combine(datetime.date(moment), datetime.timetz(moment)))


def _offset(value: datetime) -> timedelta | None:
    try:
        return datetime.utcoffset(value)
    except Exception as error:
        problem = f"its time zone fails with {type(error).__name__}; give one such as UTC"
        raise InvalidField("deliver_at", value, problem) from error


def _headers(call: Call, limits: Limits) -> str:
    context = current()
    marks = call.marks if isinstance(call, MarkedCall) else {}
    if call.headers is None and call.tenant is None and not context and not marks:
        return "{}"
    try:
        headers = dict(call.headers) if isinstance(call.headers, Mapping) else call.headers or {}
    except Exception as error:
        raise PayloadError("headers", f"{type(error).__name__} while they were read; give a dict") from error
    if isinstance(headers, dict):
        for name in headers:
            if isinstance(name, str) and name.lower().startswith(RESERVED):
                problem = f"the name {shorten(name)} is refused: {RESERVED}* are Relaybox's own"
                fix = "pass only your own headers on, such as traceparent, or use another name"
                raise PayloadError("headers", f"{problem}; {fix}")
        if call.tenant is not None:
            headers["tenant"] = text_field("tenant", call.tenant, 255)
        if context and "traceparent" not in headers:
            headers = {**context, **headers}
        headers.update(marks)
    return encode_headers(headers, limits)


def _max_attempts(call: Call, destination: Destination | None) -> int:
    given = call.max_attempts
    if given is None:
        return DEFAULT_MAX_ATTEMPTS if destination is None else destination.max_attempts
    if isinstance(given, bool) or not isinstance(given, int) or not 1 <= int.__int__(given) <= 2**31 - 1:
        raise InvalidField("max_attempts", given, "give a whole number, 1 or more")
    return int.__int__(given)


def own_key(call: Call, event_id: UUID) -> str | None:
    """Return the key to store without a destination: None if left out, a unique one for ``key=None``."""
    if call.key is ...:
        return None
    return str(event_id) if call.key is None else fitting(text_field("key", call.key, 10_000))


def ordering_key(call: Call, aggregate: tuple[str, str], destination: Destination) -> str | None:
    """Return the key that orders this event at a destination, or None; for Debezium, the message's key."""
    if destination.handed_over:
        return _message_key(call, aggregate, destination)
    if not destination.ordered:
        return None
    key = call.key if call.key is not ... else _strategy_key(call, aggregate, destination)
    if key is None:
        return None
    if call.deliver_at is not None:
        problem = f"destination {destination.name!r} is ordered, so later events of its key would wait for it"
        fix = "emit this event when it is due, or pass key=None if it needs no order"
        raise InvalidField("deliver_at", call.deliver_at, f"{problem}; {fix}")
    return fitting(text_field("key", key, 10_000))


def _message_key(call: Call, aggregate: tuple[str, str], destination: Destination) -> str | None:
    if call.deliver_at is not None:
        fix = f"destination {destination.name!r} is read by Debezium as soon as it is committed; emit it then"
        raise InvalidField("deliver_at", call.deliver_at, fix)
    # Kafka accepts no other characters, and a refused topic would stop the connector for good.
    if not re.fullmatch(r"[A-Za-z0-9._-]+", aggregate[0]):
        fix = f"destination {destination.name!r} makes a topic of it: use letters, digits, '.', '_' and '-'"
        raise InvalidField("aggregate_type", aggregate[0], fix)
    if call.key is not ...:
        key = call.key
    else:
        by_aggregate = destination.ordering == "aggregate"
        key = aggregate[1] if by_aggregate else _strategy_key(call, aggregate, destination)
    return None if key is None else fitting(text_field("key", key, 10_000))


def check_payload(payload: str | None, destination: Destination) -> None:
    """Raise ``PayloadError`` if Debezium's router would send the payload as nothing."""
    if payload is None:
        problem = f"destination {destination.name!r} is read by Debezium, which sends JSON; bytes need a sink"
        raise PayloadError("$", problem)


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
    key: Any = destination.ordering(call)
    if key is not None and not isinstance(key, str):
        raise InvalidField("key", key, "the ordering function must return text or None")
    return key
