"""Parse what clients send: parameters, bodies, forms, times. Errors are 4xx problems."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypeVar
from urllib.parse import parse_qsl
from uuid import UUID

import msgspec
from starlette.datastructures import ImmutableMultiDict
from starlette.requests import Request

from relaybox.core.redact import Rules
from relaybox.core.values import parse_moment, parsed
from relaybox.errors import ConfigError, did_you_mean, shorten
from relaybox.stores.ledger import Filter
from relaybox.web.problems import Problem, invalid
from relaybox.web.schemas import Criteria

T = TypeVar("T", bound=msgspec.Struct)

LARGEST_BODY = 256 * 1024
SLOWEST_BODY = 10.0
"""Seconds for a body to arrive."""
DEEPEST = 20
MOST_PARAMETERS = 50

_MEANT_PLUS = re.compile(r"(T.*) (\d\d:?\d\d)$")
_AT = re.compile(r"(.*) - at `\$(?:\.(.*))?`")


def pairs(text: bytes, what: str) -> list[tuple[str, str]]:
    """Parse the names and values of a form or a query."""
    try:
        return parse_qsl(
            text.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=MOST_PARAMETERS
        )
    except ValueError:
        fix = f"write up to {MOST_PARAMETERS} of them, in UTF-8 and percent-encoded"
        raise Problem(400, f"The {what} cannot be read; {fix}.") from None


def query(request: Request, kind: type[T]) -> T:
    """Parse the query parameters; raise if one is given twice."""
    given: dict[str, str] = {}
    for name, value in pairs(request.scope.get("query_string", b""), "parameters"):
        if name in given:
            raise invalid(name[:100], "it is given twice; give it once")
        given[name] = value
    return _made(given, kind, "parameter", strict=False)


async def body(request: Request, kind: type[T]) -> T:
    """Parse the JSON body; an empty body is an empty object."""
    data = await whole_body(request)
    if not data.strip():
        return _made({}, kind, "field", strict=True)
    _check_type(request, "application/json")
    document = _json(data)
    if not isinstance(document, dict):
        raise Problem(422, f"The body is not an object but of type {type(document).__name__}; write {{…}}.")
    return _made(document, kind, "field", strict=True)


async def form(request: Request) -> ImmutableMultiDict[str, str]:
    """Parse the fields of a submitted form."""
    data = await whole_body(request)
    if data:
        _check_type(request, "application/x-www-form-urlencoded")
    fields = pairs(data, "form")
    for name, value in fields:
        if "\0" in value:
            raise invalid(name[:100], "it contains a NUL")
    return ImmutableMultiDict(fields)


async def whole_body(request: Request) -> bytes:
    """Return the body; raise if it is too large or too slow."""
    too_large = Problem(413, f"The body is longer than {LARGEST_BODY // 1024} KiB.")
    declared = request.headers.get("content-length", "0")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > LARGEST_BODY:
        raise too_large
    chunks, length = [], 0
    try:
        async with asyncio.timeout(SLOWEST_BODY):
            async for chunk in request.stream():
                chunks.append(chunk)
                length += len(chunk)
                if length > LARGEST_BODY:
                    raise too_large
    except TimeoutError:
        raise Problem(408, f"The body did not arrive within {SLOWEST_BODY:g} seconds.") from None
    return b"".join(chunks)


def identifier(text: str) -> UUID:
    """Parse an id in a path."""
    if (found := parsed(UUID, text)) is None:
        raise invalid("id", f"{shorten(text)} is not a UUID")
    return found


def moment(text: str | None, parameter: str, direction: int = -1) -> datetime | None:
    """Parse a time, or a duration from now; ``direction`` is -1 for the past and 1 for the future."""
    if text is None:
        return None
    # A plus sign that was not encoded arrives as a space.
    text = _MEANT_PLUS.sub(r"\1+\2", text)
    try:
        return parse_moment(text, parameter, direction)
    except ConfigError:
        fix = "write a time such as 2026-01-31T12:00:00Z, or a duration such as 30m, 1h or 7d"
        raise invalid(parameter, f"{shorten(text)} is neither a time nor a duration; {fix}") from None


def filter_of(given: Criteria, rules: Rules) -> Filter:
    """Return the filter for the criteria; it finds no errors by what the rules hide."""
    values: dict[str, Any] = {name: getattr(given, name) for name in Criteria.__struct_fields__}
    values["rules"] = None if given.error is None else rules
    return Filter(**values | {name: moment(values[name], name) for name in ("since", "until")})


def _made(given: Mapping[str, Any], kind: type[T], noun: str, *, strict: bool) -> T:
    known = kind.__struct_encode_fields__
    for name in given:
        if name not in known:
            raise invalid(name[:100], f"there is no such {noun}{_hint(name, known)}")
    try:
        return msgspec.convert(given, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _explained(error) from None


def _hint(name: str, known: tuple[str, ...]) -> str:
    if not known:
        return "; none is taken here"
    if "filter" in known and name in Criteria.__struct_fields__:
        return "; write it inside of filter"
    return did_you_mean(name, known)


def _explained(error: msgspec.ValidationError) -> Problem:
    message = " ".join(str(error).split())
    match = _AT.fullmatch(message)
    if match is None:
        return Problem(422, message)
    parameter = match[2] or "body"
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", match[1])
    if unknown and parameter == "filter":
        hint = did_you_mean(unknown[1], Criteria.__struct_fields__)
        return invalid(parameter, f"there is no such field as {shorten(unknown[1])}{hint}")
    return invalid(parameter, match[1])


def _check_type(request: Request, wanted: str) -> None:
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    charset = re.search(r"charset\s*=\s*\"?([^\s;\"]+)", parameters, re.IGNORECASE)
    if kind.strip().lower() != wanted:
        raise Problem(415, f"The body is taken as {wanted}, not as {shorten(kind.strip())}.")
    if charset and charset[1].lower() not in ("utf-8", "utf8"):
        raise Problem(415, f"The body is taken in UTF-8, not in {shorten(charset[1])}.")


def _json(data: bytes) -> Any:
    too_deep = Problem(400, f"The body is nested more than {DEEPEST} deep.")
    try:
        document = json.loads(data.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant)
        # Raises on a lone surrogate, which no database can store.
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        reason = str(error) if isinstance(error, json.JSONDecodeError | _Refused) else type(error).__name__
        raise Problem(400, f"The body is not JSON in UTF-8: {reason}.") from None
    level = [document]
    for _ in range(DEEPEST):
        level = [below for one in level for below in _inside(one)]
    if any(isinstance(one, dict | list) for one in level):
        raise too_deep
    return document


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


class _Refused(ValueError):
    """JSON that different programs read differently."""


def _once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(members)
    if len(document) != len(members):
        raise _Refused("an object has two members of one name")
    return document


def _no_constant(text: str) -> None:
    raise _Refused(f"{text} is not a number")
