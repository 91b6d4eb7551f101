"""The checker of histories and what assert_emitted takes for a match."""

from __future__ import annotations

import itertools
import random
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Literal
from unittest.mock import ANY
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relaybox.testing.checker import KINDS, Committed, Finding, Kind, Received, Report, check
from relaybox.testing.emitted import EmittedEvent, Expectation, found_instead, missing, not_found, table

A, B, C, STRANGER = (UUID(int=number) for number in (1, 2, 3, 99))

ROWS = [Committed("shop", event, "order-1", position) for position, event in enumerate((A, B, C), 1)]


def received(*events: UUID, **other: Any) -> list[Received]:
    return [Received("shop", event, **other) for event in events]


def states(**of: str) -> dict[tuple[str, UUID], str]:
    return {("shop", {"a": A, "b": B, "c": C}[name]): status for name, status in of.items()}


def found(report: Report) -> list[tuple[Kind, UUID | None]]:
    return [(finding.kind, finding.event_id) for finding in report.findings]


def test_a_history_that_kept_its_promises_gives_no_finding() -> None:
    report = check(ROWS, received(A, B, C), status=states(a="delivered", b="delivered", c="delivered"))
    assert report.ok
    assert report.counts == dict.fromkeys(KINDS, 0)
    assert (report.events, report.received, report.duplicates) == (3, 3, 0)
    assert check([], []).ok


ALL = states(a="delivered", b="delivered", c="delivered")
PENDING = {**ALL, ("shop", C): "pending"}
FAILED = {**ALL, ("shop", C): "failed"}


@pytest.mark.parametrize(
    ("arrivals", "options", "expected"),
    [
        # What never came is lost, unless there was no time to drain, or it failed or was discarded.
        ([A, B], {}, [("lost", C)]),
        ([A, B], {"drained": False}, []),
        ([A, B], {"status": PENDING, "drained": False}, []),
        ([A], {"status": states(a="delivered", b="discarded", c="failed")}, []),
        # What is pending after the drain is stuck and nothing else, whether it came or not.
        ([A, B, C], {"status": PENDING}, [("stuck", C)]),
        ([A, B], {"status": PENDING}, [("stuck", C)]),
        # What was never committed is a phantom once.
        ([A, STRANGER, B, STRANGER, C], {}, [("phantom", STRANGER)]),
        # What overtakes an earlier event of its key is disorder; only first deliveries have an order.
        ([B, A, C], {}, [("disorder", B)]),
        ([C, A, B], {}, [("disorder", C)]),
        ([B, C, A], {}, [("disorder", B), ("disorder", C)]),
        ([A, B, A, C, A, B], {"in_flight": 3}, []),
        # Without the rows, skip believes that what never came failed.
        ([B, C], {"on_failed": "skip", "drained": False}, []),
        ([B, C], {"drained": False}, [("disorder", B), ("disorder", C)]),
        ([B, A, C], {"on_failed": "skip", "drained": False}, [("disorder", B)]),
        # Without faults nothing comes twice; faults excuse as many duplicates as were in flight.
        ([A, B, B, C, B], {}, [("duplicate", B), ("duplicate", B)]),
        ([A, A, B, B, B, C], {"in_flight": 3}, []),
        ([A, A, B, B, B, C], {"in_flight": 2}, [("duplicate", B)]),
        ([A, A, B, B, B, C], {"in_flight": {("shop", A): 1, ("shop", B): 2}}, []),
        ([A, A, B, B, B, C], {"in_flight": {("shop", A): 2, ("shop", B): 1}}, [("duplicate", B)]),
        # A row that failed though its delivery was received is untrue, unless a fault excuses it.
        ([A, B, C], {"status": FAILED}, [("untrue", C)]),
        ([A, B, C], {"status": FAILED, "in_flight": {("shop", A): 1}}, [("untrue", C)]),
        ([A, B, C], {"status": FAILED, "in_flight": {("shop", C): 1}}, []),
        ([A, B, C], {"status": FAILED, "in_flight": 1}, []),
        # So is a row that was not committed or that is in an unknown state.
        (
            [A, B, C],
            {"status": {**ALL, ("shop", C): "sent", ("shop", STRANGER): "pending"}},
            [("untrue", C), ("untrue", STRANGER)],
        ),
    ],
)
def test_findings(arrivals: list[UUID], options: dict[str, Any], expected: list[tuple[Kind, UUID]]) -> None:
    report = check(ROWS, received(*arrivals), **options)
    assert found(report) == expected
    assert report.duplicates == len(arrivals) - len(set(arrivals))


def test_a_row_that_says_delivered_and_never_came_is_lost_at_any_time() -> None:
    rows = [row._replace(key=None) for row in ROWS]
    for status in (states(a="delivered", b="delivered", c="pending"), states(b="delivered", c="pending")):
        report = check(rows, received(B), status=status, drained=False)
        assert found(report) == [("lost", A)], "a row that is gone was delivered and pruned"


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (None, "position 3 of key 'order-1' was never received"),
        (states(c="delivered"), "position 3 of key 'order-1' was never received; its row says delivered"),
        (states(a="delivered"), "position 3 of key 'order-1' was never received; no row of it is left"),
    ],
)
def test_what_is_lost_tells_what_its_row_says_only_where_there_is_one(
    status: dict[tuple[str, UUID], str] | None, words: str
) -> None:
    [lost] = check(ROWS, received(A, B), status=status).findings
    assert lost == Finding("lost", "shop", C, words)


