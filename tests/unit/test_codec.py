"""What a payload may be, what it becomes, and how a refusal reads."""

import collections
import dataclasses
import enum
import json
import math
import types
import uuid
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any

import attrs
import django
import msgspec
import pydantic
import pytest
import sqlmodel
from django.conf import settings
from django.db import models
from django.utils.functional import lazy, lazystr
from django.utils.safestring import mark_safe
from django.utils.text import format_lazy
from django.utils.translation import gettext_lazy
from hypothesis import given
from hypothesis import strategies as st

from relaybox.errors import PayloadError
from relaybox.wire.codec import Limits, decode, encode_headers, encode_payload

LIMITS = Limits()
ID = uuid.UUID("0190f6c2-1111-7000-8000-123456789abc")


def stored(value: Any, limits: Limits = LIMITS) -> Any:
    text, data, encoding = encode_payload(value, limits)
    assert text is not None
    assert data is None
    assert encoding is None
    return json.loads(text)


def refusal(value: Any, limits: Limits = LIMITS) -> PayloadError:
    with pytest.raises(PayloadError) as caught:
        encode_payload(value, limits)
    return caught.value


class Colour(enum.Enum):
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


class Price(enum.Enum):
    LOW = Decimal("1.50")


class Text(str):
    def __str__(self) -> str:
        return "something else"


Number = type("Number", (int,), {})
Ratio = type("Ratio", (float,), {})
Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Line:
    sku: str
    price: Any


@attrs.define
class Parcel:
    weight: Decimal
    _note: str = "fragile"


class Address(pydantic.BaseModel):
    city: str
    since: Any = pydantic.Field(default=None, alias="validSince")


class Customer(pydantic.BaseModel):
    id: uuid.UUID
    address: Address
    site: pydantic.HttpUrl | None = None


class Hero(sqlmodel.SQLModel):
    name: str
    born: date


class Order(msgspec.Struct, rename="camel", omit_defaults=True):
    order_id: uuid.UUID
    total_price: Any
    line_items: list[Any] = []
    note: str | None = None


class Paid(msgspec.Struct, tag="paid", tag_field="kind"):
    at: Any
    by: str | msgspec.UnsetType = msgspec.UNSET


class Pair(msgspec.Struct, array_like=True, tag=True):
    left: int
    right: int


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((same, same) for same in (None, True, 42, -(2**63), 2**63 - 1, 0.5, 1e308)),
        *((same, same) for same in ("Zürich 🎈", "\\u0000 as six characters")),
        (Text("kept"), "kept"),
        (Number(7), 7),
        (Ratio(0.25), 0.25),
        ([1, (2, 3), {4}, frozenset({5})], [1, [2, 3], [4], [5]]),
        (Point(1, 2), [1, 2]),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
        (datetime(2025, 1, 31, 12, tzinfo=UTC), "2025-01-31T12:00:00Z"),
        (
            datetime(2025, 1, 31, 12, 0, 0, 5, timezone(timedelta(hours=2))),
            "2025-01-31T12:00:00.000005+02:00",
        ),
        (date(2025, 1, 31), "2025-01-31"),
        (time(8, 30), "08:30:00"),
        (timedelta(days=1, hours=2, minutes=30), "P1DT02H30M00S"),
        (-timedelta(seconds=1, microseconds=5), "-P0DT00H00M01.000005S"),
        (Decimal("10.50"), "10.50"),
        (ID, str(ID)),
        (Colour.RED, "red"),
        (Level.HIGH, 3),
        (Price.LOW, "1.50"),
        (Line("A1", Decimal("9.99")), {"sku": "A1", "price": "9.99"}),
        (Parcel(Decimal("1.2")), {"weight": "1.2", "_note": "fragile"}),
        (Hero(name="Ada", born=date(1815, 12, 10)), {"name": "Ada", "born": "1815-12-10"}),
        (Order(ID, Decimal("3")), {"orderId": str(ID), "totalPrice": "3"}),
        (Order(ID, 1, [2], "x"), {"orderId": str(ID), "totalPrice": 1, "lineItems": [2], "note": "x"}),
        (Paid(date(2025, 1, 31)), {"kind": "paid", "at": "2025-01-31"}),
        (Pair(1, 2), ["Pair", 1, 2]),
    ],
)
def test_a_value_is_stored_as_users_expect(value: Any, expected: Any) -> None:
    assert stored(value) == expected
    assert stored({"in": [value]}) == {"in": [expected]}


