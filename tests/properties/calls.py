"""Calls of ``emit``, each with what has to become of it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone
from random import Random
from typing import Any, NamedTuple
from uuid import UUID

from relaybox.core.settings import Destination, Route, Settings
from relaybox.emit.row import Call
from tests.properties import values
from tests.properties.values import REFUSED, Pair

LONGEST = 20_000
"""Bytes of a payload."""

DESTINATIONS = (Destination("plain", "handler:"), Destination("ordered", "handler:", ordered=True))
ROUTES = (Route("*", to="plain"),)


def settings(url: str) -> Settings:
    """Return the settings that the calls are made for."""
    return Settings(url, DESTINATIONS, ROUTES, max_payload=LONGEST)


class Drawn(NamedTuple):
    """A call; what its payload and headers are in JSON; and whether it must be refused."""

    call: Call
    payload: Any
    headers: Any
    refused: bool


NOT_TEXT: tuple[Callable[[], Any], ...] = (
    *(lambda: 5, lambda: True, lambda: b"bytes", lambda: ["text"], lambda: "", object, values.HostileObject),
)


def call(r: Random, *, near: float = 0.08) -> Drawn:
    """Any call; each argument is wrong with the probability ``near``."""
    pairs = {name: draw(r, r.random() < near) for name, draw in FIELDS.items()}
    if r.random() < 0.05:
        pairs["payload"] = _binary(r)
    made = Call(**{name: given for name, (given, _) in pairs.items()})
    refused = any(
        plain is REFUSED for plain in (plain for name, (_, plain) in pairs.items() if name != "key")
    )
    named = pairs["destinations"][1]
    if named is not REFUSED and "ordered" in named:
        refused |= pairs["key"][1] is REFUSED
        refused |= made.deliver_at is not None and made.key is not None
    headers = pairs["headers"][1]
    if headers is not REFUSED and made.tenant is not None:
        headers = {**headers, "tenant": pairs["tenant"][1]}
    return Drawn(made, pairs["payload"][1], headers, refused)


def _name(longest: int) -> Callable[[Random, bool], Pair]:
    def draw(r: Random, wrong: bool) -> Pair:
        if wrong:
            return r.choice(
                (*NOT_TEXT, lambda: None, lambda: values.bad_text(r), lambda: "x" * (longest + 1))
            )(), REFUSED
        name = r.choice(("order.paid", "order.paid.v2", values.text(r, longest), "x" * longest))[:longest]
        return r.choice((name, name, name, values.Mood.GOOD)), name

    return draw


def _aggregate_id(r: Random, wrong: bool) -> Pair:
    if wrong:
        odd = (
            *(lambda: 1.5, lambda: 1 << 900, lambda: True, lambda: None, lambda: values.bad_text(r)),
            values.HostileObject,
        )
        return r.choice(odd)(), REFUSED
    return r.choice(
        (
            *(7, -1, 10**200, values.Size.SMALL, values.Both.ONE, values.HostileInt(3), UUID(int=5)),
            values.text(r, 255),
        )
    ), None


def _optional(draw: Callable[[Random, bool], Pair]) -> Callable[[Random, bool], Pair]:
    return lambda r, wrong: draw(r, wrong) if wrong or r.random() < 0.2 else (None, None)


def _text_or_refused(longest: int) -> Callable[[Random, bool], Pair]:
    def draw(r: Random, wrong: bool) -> Pair:
        given = r.choice((*NOT_TEXT, lambda: values.bad_text(r)))() if wrong else values.text(r, longest)
        return given, REFUSED if wrong else given

    return draw


def _key(r: Random, wrong: bool) -> Pair:
    if not wrong:
        return r.choice((..., ..., None, values.text(r, 400))), None
    return r.choice((*NOT_TEXT, lambda: values.bad_text(r), lambda: "k" * 10_001))(), REFUSED


def _payload(r: Random, wrong: bool) -> Pair:
    if wrong and r.random() < 0.5:
        return "x" * (LONGEST + r.randint(0, 9)), REFUSED
    given, plain = r.choice(values.TRAPS)(r) if wrong else values.value(r)
    # The one thing that is refused in the midst of others and not alone.
    return given, bytes(given) if isinstance(given, bytes | bytearray) else plain


def _binary(r: Random) -> Pair:
    data = r.randbytes(r.choice((0, 1, 20, 500)))
    return r.choice((bytes, bytearray, memoryview))(data), data


def _headers(r: Random, wrong: bool) -> Pair:
    if wrong:
        odd: tuple[Callable[[], Any], ...] = (
            *(lambda: 5, lambda: "text", lambda: [("a", 1)], lambda: {1: "a"}, lambda: {"": "a"}),
            *(
                lambda: {"a": object()},
                lambda: {"a\0": 1},
                lambda: values.HostileDict(a=1),
                values.HostileMapping,
            ),
            values.HostileObject,
        )
        return r.choice(odd)(), REFUSED
    if r.random() < 0.6:
        return r.choice((None, {})), {}
    pairs = {values.text(r, 20): values.value(r, 1) for _ in range(r.randint(1, 3))}
    plain = {name: plain for name, (_, plain) in pairs.items()}
    refused = any(one is REFUSED for one in plain.values())
    return {name: given for name, (given, _) in pairs.items()}, REFUSED if refused else plain


def _max_attempts(r: Random, wrong: bool) -> Pair:
    if wrong:
        odd = (0, -1, 2**31, 10**40, 1 << 20_000, True, 1.5, "3", b"", [], values.HostileObject())
        return r.choice(odd), REFUSED
    return r.choice((1, 3, 2**31 - 1, values.Size.SMALL)), None


def _deliver_at(r: Random, wrong: bool) -> Pair:
    if wrong:
        far = timezone(timedelta(hours=14))
        odd = (
            *("2024-01-01T00:00:00Z", 1_700_000_000, datetime(2024, 1, 1), datetime(1, 1, 1, tzinfo=far)),
            datetime(9999, 12, 31, 23, tzinfo=timezone(-timedelta(hours=14))),
            *(datetime(2024, 1, 1, tzinfo=values.HostileTimezone()), values.HostileObject()),
        )
        return r.choice(odd), REFUSED
    past = (datetime(1, 1, 2, tzinfo=UTC), datetime(999, 1, 1, tzinfo=UTC), datetime(1969, 7, 20, tzinfo=UTC))
    known = values.HostileDatetime(2024, 1, 1, tzinfo=UTC)
    return r.choice((*past, known, datetime.now(UTC), datetime.now(UTC) - timedelta(days=1))), None


def _destinations(r: Random, wrong: bool) -> Pair:
    if wrong:
        odd: tuple[Callable[[], Any], ...] = (
            *(list, lambda: 5, lambda: [5], lambda: [["plain"]], lambda: ["nowhere"], lambda: [None]),
            *(lambda: {"plain": 1, 2: 3}, lambda: "", lambda: [values.bad_text(r)]),
            *(lambda: values.HostileList(["plain"]), values.HostileObject),
        )
        return r.choice(odd)(), REFUSED
    if r.random() < 0.5:
        return None, ["plain"]
    names = r.choice(
        (["plain"], ["ordered"], ["ordered", "plain"], ["plain", "plain"], [values.HostileText("plain")])
    )
    return r.choice((list(names), tuple(names), names[0] if len(names) == 1 else names)), names


FIELDS: dict[str, Callable[[Random, bool], Pair]] = {
    "aggregate_type": _name(100),
    "aggregate_id": _aggregate_id,
    "event_type": _name(100),
    "payload": _payload,
    "idempotency_key": _optional(_text_or_refused(255)),
    "key": _key,
    "headers": _headers,
    "tenant": _optional(_text_or_refused(255)),
    "max_attempts": _optional(_max_attempts),
    "deliver_at": _optional(_deliver_at),
    "destinations": _destinations,
}