def test_an_unknown_policy_and_rows_out_of_order_are_refused() -> None:
    wrong: Any = "skipp"
    with pytest.raises(ValueError, match="on_failed = 'skipp'; expected one of 'block', 'skip'"):
        check(ROWS, received(A, B, C), on_failed=wrong)
    with pytest.raises(ValueError, match="position 1 stands after 2; give the rows in order of position"):
        check([ROWS[1], ROWS[0]], [])
    by_destination = [*ROWS, Committed("mail", A, None, 2)]
    assert check(by_destination, [*received(A, B, C), Received("mail", A)]).ok


@pytest.mark.parametrize("argument", ["committed", "received", "status", "in_flight"])
def test_an_id_that_is_a_text_is_refused_with_what_is_expected(argument: str) -> None:
    text: Any = str(A)
    arguments: dict[str, Any] = {
        "committed": [Committed("shop", text, None, 1)],
        "received": [Received("shop", text)],
        "status": {("shop", text): "delivered"},
        "in_flight": {("shop", text): 1},
    }
    expected = f"{argument}, 'shop': event_id = '{A}', a str; expected a uuid.UUID"
    with pytest.raises(TypeError, match=re.escape(expected)):
        check(**({"committed": ROWS, "received": received(A, B, C)} | {argument: arguments[argument]}))


def test_what_came_to_the_wrong_destination_says_where_it_belongs_and_signatures_hold() -> None:
    [phantom] = check(ROWS, [*received(A, B, C), Received("mail", A)]).findings
    assert phantom == Finding("phantom", "mail", A, "was received, but was committed only for shop")
    assert check(ROWS, received(A, B, C, signed=True)).ok
    assert found(check(ROWS[:1], received(A, signed=False))) == [("unsigned", A)]


def test_keys_and_destinations_have_no_order_among_each_other_and_no_key_means_none() -> None:
    rows = [Committed("shop", A, "one", 1), Committed("mail", A, "one", 2), Committed("shop", B, "two", 3)]
    rows += [Committed("shop", C, None, 4), Committed("shop", STRANGER, None, 5)]
    arrivals = [*received(STRANGER, C, B, A), Received("mail", A)]
    assert check(rows, arrivals).ok


@pytest.mark.parametrize(
    ("status", "early"),
    [
        ("failed", {"block": [B, C], "skip": []}),
        ("pending", {"block": [B, C], "skip": [B, C]}),
        ("delivered", {"block": [B, C], "skip": [B, C]}),
        ("discarded", {"block": [], "skip": []}),
    ],
)
def test_what_may_be_missing_before_later_events_of_its_key(
    status: str, early: dict[Literal["block", "skip"], list[UUID]]
) -> None:
    rows = states(a=status, b="delivered", c="delivered")
    for on_failed, arrivals in itertools.product(early, (received(B, C), received(B, C, A))):
        report = check(ROWS, arrivals, status=rows, on_failed=on_failed, drained=False, in_flight=1)
        disorder = [finding.event_id for finding in report.findings if finding.kind == "disorder"]
        assert disorder == early[on_failed]


def test_a_replay_is_delivered_once_more_and_outside_the_order() -> None:
    rows = [*ROWS, Committed("shop", A, "order-1", 4)]
    report = check(rows, received(A, B, C, A))
    assert report.ok
    assert report.events == 3
    assert found(check(rows, received(A, B, C, A, A))) == [("duplicate", A)]


def test_other_bytes_are_altered_in_every_delivery_that_has_them() -> None:
    [row] = rows = [Committed("shop", A, None, 1, b'{"total": 42}')]
    assert check(rows, received(A, payload=row.payload)).ok
    assert check(rows, received(A)).ok
    assert check([row._replace(payload=None)], received(A, payload=b"1")).ok
    report = check(rows, received(A, A, payload=b'{"total": 43}'), in_flight=1)
    assert found(report) == [("altered", A), ("altered", A)]
    assert "13 bytes instead of 13, different from byte 12 on" in report.findings[0].text
    assert found(check([Committed("shop", A, None, 1, b"x")], received(A, payload=b""))) == [("altered", A)]


def test_a_report_is_a_table_and_the_first_findings_in_words() -> None:
    rows = [Committed("shop", UUID(int=number), None, number) for number in range(1, 1_031)]
    text = str(check(rows, received(*(row.event_id for row in rows[30:]))))
    lines = text.splitlines()
    assert [line.rsplit(maxsplit=1) for line in lines[:4]] == [
        *(["events", "1,030"], ["received", "1,000"], ["received again", "0"], ["lost", "30"])
    ]
    assert len(set(map(len, lines[:4]))) == 1, "the numbers stand below one another"
    assert lines[11] == f"lost      shop {UUID(int=1)}: position 1 was never received"
    assert lines[-1] == "and 10 more"
    assert len(lines) == 11 + 20 + 1
    assert "more" not in str(check(ROWS, []))


