"""Python values of every kind, each with what it is in JSON, or with the word that it must be refused."""

from __future__ import annotations

import dataclasses
import math
from collections import ChainMap, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from random import Random
from types import MappingProxyType
from typing import Any, TypeAlias
from uuid import UUID

import attrs
import msgspec
import pydantic


class Refused:
    """What must not be stored."""

    def __repr__(self) -> str:
        return "REFUSED"


REFUSED = Refused()

SCALARS = (type(None), bool, int, float, str, bytes)
Pair: TypeAlias = tuple[Any, Any]
"""A value and its JSON."""

ALPHABETS = (
    *("abcXYZ019_-. ", "äöüßéñ€", "日本語한국어عربي", "😀👩‍👩‍👧‍👦\u0301\u200f\u202e"),
    *("\n\r\t\x01\x1b\x7f\x85\u2028", "\"'\\/{}[]<>%:;$?*`--", "\uffff\ufffd\U0010ffff"),
)


class Trap(Exception):
    """Raised by the hostile classes below."""


def spring(*_: Any, **__: Any) -> Any:
    raise Trap("hostile")


def hostile(kind: type, *names: str) -> type:
    """Return a class whose methods of these names raise."""
    return type(f"Hostile{kind.__name__.title()}", (kind,), dict.fromkeys(names, spring))


TALK = ("__str__", "__repr__", "__format__")
HostileObject = hostile(object, *TALK, "__iter__", "__len__", "__bool__", "__eq__", "__getattr__")
HostileText = hostile(str, *TALK, "encode", "isascii", "__len__", "__iter__")
HostileInt = hostile(int, *TALK, "bit_length", "__le__", "__ge__", "__bool__")
HostileFloat = hostile(float, *TALK, "__le__", "__bool__")
HostileDict = hostile(dict, *TALK, "items", "__iter__", "keys", "__bool__", "__len__")
HostileList = hostile(list, *TALK, "__iter__", "__len__", "__bool__")
HostileUuid = hostile(UUID, *TALK)
HostileDecimal = hostile(Decimal, *TALK, "is_finite")
HostileDatetime = hostile(datetime, *TALK, "isoformat", "utcoffset", "astimezone")
HostileTimezone = hostile(tzinfo, "utcoffset", "dst", "tzname", "__repr__")


class HostileMapping(Mapping[str, Any]):
    """A mapping that ends in the midst of it."""

    def __getitem__(self, key: str) -> Any:
        return spring()

    def __iter__(self) -> Iterator[str]:
        yield "first"
        spring()

    def __len__(self) -> int:
        return 2


class Colour(Enum):
    RED = "red"
    TWO = 2
    NOTHING = None
    LIST = (1, 2)
    NUL = "\0"


Size = IntEnum("Size", "SMALL")
Mood = StrEnum("Mood", {"GOOD": "good"})
Both = Enum("Both", {"ONE": 1}, type=int)
"""An int whose text is its name."""

Line = dataclasses.make_dataclass("Line", [("value", Any), ("name", str, "line")])
Part = attrs.make_class("Part", ["value"])
Item = msgspec.defstruct("Item", [("value", Any)])


class HostileModel(pydantic.BaseModel):
    """A model that does not give its fields."""

    model_dump = spring


Point = namedtuple("Point", "x y")


def text(r: Random, longest: int = 40) -> str:
    """Any text that a database can keep; not empty."""
    length = r.choice((1, 2, 5, longest, r.randint(1, longest)))
    alphabet = r.choice(ALPHABETS) if r.random() < 0.7 else "".join(ALPHABETS)
    # Joined by the eye, several characters each: cut to the length that was meant.
    return "".join(r.choice(alphabet) for _ in range(length))


def bad_text(r: Random) -> str:
    """Text that no database keeps."""
    bad = r.choice(("\0", "\ud800", "\udfff", "a\0b", "é\ud83d"))
    return r.choice(("", text(r))) + bad + r.choice(("", text(r)))


def moment(r: Random) -> datetime:
    zone = r.choice((UTC, UTC, timezone(timedelta(hours=r.randint(-23, 23), minutes=r.randint(0, 59)))))
    year = r.choice((1, 2, 999, 1000, 1969, 1970, 2024, 2038, 9998, 9999))
    return datetime(
        year, r.randint(1, 12), r.randint(1, 28), 23, 59, r.randint(0, 59), r.randint(0, 999_999), zone
    )


