"""Convert payloads and headers between Python values and what a row stores.

One pass checks a value and converts it to plain JSON types. Values that a database or a receiver would
refuse raise here, with their path, before the caller's transaction is touched.

``docs/how-to/emit.md`` lists the types. ``bytes`` are stored unchanged as a whole payload, and refused inside
JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from operator import attrgetter
from typing import Any, TypeAlias
from uuid import UUID

import msgspec

from relaybox.core.commands import Program
from relaybox.errors import PayloadError, shorten

BINARY = "binary"
"""The ``payload_encoding`` of a payload that is bytes."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what a database can store; ``max_depth`` counts nested arrays and objects.

    The default depth is half of Python's recursion limit, so a relay can decode deep in its own stack.
    """

    max_bytes: int = 1_048_576
    max_depth: int = 500
    min_int: int = -(2**63)
    max_int: int = 2**63 - 1


def encode_payload(value: Any, limits: Limits) -> tuple[str | None, bytes | None, str | None]:
    """Return ``(payload, payload_data, payload_encoding)`` for a row. Raise ``PayloadError``."""
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        _check_size(len(data), limits, "$")
        return None, data, BINARY
    return _encode(value, limits, "$"), None, None


def encode_headers(headers: Mapping[str, Any] | None, limits: Limits) -> str:
    """Return the headers as a JSON object. Raise ``PayloadError`` with a path from ``headers``."""
    if not headers:
        return "{}"
    if not isinstance(headers, Mapping):
        raise PayloadError("headers", f"{shorten(headers)} is not a mapping; give a dict of names and values")
    for name in headers:
        if not isinstance(name, str) or not name:
            raise PayloadError("headers", f"the name {shorten(name)} is refused; use a string, not empty")
    return _encode(headers, limits, "headers")


def decode(payload: str | bytes | None, payload_data: bytes | None, encoding: str | None) -> Any:
    """Return the payload that a row stores. Raise ``PayloadError`` if it does not decode."""
    if encoding == BINARY:
        return payload_data
    if encoding is not None:
        raise PayloadError(
            "$", f"this version does not know payload_encoding {encoding!r}; upgrade the relay"
        )
    if payload is None:
        return None
    try:
        return msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PayloadError("$", f"the stored payload does not decode: {error}") from error


class _Refused(Exception):
    """A refused value: the problem, and the steps of its path, innermost first."""

    def __init__(self, problem: str, *steps: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.steps = list(steps)

    def path(self, root: str) -> str:
        path = root + "".join(reversed(self.steps))
        return path if len(path) <= 120 else f"{path[:70]}…{path[-40:]}"


_Converter: TypeAlias = Callable[[Any, Limits, int], Any]


def _encode(value: Any, limits: Limits, root: str) -> str:
    try:
        plain = _converter(type(value))(value, limits, limits.max_depth)
        encoded = msgspec.json.encode(plain)
    except _Refused as refused:
        raise PayloadError(refused.path(root), refused.problem) from None
    except RecursionError:
        raise PayloadError(root, "it is nested deeper than Python's stack allows here; flatten it") from None
    except Exception as error:
        # Classes of the caller run here, and may raise anything.
        raise PayloadError(root, f"{type(error).__name__} while it was read; send plain values") from error
    _check_size(len(encoded), limits, root)
    return encoded.decode()


def _check_size(size: int, limits: Limits, root: str) -> None:
    if size > limits.max_bytes:
        problem = f"{size:,} bytes is over the limit of {limits.max_bytes:,} bytes"
        fix = f"send a reference to the data, or raise {Program.max_payload}"
        raise PayloadError(root, f"{problem}; {fix}")


def _same(value: Any, limits: Limits, room: int) -> Any:
    return value


def _text(value: str, limits: Limits, room: int) -> str:
    return value if value.isascii() and "\0" not in value else _unusual_text(value)


def _unusual_text(value: str) -> str:
    if "\0" in value:
        raise _Refused(f"{shorten(value)} holds a NUL character, which databases refuse; remove it")
    try:
        value.encode()
    except UnicodeEncodeError:
        problem = f"{shorten(value)} holds a lone surrogate, which is not valid Unicode"
        raise _Refused(f"{problem}; decode it with errors='replace' where it is read") from None
    return value


def _integer(value: int, limits: Limits, room: int) -> int:
    if limits.min_int <= value <= limits.max_int:
        return value
    bits = value.bit_length()
    # Python refuses to print integers of more than a few thousand digits.
    seen = str(value) if bits <= 200 else f"an integer of {bits} bits"
    raise _Refused(f"{seen} is outside {limits.min_int} to {limits.max_int}; send it as a string")


def _float(value: float, limits: Limits, room: int) -> float:
    if math.isfinite(value):
        return value
    raise _Refused(f"JSON cannot hold {value!r}; send None or a string")


def _decimal(value: Decimal, limits: Limits, room: int) -> str:
    if value.is_finite():
        return str(value)
    raise _Refused(f"{value!r} is not a number; send None or a string")


def _datetime(value: datetime, limits: Limits, room: int) -> str:
    if value.utcoffset() is None:
        raise _Refused(f"{value!r} has no timezone; give it one, such as tzinfo=timezone.utc")
    text = value.isoformat()
    return f"{text[:-6]}Z" if text.endswith("+00:00") else text


def _isoformat(value: date | time, limits: Limits, room: int) -> str:
    return value.isoformat()


def _duration(value: timedelta, limits: Limits, room: int) -> str:
    sign, span = ("-", -value) if value.days < 0 else ("", value)
    minutes, seconds = divmod(span.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{span.microseconds:06d}" if span.microseconds else ""
    return f"{sign}P{span.days}DT{hours:02d}H{minutes:02d}M{seconds:02d}{fraction}S"


def _string(value: Any, limits: Limits, room: int) -> str:
    return str(value)


def _bytes(value: Any, limits: Limits, room: int) -> Any:
    kind = type(value).__name__
    raise _Refused(f"{kind} cannot stand inside JSON; send base64 text, or bytes as the whole payload")


def _array(value: Iterable[Any], limits: Limits, room: int) -> list[Any]:
    if not room:
        raise _too_deep(limits)
    plain: list[Any] = []
    for item in value:
        convert = _EXACT.get(type(item)) or _converter(type(item))
        try:
            plain.append(convert(item, limits, room - 1))
        except _Refused as refused:
            refused.steps.append(f"[{len(plain)}]")
            raise
    return plain


def _object(value: Mapping[Any, Any], limits: Limits, room: int) -> dict[str, Any]:
    if not room:
        raise _too_deep(limits)
    plain: dict[str, Any] = {}
    for key, item in value.items():
        name = key if type(key) is str and key.isidentifier() else _key(key, limits)
        if name in plain:
            raise _Refused(f"the key {shorten(key)} stands there twice, once as another type; keep one")
        convert = _EXACT.get(type(item)) or _converter(type(item))
        try:
            plain[name] = convert(item, limits, room - 1)
        except _Refused as refused:
            refused.steps.append(_step(name))
            raise
    return plain


def _too_deep(limits: Limits) -> _Refused:
    return _Refused(f"it is nested more than {limits.max_depth} levels deep (or holds itself); flatten it")


def _key(key: Any, limits: Limits) -> str:
    bare = key.value if isinstance(key, Enum) else key
    if isinstance(bare, bool) or not isinstance(bare, str | int | UUID | date):
        kind = type(key).__name__
        raise _Refused(f"the key {shorten(key)} is of type {kind}, and JSON's are text; use a string")
    if isinstance(bare, int):
        return int.__repr__(bare)
    try:
        return str(_converter(type(bare))(bare, limits, 0))
    except _Refused as refused:
        raise _Refused(f"the key {refused.problem}", _step(str(bare))) from None


def _step(name: str) -> str:
    if name.isidentifier():
        return f".{name}"
    short = name if len(name) <= 40 else f"{name[:39]}…"
    return f"[{json.dumps(short, ensure_ascii=not short.isprintable())}]"


def _by_fields(fields: Callable[[Any], Any]) -> _Converter:
    """Return a converter for objects that ``fields`` opens one level deep."""

    def convert(value: Any, limits: Limits, room: int) -> Any:
        try:
            opened = fields(value)
        except RecursionError:
            # Reported for the whole value: the object that was read last is not the cause.
            raise
        except Exception as error:
            raise _Refused(f"{_kind(value)} did not give its fields: {error}") from error
        return _converter(type(opened))(opened, limits, room)

    return convert


def _named_fields(value: Any, fields: Iterable[Any]) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields}


def _struct_fields(value: msgspec.Struct) -> dict[str, Any] | list[Any]:
    """Return the fields as msgspec names them, one level deep: its own conversion would lose the path."""
    config, kind = value.__struct_config__, type(value)
    values = [getattr(value, name) for name in kind.__struct_fields__]
    if config.array_like:
        return values if config.tag is None else [config.tag, *values]
    required = len(values) - len(kind.__struct_defaults__)
    defaults = (msgspec.NODEFAULT,) * required + kind.__struct_defaults__
    tag = {} if config.tag is None else {str(config.tag_field): config.tag}
    return tag | {
        name: item
        for name, item, default in zip(kind.__struct_encode_fields__, values, defaults, strict=True)
        if item is not msgspec.UNSET and not (config.omit_defaults and _is_default(item, default))
    }


def _is_default(item: Any, default: Any) -> bool:
    made = type(item) in (list, dict, set) and getattr(default, "factory", None) is type(item)
    return item is default or (made and not item)


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__module__}.{type(value).__qualname__}"


_EXACT: dict[type, _Converter] = {
    type(None): _same,
    bool: _same,
    int: _integer,
    float: _float,
    str: _text,
    dict: _object,
    list: _array,
    tuple: _array,
    set: _array,
    frozenset: _array,
    datetime: _datetime,
    date: _isoformat,
    time: _isoformat,
    timedelta: _duration,
    Decimal: _decimal,
    UUID: _string,
    bytes: _bytes,
    bytearray: _bytes,
    memoryview: _bytes,
}


def _unwrapped(builtin: Callable[[Any], Any], convert: _Converter) -> _Converter:
    """Return a converter for a builtin's subclasses that ignores what they override, such as ``__str__``."""
    return lambda value, limits, room: convert(builtin(value), limits, room)


