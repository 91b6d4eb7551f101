"""What ``assert_emitted`` takes for a match, and how it tells what is not."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any
from unittest.mock import ANY
from uuid import UUID

import pytest

from relaybox.testing.emitted import EmittedEvent
from relaybox.testing.expectation import Expectation, found_instead, missing, not_found, table

ID = UUID("01890000-0000-7000-8000-000000000001")
NOON = datetime(2025, 1, 31, 12, tzinfo=UTC)


def event(
    type_: str = "order.paid", aggregate_id: str = "1", payload: Any = None, **more: Any
) -> EmittedEvent:
    values = {"headers": {}, "idempotency_key": str(ID), "statuses": {"search": "pending"}} | more
    return EmittedEvent(ID, type_, "Order", aggregate_id, payload, created_at=NOON, **values)


@dataclass
class Money:
    amount: Decimal


@pytest.mark.parametrize(
    ("wanted", "seen"),
    [
        *(({}, {"total": 42}), ({"total": 42}, {"total": 42, "currency": "EUR"})),
        ({"total": Decimal("1.50")}, {"total": "1.50"}),
        ({"id": ID, "at": NOON}, {"id": str(ID), "at": "2025-01-31T12:00:00Z"}),
        ({"lines": [{"sku": "a"}]}, {"lines": [{"sku": "a", "n": 1}]}),
        ({"lines": ("a", "b")}, {"lines": ["a", "b"]}),
        *(({"total": pytest.approx(0.3)}, {"total": 0.1 + 0.2}), ({"total": ANY}, {"total": 7})),
        *(({1: "one"}, {"1": "one"}), (Money(Decimal(5)), {"amount": "5", "currency": "EUR"})),
        *(({"paid": True}, {"paid": True}), ({"total": 42}, {"total": 42.0}), (None, None)),
        (b"\x00", b"\x00"),
    ],
)
def test_a_payload_matches_where_it_holds_what_is_wanted(wanted: Any, seen: Any) -> None:
    assert list(missing(wanted, seen, "payload")) == []


@pytest.mark.parametrize(
    ("wanted", "seen", "said"),
    [
        ({"total": 42}, {"total": 41}, ["payload['total'] is 41, not 42"]),
        ({"total": 42}, {}, ["payload['total'] is missing"]),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1]}}, ["payload['a']['b'] has 1 item, not 2"]),
        ([{"a": 1}], [{"a": 2}], ["payload[0]['a'] is 2, not 1"]),
        ({"paid": True}, {"paid": 1}, ["payload['paid'] is 1, not True"]),
        ({"n": 1}, {"n": True}, ["payload['n'] is True, not 1"]),
        ({"n": 1}, {"n": "1"}, ["payload['n'] is '1', not 1"]),
        ({"total": Decimal("1.5")}, {"total": "2"}, ["payload['total'] is '2', not Decimal('1.5')"]),
        ({}, None, ["payload is None, not {}"]),
        (None, {}, ["payload is {}, not None"]),
        (Money(Decimal(5)), {"amount": "6"}, ["payload['amount'] is '6', not '5'"]),
        (b"a", b"b", ["payload is b'b', not b'a'"]),
    ],
)
def test_what_differs_is_said_with_its_place(wanted: Any, seen: Any, said: list[str]) -> None:
    assert list(missing(wanted, seen, "payload")) == said


@pytest.mark.parametrize(
    ("pattern", "type_", "matches"),
    [
        *(("order.paid", "order.paid", True), ("order.paid", "order.paid.v2", True)),
        *(("order.paid.v2", "order.paid", False), ("order.*", "order.paid", True), ("*", "anything", True)),
        ("order.paid", "order.payed", False),
    ],
)
def test_types_match_as_in_routes(pattern: str, type_: str, matches: bool) -> None:
    assert (not Expectation(pattern).differences(event(type_))) is matches


def test_everything_that_was_said_must_be_so() -> None:
    seen = event(headers={"tenant": "acme"}, payload={"total": 42})
    wanted: dict[str, Any] = {"aggregate_type": "Order", "aggregate_id": 1, "payload": {"total": 42}}
    wanted |= {"headers": {"tenant": "acme"}, "destination": "search", "idempotency_key": str(ID)}
    assert Expectation("order.paid", **wanted).differences(seen) == []
    wanted = {"aggregate_type": "Invoice", "aggregate_id": UUID(int=0), "payload": {"total": 1}}
    wanted |= {"headers": {"tenant": "other"}, "destination": "audit", "idempotency_key": "k"}
    other = Expectation("invoice.*", **wanted)
    assert other.differences(seen) == [
        *("its type is 'order.paid', not 'invoice.*'", "its aggregate_type is 'Order', not 'Invoice'"),
        "its aggregate_id is '1', not '00000000-0000-0000-0000-000000000000'",
        *(f"its idempotency_key is '{ID}', not 'k'", "it goes to search, not to audit"),
        *("payload['total'] is 42, not 1", "headers['tenant'] is 'acme', not 'other'"),
    ]


def test_a_function_decides_and_one_that_raises_says_no() -> None:
    seen = event(payload={"total": 42})
    assert Expectation("*", payload=lambda payload: payload["total"] > 40).differences(seen) == []
    assert Expectation("*", payload=lambda payload: payload["total"] > 50).differences(seen) == [
        "the function for its payload says no to {'total': 42}"
    ]
    assert Expectation("*", payload=lambda payload: payload["sum"] > 50).differences(seen) == [
        "the function for its payload raised KeyError: 'sum'"
    ]


def test_a_failure_tells_what_was_wanted_what_is_near_and_what_there_is() -> None:
    events = [event(aggregate_id="2", payload={"total": 41}), event("order.placed", payload={"total": 42})]
    expected = Expectation("order.paid", aggregate_id=1, payload={"total": 42})
    assert not_found(expected, events, [], None).splitlines() == [
        "no event was emitted that is: order.paid, aggregate_id=1, payload={'total': 42}",
        "near: order.placed of Order 1: its type is 'order.placed', not 'order.paid'",
        "near: order.paid of Order 2: its aggregate_id is '2', not '1'; payload['total'] is 41, not 42",
        "emitted since the test began: 2 events",
        "  event type    aggregate  destinations  payload",
        '  order.paid    Order 2    search        {"total": 41}',
        '  order.placed  Order 1    search        {"total": 42}',
    ]


def test_a_wrong_count_shows_what_was_found_and_long_lists_and_payloads_are_cut() -> None:
    found = [event(payload=b"raw")]
    assert not_found(Expectation("order.*"), found, found, 2).splitlines() == [
        "1 event of 2 expected: order.*",
        "  event type  aggregate  destinations  payload",
        "  order.paid  Order 1    search        b'raw'",
    ]
    assert found_instead(Expectation("*"), found).startswith("1 event emitted that should not be: *\n")
    lines = table([event(payload={"text": "x" * 500}) for _ in range(25)])
    assert lines[-1] == "  … and 5 more"
    assert len(lines) == 22
    assert max(map(len, lines)) < 120