def iso(value: datetime) -> str:
    written = value.isoformat()
    return written.removesuffix("+00:00") + "Z" if value.utcoffset() == timedelta(0) else written


def number(r: Random) -> Pair:
    match r.randrange(8):
        case 0:
            value: Any = r.choice((0, 1, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63)))
        case 1:
            return r.choice((2**63, -(2**63) - 1, 10**30, -(1 << 20_000))), REFUSED
        case 2:
            value = r.choice((0.0, -0.0, 0.1, 1e22, 1e-7, 5e-324, 1.7976931348623157e308, math.pi))
        case 3:
            return r.choice((math.nan, math.inf, -math.inf)), REFUSED
        case 4:
            value = r.uniform(-1e6, 1e6)
        case _:
            value = r.randint(-(10**9), 10**9)
    return value, value


def _decimal(r: Random) -> Pair:
    value = Decimal(r.choice(("1.10", "0", "-0", "1E+400", "123456789.123456789", "NaN", "sNaN", "Infinity")))
    return value, str(value) if value.is_finite() else REFUSED


def _span(r: Random) -> Pair:
    value = timedelta(
        days=r.randint(0, 9), hours=r.randint(0, 23), minutes=r.randint(0, 59), seconds=r.randint(0, 59)
    )
    hours, rest = divmod(value.seconds, 3600)
    return value, f"P{value.days}DT{hours:02d}H{rest // 60:02d}M{rest % 60:02d}S"


def _moment(r: Random) -> Pair:
    value = moment(r)
    return (value, iso(value)) if r.random() < 0.7 else (value.replace(tzinfo=None), REFUSED)


def _plain(value: Any, plain: Any) -> Callable[[Random], Pair]:
    return lambda r: (value, plain)


def _refused(make: Callable[[], Any]) -> Callable[[Random], Pair]:
    return lambda r: (make(), REFUSED)


def _text(r: Random) -> Pair:
    value = text(r)
    return value, value


def _uuid(r: Random) -> Pair:
    value = UUID(int=r.getrandbits(128))
    return value, str(value)


LEAVES: tuple[Callable[[Random], Pair], ...] = (
    *(_text,) * 12,
    *(number,) * 12,
    *(_plain(value, value) for value in (None, True, False, "", "0", "null")),
    *(_moment, _decimal, _span, _uuid, _plain(date(2024, 2, 29), "2024-02-29")),
    *(_plain(time(12, 30), "12:30:00"), _plain(Colour.RED, "red"), _plain(Colour.TWO, 2)),
    *(_plain(Colour.NOTHING, None), _plain(Colour.LIST, [1, 2]), _plain(Size.SMALL, 1)),
    *(_plain(Mood.GOOD, "good"), _plain(Both.ONE, 1), _plain(Point(1, "y"), [1, "y"])),
)
"""Most of what is drawn: values that can be stored, but for a few numbers and times."""

TRAPS: tuple[Callable[[Random], Pair], ...] = (
    *(lambda r: (bad_text(r), REFUSED), _plain(Colour.NUL, REFUSED), _refused(lambda: b"bytes")),
    *(_refused(lambda: bytearray(b"bytes")), _refused(object), _refused(HostileObject)),
    *(_refused(HostileMapping), _refused(lambda: HostileDict(a=1)), _refused(lambda: HostileList([1]))),
    *(_refused(lambda: HostileUuid(int=1)), _refused(lambda: HostileDecimal("1.5"))),
    _refused(lambda: HostileDatetime(2024, 1, 1, tzinfo=UTC)),
    *(_refused(lambda: datetime(2024, 1, 1, tzinfo=HostileTimezone())), _refused(HostileModel)),
    *(_refused(lambda: (x for x in (1, 2))), _refused(lambda: range(3)), _refused(lambda: deque([1]))),
    *(_refused(lambda: 1j), _refused(lambda: ...), _refused(lambda: print), _refused(lambda: math)),
    *(_refused(lambda: Line), _refused(lambda: Line(object())), _refused(lambda: itself())),
    *(_refused(lambda: {1: "a", "1": "b"}), _refused(lambda: {None: 1}), _refused(lambda: {1.5: 1})),
    *(_refused(lambda: {True: 1}), _refused(lambda: {b"a": 1}), _refused(lambda: {(1, 2): 1})),
    *(_refused(lambda: {HostileUuid(int=1): 1}), _refused(lambda: {"a\0": 1})),
    # What they are is known, whatever their methods do.
    *(_plain(HostileText("text"), "text"), _plain(HostileInt(7), 7), _plain(HostileFloat(1.5), 1.5)),
)


