"""The order in which reasons are given, without a database."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest

from relaybox.operate.why import SILENT, explain
from relaybox.stores.ledger import DestinationState, Entry, Relay, State
from tests.unit.deliveries import entry

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
LATER, EARLIER = NOW + timedelta(hours=1), NOW - timedelta(hours=1)
ENTRY = entry(EARLIER, next_attempt_at=EARLIER, seen_at=NOW)
CLOSED = DestinationState("shop", None, None, None, None, "closed", None, None, NOW)
PAUSED = replace(CLOSED, paused_at=EARLIER, paused_by="ann", pause_reason="tea")
OPEN = replace(CLOSED, circuit="open", circuit_until=LATER, circuit_reason="refused")
RELAY = Relay("r", "h", 1, "1", EARLIER, NOW, None, NOW)
HEAD = replace(ENTRY, id=UUID(int=9), event_id=UUID(int=9), position=0)


def kind(row: Entry, place: DestinationState = CLOSED, head: Entry | None = None, known: str = "shop") -> str:
    return explain(row, {"shop": place}, {known}, [RELAY], head).kind


def text(row: Entry, place: DestinationState = CLOSED, relays: tuple[Relay, ...] = (RELAY,)) -> str:
    return explain(row, {"shop": place}, {"shop"}, relays).text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"status": "delivered", "delivered_at": NOW}, "delivered"),
        ({"status": "failed"}, "failed"),
        ({"status": "discarded"}, "discarded"),
        ({"leased_until": LATER, "lease_owner": "r"}, "sending"),
    ],
)
def test_what_is_final_or_being_sent_is_so_whatever_else_holds(
    changes: dict[str, Any], expected: str
) -> None:
    held = replace(PAUSED, circuit="open")
    assert kind(replace(ENTRY, **changes), held, HEAD, known="other") == expected


def test_a_pause_comes_before_a_circuit_before_an_unknown_name_before_the_key_before_the_time() -> None:
    waiting = replace(ENTRY, next_attempt_at=LATER)
    both = replace(OPEN, paused_at=EARLIER, paused_by="ann")
    assert kind(waiting, both, HEAD, known="other") == "paused"
    assert kind(waiting, OPEN, HEAD, known="other") == "circuit_open"
    assert kind(waiting, CLOSED, HEAD, known="other") == "unknown_destination"
    assert kind(waiting, CLOSED, HEAD) == "parked"
    assert kind(waiting, CLOSED, waiting) == "scheduled"
    assert kind(ENTRY, CLOSED, ENTRY) == "due"
    assert kind(ENTRY, replace(PAUSED, paused_until=NOW)) == "due"
    assert kind(ENTRY, replace(PAUSED, paused_until=LATER)) == "paused"


def test_what_is_held_and_not_due_says_both() -> None:
    reason = text(replace(ENTRY, next_attempt_at=LATER), PAUSED)
    assert reason.endswith("`relaybox resume shop`; it is not due before 2026-01-01 13:00:00 UTC either")
    assert "the next probe is due now" in text(ENTRY, replace(OPEN, circuit_until=EARLIER))
    assert "the next probe comes at 2026-01-01 13:00:00 UTC" in text(ENTRY, OPEN)


def test_a_parked_row_with_nothing_before_it_waits_for_the_sweep() -> None:
    parked = replace(ENTRY, next_attempt_at=None)
    assert parked.state is State.PARKED
    reason = explain(parked, {}, {"shop"}, [RELAY], parked)
    assert (reason.kind, reason.behind) == ("parked", None)
    assert "will be made due by a relay's next sweep" in reason.text


def test_an_event_without_a_route_and_a_lease_that_ran_out_say_so() -> None:
    reason = explain(replace(ENTRY, destination=""), {}, {"shop"}, [RELAY])
    assert reason.kind == "unrouted"
    assert "no route takes its event type" in reason.text
    reason = explain(replace(ENTRY, leased_until=EARLIER, lease_owner="r"), {}, {"shop"}, [RELAY])
    assert reason.kind == "lease_expired"
    assert "was held by r until its lease ran out at 2026-01-01 11:00:00 UTC" in reason.text
    assert "it is claimed again by" in reason.text


def test_a_function_over_its_time_is_the_reason_for_itself_and_for_those_behind_it() -> None:
    sending = replace(HEAD, leased_until=LATER, lease_owner="r", last_attempt_at=EARLIER)
    parked = replace(ENTRY, next_attempt_at=None)
    over = "it was claimed at 2026-01-01 11:00:00 UTC, and its function is over its time of 30 s"
    for row in (sending, parked):
        assert over in explain(row, {}, {"shop"}, [RELAY], sending, timeouts={"shop": 30.0}).text
    assert over not in explain(sending, {}, {"shop"}, [RELAY], timeouts={"shop": 3600.0}).text
    assert over not in explain(sending, {}, {"shop"}, [RELAY]).text


def test_crashes_are_named() -> None:
    again = replace(ENTRY, leased_until=EARLIER, lease_owner="r", crashes=1)
    assert "it is claimed again, apart from others, by" in text(again)
    assert "is claimed apart from others, because its relay died or was stopped 2 times, by" in text(
        replace(ENTRY, crashes=2)
    )
    failed = replace(ENTRY, status="failed", attempts=5, crashes=6, error_message="the relay died 6 times")
    assert "after 5 attempts; its relay died or was stopped 6 times: the relay died 6 times" in text(failed)
    delivered = replace(ENTRY, status="delivered", attempts=1, crashes=1, delivered_at=LATER)
    assert text(delivered).endswith(", 1 attempt in all; its relay died or was stopped 1 time")


def test_a_silent_relay_does_not_count() -> None:
    silent = replace(RELAY, last_seen_at=NOW - SILENT)
    assert "no relay" not in text(ENTRY)
    assert "the last was seen at 2026-01-01 11:59:45 UTC" in text(ENTRY, relays=(silent,))
    assert "when a relay runs, but none runs now; `relaybox relay`" in text(ENTRY, relays=())


def test_the_advice_for_one_of_several_deliveries_names_its_destination() -> None:
    failed = replace(ENTRY, destination="their shop", status="failed", error_message="422")
    alone = explain(failed, {}, {"their shop"}, [RELAY], shared={HEAD.event_id})
    assert alone.text.endswith(f"422; `relaybox retry {failed.id}` or `relaybox discard {failed.id}`")
    one = f"{failed.id} --destination 'their shop'"
    beside = explain(failed, {}, {"their shop"}, [RELAY], shared={failed.event_id})
    assert beside.text.endswith(f"422; `relaybox retry {one}` or `relaybox discard {one}`")
    behind = explain(replace(ENTRY, id=UUID(int=7)), {}, {"shop"}, [RELAY], failed, {failed.event_id})
    assert behind.text.endswith(f"`relaybox discard {one}`")


def test_an_attempt_that_was_given_back_is_not_called_attempt_0() -> None:
    waiting = replace(ENTRY, next_attempt_at=LATER, last_attempt_at=EARLIER, error_message="503")
    assert text(waiting) == (
        "backs off because its destination was unavailable, which is not counted as an attempt: 503; "
        "the next one is at 2026-01-01 13:00:00 UTC"
    )
    assert "backs off after attempt 2 of 5, which failed: 503" in text(replace(waiting, attempts=2))