def test_a_model_is_stored_as_pydantic_or_msgspec_itself_would() -> None:
    address = Address(city="Bern", validSince=datetime(2025, 1, 1, tzinfo=UTC))
    customer = Customer(id=ID, address=address, site=pydantic.HttpUrl("https://example.org/a"))
    assert stored(customer) == {
        "id": str(ID),
        "address": {"city": "Bern", "since": "2025-01-01T00:00:00Z"},
        "site": "https://example.org/a",
    }
    for struct in (
        *(Order(ID, 1), Order(ID, 1, [2]), Order(ID, 1, note="n"), Paid("now"), Paid("now", "me")),
        Pair(1, 2),
    ):
        assert stored(struct) == json.loads(msgspec.json.encode(struct))


@pytest.mark.parametrize(
    ("key", "name"),
    [
        *(("a b", "a b"), ("", ""), (Text("kept"), "kept"), (7, "7"), (2**70, str(2**70)), (ID, str(ID))),
        *((Colour.RED, "red"), (Level.HIGH, "3"), (date(2025, 1, 31), "2025-01-31")),
        (datetime(2025, 1, 31, tzinfo=UTC), "2025-01-31T00:00:00Z"),
    ],
)
def test_a_key_becomes_text(key: Any, name: str) -> None:
    assert stored({key: 1}) == {name: 1}


@pytest.mark.parametrize("data", [b"\x00\xff", bytearray(b"\x00\xff"), memoryview(b"\x00\xff")])
def test_bytes_as_the_whole_payload_are_stored_as_they_are(data: Any) -> None:
    assert encode_payload(data, LIMITS) == (None, b"\x00\xff", "binary")


NEITHER = object()
CYCLE: dict[str, Any] = {}
CYCLE["me"] = CYCLE