def itself() -> list[Any]:
    endless: list[Any] = []
    endless.append(endless)
    return endless


def value(r: Random, room: int = 4) -> Pair:
    """Anything, no more than ``room`` levels deep but for a few."""
    draw = r.random()
    if draw < 0.01:
        return deep(r)
    if draw < 0.03:
        return r.choice(TRAPS)(r)
    if draw < 0.55 or not room:
        return r.choice(LEAVES)(r)
    return r.choice((_array, _object, _wrapped))(r, room - 1)


def deep(r: Random) -> Pair:
    """Nested so deep that some databases do not take it."""
    nested: Any = 0
    for _ in range(r.choice((20, 31, 32, 100, 400, 499, 501, 2_000))):
        nested = [nested] if r.random() < 0.5 else {"a": nested}
    return nested, nested


def _array(r: Random, room: int) -> Pair:
    pairs = [value(r, room) for _ in range(r.choice((0, 1, 1, 2, 3, 8)))]
    plain = REFUSED if any(one is REFUSED for _, one in pairs) else [one for _, one in pairs]
    values = [one for one, _ in pairs]
    if len(values) == 1 and isinstance(values[0], str | int) and type(values[0]) in (str, int):
        return r.choice((set, frozenset, list))(values), plain
    return r.choice((list, tuple))(values), plain


def _key(r: Random) -> tuple[Any, str]:
    match r.randrange(12):
        case 0:
            whole = r.randint(-9, 9)
            return whole, str(whole)
        case 1:
            key = UUID(int=r.getrandbits(128))
            return key, str(key)
        case 2:
            return date(2024, 1, 1), "2024-01-01"
        case 3:
            return Colour.RED, "red"
    name = text(r, 12)
    return name, name


def _object(r: Random, room: int) -> Pair:
    made: dict[Any, Any] = {}
    plain: dict[str, Any] = {}
    refused = False
    for _ in range(r.choice((0, 1, 2, 3, 6))):
        (key, name), (item, of_item) = _key(r), value(r, room)
        if name not in plain:
            made[key], plain[name] = item, of_item
            refused |= of_item is REFUSED
    kind = r.choice((dict, dict, dict, OrderedDict, MappingProxyType, ChainMap, _default))
    return kind(made), REFUSED if refused else plain


def _default(made: dict[Any, Any]) -> Any:
    return defaultdict(list, made)


def _wrapped(r: Random, room: int) -> Pair:
    item, plain = value(r, room)
    kind = r.choice((Line, Part, Item))
    fields = {"value": plain, **({"name": "line"} if kind is Line else {})}
    return kind(item), REFUSED if plain is REFUSED else fields


def depth(plain: Any) -> int:
    """Return how deeply arrays and objects are nested."""
    deepest, level = 0, [plain]
    while level := [one for one in level if isinstance(one, list | tuple | dict)]:
        deepest += 1
        level = [item for one in level for item in (one.values() if isinstance(one, dict) else one)]
    return deepest


def same(one: Any, other: Any) -> bool:
    """True if two JSON values are equal: numbers by their decimals, and true differs from 1."""
    left = [(one, other)]
    while left:
        one, other = left.pop()
        if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
            left += zip(one, other, strict=True)
        elif isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
            left += [(item, other[key]) for key, item in one.items()]
        elif {type(one), type(other)} == {int, float}:
            # As JSON writes them: PostgreSQL writes 1e23 out, and Python then reads a whole number.
            if Decimal(repr(one)) != Decimal(repr(other)):
                return False
        elif type(one) is not type(other) or not isinstance(one, SCALARS) or one != other:
            return False
    return True