@dataclass
class History:
    """A history in which every promise was kept: what ``check`` is given."""

    committed: list[Committed]
    received: list[Received]
    status: dict[tuple[str, UUID], str]
    in_flight: dict[tuple[str, UUID], int] = field(default_factory=dict)
    on_failed: Literal["block", "skip"] = "block"

    def check(self) -> Report:
        options = {"status": self.status, "in_flight": self.in_flight, "on_failed": self.on_failed}
        return check(self.committed, self.received, **options)  # type: ignore[arg-type]


def kept(chance: random.Random, events: int) -> History:
    """Several destinations and keys; some events fail or are discarded, some come again."""
    history = History([], [], {}, on_failed=chance.choice(["block", "skip"]))
    queues: dict[object, list[Committed]] = {}
    for position in range(1, events + 1):
        destination, key = chance.choice(["shop", "mail"]), chance.choice(["one", "two", None])
        row = Committed(destination, UUID(int=position), key, position, chance.randbytes(4))
        history.committed.append(row)
        queues.setdefault((destination, key) if key else position, []).append(row)
    for queue in queues.values():
        end(history, queue, chance)
    ready = list(queues.values())
    while ready := [queue for queue in ready if queue]:
        row = chance.choice(ready).pop(0)
        deliver(history, row, chance)
    return history


def end(history: History, queue: list[Committed], chance: random.Random) -> None:
    """Decide how each row ends; under ``block`` only the last row of a key may fail: others would wait."""
    for row in list(queue):
        status = chance.choices(["delivered", "failed", "discarded"], [8, 1, 1])[0]
        if status == "failed" and history.on_failed == "block" and row is not queue[-1]:
            status = "discarded"
        history.status[row.destination, row.event_id] = status
        if status != "delivered":
            queue.remove(row)


def deliver(history: History, row: Committed, chance: random.Random) -> None:
    """Deliver: some rows are pruned at once, and some come twice, as a fault caught them in flight."""
    pair = row.destination, row.event_id
    receipt = Received(*pair, row.payload, chance.choice([True, None]))
    history.received.append(receipt)
    if chance.random() < 0.1:
        history.in_flight[pair] = 1
        place = chance.randint(history.received.index(receipt) + 1, len(history.received))
        history.received.insert(place, receipt)
    if chance.random() < 0.1:
        del history.status[pair]


def damage(history: History, kind: Kind, chance: random.Random) -> bool:
    """Break one promise, if there is one of this kind to break."""
    if kind in ("phantom", "duplicate", "lost", "altered", "unsigned"):
        return bool(history.received) and damage_receipt(history, kind, chance.choice(history.received))
    if kind == "disorder":
        return swap_neighbours(history)
    came = [(receipt.destination, receipt.event_id) for receipt in history.received]
    came = [pair for pair in came if pair not in history.in_flight]
    if came:
        history.status[chance.choice(came)] = {"stuck": "pending", "untrue": "failed"}[kind]
    return bool(came)


def damage_receipt(history: History, kind: Kind, receipt: Received) -> bool:
    at = history.received.index(receipt)
    if kind == "phantom":
        history.received.insert(at, receipt._replace(event_id=STRANGER))
    elif kind == "duplicate":
        history.received.append(receipt)
    elif kind == "lost":
        history.received = [other for other in history.received if other.event_id != receipt.event_id]
    elif kind == "altered":
        history.received[at] = receipt._replace(payload=(receipt.payload or b"") + b"!")
    else:
        history.received[at] = receipt._replace(signed=False)
    return True


def swap_neighbours(history: History) -> bool:
    """Exchange the first deliveries of two events of one key that follow one another."""
    came = {(receipt.destination, receipt.event_id) for receipt in history.received}
    last: dict[tuple[str, str], Committed] = {}
    for row in history.committed:
        if row.key is None or (row.destination, row.event_id) not in came:
            continue
        before = last.setdefault((row.destination, row.key), row)
        if before is not row:
            other = {before.event_id: row, row.event_id: before}
            history.received = [
                exchanged(receipt, other.get(receipt.event_id)) for receipt in history.received
            ]
            history.in_flight = {(row.destination, row.event_id): 9, (before.destination, before.event_id): 9}
            return True
    return False


def exchanged(receipt: Received, other: Committed | None) -> Received:
    return receipt if other is None else receipt._replace(event_id=other.event_id, payload=other.payload)


@given(st.integers(0, 2**32), st.integers(0, 40))
def test_a_random_history_that_kept_its_promises_gives_no_finding(seed: int, events: int) -> None:
    report = kept(random.Random(seed), events).check()
    assert report.ok, str(report)


@given(st.integers(0, 2**32), st.integers(0, 40), st.sampled_from(KINDS))
def test_damage_of_each_kind_gives_a_finding_of_its_kind(seed: int, events: int, kind: Kind) -> None:
    chance = random.Random(seed)
    history = kept(chance, events)
    if damage(history, kind, chance):
        assert history.check().counts[kind] > 0
    else:
        assert history.check().ok


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
