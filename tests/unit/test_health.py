"""When deliveries count as flowing."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from relaybox.operate.health import judge, patience
from relaybox.operate.why import is_alive
from relaybox.stores.journal import Flow
from relaybox.stores.ledger import DestinationState, Relay

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
IDLE = Flow(pending=False, due_seconds=None, settles=False)
STUCK = Flow(pending=True, due_seconds=90.0, settles=False)


def relay(ago: float = 1.0) -> Relay:
    return Relay("relay-1", "host", 1, "1", NOW, NOW - timedelta(seconds=ago), None, NOW)


def place(**changes: Any) -> DestinationState:
    return replace(DestinationState("shop", None, None, None, None, "closed", None, None, NOW), **changes)


def reasons(
    flow: Flow,
    place: DestinationState | None = None,
    relays: tuple[Relay, ...] = (relay(),),
    *,
    rate: float | None = None,
) -> list[str]:
    places = {} if place is None else {"shop": place}
    health = judge({"shop": flow}, places, relays, {"shop": patience(rate, 60.0)})
    assert health.ready is not bool(health.problems)
    return [problem.reason for problem in health.problems]


def test_work_that_is_due_while_nothing_settles_is_not_unless_it_is_meant_to_wait() -> None:
    assert reasons(IDLE, relays=()) == []
    assert reasons(STUCK) == ["work is due and nothing settles"]
    assert reasons(Flow(True, 90.0, settles=True)) == []
    assert reasons(Flow(True, 59.0, settles=False)) == []
    assert reasons(STUCK, rate=1 / 100) == []
    assert reasons(Flow(True, 201.0, settles=False), rate=1 / 100) == ["work is due and nothing settles"]
    assert reasons(STUCK, rate=50.0) == ["work is due and nothing settles"]


def test_a_relay_is_gone_when_every_page_says_so() -> None:
    work = Flow(True, 1.0, settles=True)
    assert reasons(work, relays=(relay(16.0),)) == ["no relay is alive, and work is due"]
    for ago in (1.0, 14.0, 16.0, 29.0, 31.0):
        assert bool(reasons(work, relays=(relay(ago),))) is not is_alive(relay(ago)), ago


def test_an_open_circuit_is_not_well_and_a_pause_is_meant() -> None:
    waits = Flow(pending=True, due_seconds=None, settles=True)
    assert reasons(waits, place(circuit="open", circuit_reason="refused")) == ["its circuit is open: refused"]
    assert reasons(waits, place(circuit="half_open")) == ["its circuit is half-open: no reason given"]
    assert reasons(IDLE, place(circuit="open", circuit_reason="refused")) == []
    assert reasons(STUCK, place(paused_at=NOW, circuit="open")) == []
    over = place(paused_at=NOW, paused_until=NOW - timedelta(seconds=1))
    assert reasons(STUCK, over) == ["work is due and nothing settles"]