# The order matters: an Enum may also be an int, and every datetime is a date.
_SUBCLASSES: tuple[tuple[type, _Converter], ...] = (
    (Enum, _by_fields(attrgetter("value"))),
    (msgspec.Struct, _by_fields(_struct_fields)),
    (str, _unwrapped(str.__str__, _text)),
    (int, _unwrapped(int.__int__, _integer)),
    (float, _unwrapped(float.__float__, _float)),
    (datetime, _datetime),
    *((kind, _EXACT[kind]) for kind in (date, time, timedelta, Decimal, UUID, bytes, bytearray)),
)


def _find_converter(kind: type) -> _Converter:
    if kind in _EXACT:
        return _EXACT[kind]
    for base, convert in _SUBCLASSES:
        if issubclass(kind, base):
            return convert
    if found := _model_converter(kind) or _django_converter(kind):
        return found
    if issubclass(kind, Mapping):
        return _object
    return _array if issubclass(kind, list | tuple | set | frozenset) else _UNKNOWN


_converter: Callable[[type], _Converter] = functools.lru_cache(maxsize=1024)(_find_converter)


def _model_converter(kind: type) -> _Converter | None:
    """Recognize pydantic and attrs by their attributes, so that neither must be installed."""
    if hasattr(kind, "model_dump"):
        return _by_fields(lambda value: value.model_dump())
    if dataclasses.is_dataclass(kind):
        return _by_fields(lambda value: _named_fields(value, dataclasses.fields(value)))
    if hasattr(kind, "__attrs_attrs__"):
        return _by_fields(lambda value: _named_fields(value, type(value).__attrs_attrs__))
    return _string if hasattr(kind, "unicode_string") else None


def _refuser(fix: str) -> _Converter:
    """Return a converter that refuses values for which no JSON form is a safe guess."""

    def refuse(value: Any, limits: Limits, room: int) -> Any:
        raise _Refused(f"{_kind(value)} cannot be written as JSON; {fix}")

    return refuse


_UNKNOWN = _refuser("send a dict, a dataclass or text made from it")
_QUERY = _refuser("send a list of what receivers need, such as list(queryset.values('id', 'name'))")
_DJANGO: dict[str, _Converter] = {
    "django.utils.functional.Promise": _by_fields(str),
    "django.db.models.base.Model": _refuser("send a dict of the fields that receivers need, or its pk"),
    "django.db.models.query.QuerySet": _QUERY,
    "django.db.models.query.RawQuerySet": _QUERY,
}


def _django_converter(kind: type) -> _Converter | None:
    """Recognize Django's classes by the names of their bases, so that Django need not be installed."""
    names = (f"{base.__module__}.{base.__qualname__}" for base in kind.__mro__)
    return next((_DJANGO[name] for name in names if name in _DJANGO), None)