@pytest.mark.parametrize(
    ("value", "path", "seen", "fix"),
    [
        (math.nan, "$", "nan", "send None or a string"),
        ({"lines": [1, 2, {"price": math.inf}]}, "$.lines[2].price", "inf", "send None or a string"),
        ({"a": -math.inf}, "$.a", "-inf", "send None or a string"),
        ({"a": Ratio("nan")}, "$.a", "nan", "send None or a string"),
        ({"a": Decimal("NaN")}, "$.a", "Decimal('NaN')", "send None or a string"),
        ({"a": Decimal("sNaN")}, "$.a", "Decimal('sNaN')", "send None or a string"),
        ({"a": Decimal("-Infinity")}, "$.a", "Decimal('-Infinity')", "send None or a string"),
        ({"a b": ["\ud800"]}, '$["a b"][0]', "'\\ud800'", "errors='replace'"),
        ({"a": {"\udfff": 1}}, '$.a["\\udfff"]', "the key '\\udfff'", "errors='replace'"),
        ({"a": "x\0y"}, "$.a", "'x\\x00y'", "remove it"),
        ({"a": "é\0"}, "$.a", "'é\\x00'", "remove it"),
        ({"x\0y": 1}, '$["x\\u0000y"]', "the key 'x\\x00y'", "remove it"),
        ({"a": 2**63}, "$.a", "9223372036854775808", "send it as a string"),
        ({"a": -(2**63) - 1}, "$.a", "-9223372036854775809", "send it as a string"),
        ({"a": 10**5000}, "$.a", "an integer of 16610 bits", "send it as a string"),
        ({"a": NEITHER}, "$.a", "builtins.object", "send a dict"),
        ({"a": Line}, "$.a", "builtins.type", "send a dict"),
        ({"a": (item for item in "ab")}, "$.a", "builtins.generator", "send a dict"),
        ([datetime(2025, 1, 31)], "$[0]", "datetime.datetime(2025, 1, 31, 0, 0)", "tzinfo=timezone.utc"),
        ({datetime(2025, 1, 31): 1}, '$["2025-01-31 00:00:00"]', "the key", "tzinfo=timezone.utc"),
        ({"a": b"x"}, "$.a", "bytes", "base64"),
        ({"a": bytearray(b"x")}, "$.a", "bytearray", "bytes as the whole payload"),
        ({"a": memoryview(b"x")}, "$.a", "memoryview", "base64"),
        ({"a": {None: 1}}, "$.a", "the key None is of type NoneType", "use a string"),
        ({True: 1}, "$", "the key True is of type bool", "use a string"),
        ({1.5: 1}, "$", "the key 1.5 is of type float", "use a string"),
        ({(1, 2): 1}, "$", "the key (1, 2) is of type tuple", "use a string"),
        ({Price.LOW: 1}, "$", "is of type Price", "use a string"),
        ({1: "a", "1": "b"}, "$", "the key '1'", "keep one"),
        ({Colour.RED: "a", "red": "b"}, "$", "the key 'red'", "keep one"),
        (CYCLE, None, "more than 500 levels", "flatten it"),
        (Line("A1", math.nan), "$.price", "nan", "send None"),
        (Parcel(Decimal("NaN")), "$.weight", "NaN", "send None"),
        (Order(ID, NEITHER), "$.totalPrice", "builtins.object", "send a dict"),
        (Paid(datetime(2025, 1, 31)), "$.at", "no timezone", "tzinfo"),
        (Address(city="Bern", validSince=b"x"), "$.since", "bytes", "base64"),
        ({"a": Colour}, "$.a", "enum.EnumType", "send a dict"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_path_and_fix(
    value: Any, path: str | None, seen: str, fix: str
) -> None:
    error = refusal(value)
    assert path is None or error.path == path
    assert str(error).startswith(f"{error.path}: ")
    assert seen in str(error)
    assert fix in str(error)


def test_a_long_value_is_shortened_and_a_model_that_does_not_give_its_fields_is_named() -> None:
    error = refusal({"a": Line.__new__(Line)})
    assert error.path == "$.a"
    assert "test_codec.Line did not give its fields" in str(error)
    assert len(str(refusal({"a": "\0" + "x" * 10_000}))) < 200
    assert len(str(refusal({"k" * 10_000 + " ": math.nan}))) < 200
    assert len(str(refusal(CYCLE))) < 300


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_nesting_is_allowed_up_to_the_limit_and_refused_beyond_it() -> None:
    limits = Limits(max_depth=32)
    assert stored(nested(32), limits) == nested(32)
    error = refusal(nested(33), limits)
    assert error.path == "$" + "[0]" * 32
    assert "more than 32 levels" in str(error)
    text, _, _ = encode_payload(nested(LIMITS.max_depth), LIMITS)
    assert decode(text, None, None) == nested(LIMITS.max_depth), "the default fits Python's stack both ways"


@pytest.mark.parametrize("depth", [501, 1_000, 100_000])
def test_no_depth_exhausts_the_stack(depth: int) -> None:
    assert "more than 500 levels" in str(refusal(nested(depth)))
    if depth == 100_000:
        assert "Python's stack" in str(refusal(nested(depth), Limits(max_depth=1_000_000)))


def test_objects_that_hold_themselves_are_refused() -> None:
    line = Line("A1", None)
    line.price = line
    assert "flatten it" in str(refusal(line))


def test_an_object_whose_fields_are_read_at_the_end_of_the_stack_is_not_blamed() -> None:
    class Deep(pydantic.BaseModel):
        def model_dump(self, **_: Any) -> Any:
            raise RecursionError

    error = refusal({"line": Deep()})
    assert error.path == "$"
    assert "nested deeper than Python's stack allows here; flatten it" in str(error)


def test_a_payload_over_the_limit_is_refused_with_both_sizes() -> None:
    limits = Limits(max_bytes=1000)
    assert stored("x" * 998, limits) == "x" * 998
    for value in ("x" * 999, b"x" * 1001, "é" * 500):
        error = refusal(value, limits)
        assert error.path == "$"
        assert "over the limit of 1,000 bytes" in str(error)
        assert "max_payload" in str(error)
    assert "1,001 bytes" in str(refusal("x" * 999, limits))
    narrow = Limits(min_int=0, max_int=10)
    assert stored(10, narrow) == 10
    assert "11 is outside 0 to 10" in str(refusal(11, narrow))


def test_headers_are_a_json_object_and_a_stored_payload_decodes() -> None:
    assert encode_headers(None, LIMITS) == "{}"
    assert encode_headers({}, LIMITS) == "{}"
    assert json.loads(encode_headers({"tenant": ID, "n": 1}, LIMITS)) == {"tenant": str(ID), "n": 1}
    assert decode('{"a": [1, 2.5, null]}', None, None) == {"a": [1, 2.5, None]}
    assert decode(b"null", None, None) is None
    assert decode(None, b"\x00", "binary") == b"\x00"
    assert decode(None, None, None) is None


@pytest.mark.parametrize(
    ("headers", "path", "seen"),
    [
        *(({"a": {"b c": math.nan}}, 'headers.a["b c"]', "nan"), ({"": 1}, "headers", "''")),
        *(({1: 1}, "headers", "the name 1"), ({None: 1}, "headers", "the name None")),
        *((["a"], "headers", "['a']"), ({"a": "x" * 1_048_577}, "headers", "over the limit")),
        ({"x\0": 1}, 'headers["x\\u0000"]', "NUL"),
    ],
)
def test_bad_headers_are_refused_with_a_path_of_their_own(headers: Any, path: str, seen: str) -> None:
    with pytest.raises(PayloadError) as caught:
        encode_headers(headers, LIMITS)
    assert caught.value.path == path
    assert seen in str(caught.value)


@pytest.mark.parametrize(
    ("payload", "encoding", "seen"),
    [
        ("{", None, "does not decode"),
        (b'"\xff"', None, "does not decode"),
        ("[" * 100_000, None, "does not decode"),
        (None, "zip9", "'zip9'"),
    ],
)
def test_a_payload_that_does_not_decode_says_so(payload: Any, encoding: str | None, seen: str) -> None:
    with pytest.raises(PayloadError, match=seen):
        decode(payload, b"", encoding)


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=30,
)


@given(JSON | st.binary())
def test_json_values_and_bytes_come_back_as_they_were(value: Any) -> None:
    assert decode(*encode_payload(value, LIMITS)) == value


ANY_TEXT = st.text(st.characters())
LEAVES = (
    ANY_TEXT
    | st.floats()
    | st.integers()
    | st.decimals()
    | st.datetimes(timezones=st.none() | st.timezones())
    | st.timedeltas()
    | st.binary()
    | st.complex_numbers()
)
KEYS = ANY_TEXT | st.floats() | st.integers() | st.datetimes()
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.builds(Line, ANY_TEXT, inner)
)


@given(ANYTHING)
def test_whatever_is_given_is_stored_or_refused_with_the_typed_error(value: Any) -> None:
    try:
        text, data, _ = encode_payload(value, LIMITS)
    except PayloadError:
        return
    assert (text is None) != (data is None)
    if text is not None:
        json.loads(text, parse_constant=pytest.fail)
        assert "\0" not in str(decode(text, None, None))


@pytest.fixture(scope="module")
def book() -> Any:
    """Return a model of a project, not saved."""
    if not settings.configured:
        settings.configure(USE_I18N=False, LOGGING_CONFIG=None)
        django.setup()

    class Book(models.Model):
        title = models.CharField(max_length=20)

        class Meta:
            app_label = "tests"

    return Book(title="Emma")


@pytest.mark.usefixtures("book")
def test_lazy_text_of_django_is_written_as_text() -> None:
    payload = {"a": gettext_lazy("paid"), "b": [lazystr("öl"), format_lazy("{}!", gettext_lazy("paid"))]}
    assert stored(payload) == {"a": "paid", "b": ["öl", "paid!"]}
    assert stored(mark_safe("<b>")) == "<b>"
    assert refusal({"a": lazystr("\0")}).path == "$.a"

    def fail() -> str:
        raise ValueError("no translation")

    assert "no translation" in str(refusal({"a": lazy(fail, str)()}))


def test_a_model_instance_and_a_queryset_of_django_are_refused_with_what_to_send_instead(book: Any) -> None:
    refused = refusal({"book": book})
    assert refused.path == "$.book"
    assert "Book cannot be written as JSON; send a dict of the fields that receivers need" in str(refused)
    for query in (type(book).objects.all(), type(book).objects.raw("SELECT 1")):
        assert "such as list(queryset.values('id', 'name'))" in str(refusal([query]))


def test_a_model_that_says_what_it_dumps_is_taken_at_its_word(book: Any) -> None:
    class Shown(type(book)):  # type: ignore[misc]
        class Meta:
            app_label = "tests"
            proxy = True

        def model_dump(self) -> dict[str, Any]:
            return {"title": self.title}

    assert stored(Shown(title="Emma")) == {"title": "Emma"}
