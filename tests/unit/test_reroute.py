"""Where an event goes that was stored without a route: it gets the rows of one that is emitted now."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox.core.settings import Destination, Route, Settings
from relaybox.database.dialects import POSTGRESQL
from relaybox.database.statements.delivery import INSERTED
from relaybox.emit.row import Call, RowBuilder, ordering_key
from relaybox.errors import InvalidField, StoreError
from relaybox.relay.upkeep.caretaker import Caretaker
from relaybox.relay.upkeep.route import INTERVAL, Reroute, StoredRouter, stored_call
from relaybox.relay.upkeep.schedule import Round
from relaybox.relay.upkeep.tally import DatabaseTime, Tally
from relaybox.stores.upkeep import Member, Slice, StoredEvent, Target
from tests.unit.upkeep import NOON, Clock, going_on
from tests.waiting import PATIENCE, await_for


def by_customer(call: Call) -> str | None:
    return str(call.payload["customer"]) if call.payload["customer"] else None


ORDERINGS: list[Any] = ["aggregate", "tenant", "event_type", "none", by_customer]
DESTINATIONS = [
    *(Destination(f"by {n}", "console:", ordered=True, ordering=o) for n, o in enumerate(ORDERINGS)),
    Destination("plain", "console:", max_attempts=8),
]
ROUTE = Route("order.*", to=[destination.name for destination in DESTINATIONS])
CALLS = [
    Call("Order", 7, "order.paid", {"customer": 3}, tenant="ü"),
    Call("Order", "o" * 255, "order.paid.v2", {"customer": None}, tenant="t", headers={"a": 1}),
    Call("Order", UUID(int=7), "order.paid", {"customer": 1}, key="k" * 1000, max_attempts=9),
    Call("Order", 7, "order.paid", {"customer": 1}, key=None, idempotency_key="once"),
]


def stored(call: Call, *, scheduled: bool = False, **changed: Any) -> StoredEvent:
    """Return the row of an event that no route takes."""
    [row] = RowBuilder(Settings(unrouted="store")).build(call, POSTGRESQL).rows
    values = dict(zip(INSERTED, row, strict=True)) | changed
    del values["id"], values["destination"], values["next_attempt_at"]
    values["event_id"] = UUID(values["event_id"])
    return StoredEvent(**values, scheduled=scheduled)


def emitted(call: Call, settings: Settings) -> list[Target]:
    rows = [
        dict(zip(INSERTED, row, strict=True)) for row in RowBuilder(settings).build(call, POSTGRESQL).rows
    ]
    return [Target(row["destination"], row["ordering_key"], row["max_attempts"]) for row in rows]


@pytest.mark.parametrize("call", CALLS)
def test_a_stored_event_gets_the_keys_and_attempts_that_emit_would_give_it(call: Call) -> None:
    settings = Settings(destinations=DESTINATIONS, routes=[ROUTE])
    targets = StoredRouter(settings).targets(stored(call))
    assert list(targets) == emitted(call, settings)
    assert len(targets) == len(DESTINATIONS)


def test_a_destination_without_order_has_no_key() -> None:
    call = Call("Order", 1, "order.paid", {}, key="k")
    assert ordering_key(call, ("Order", "1"), Destination("plain", "console:")) is None
    assert ordering_key(call, ("Order", "1"), Destination("one", "console:", ordered=True)) == "k"
    with pytest.raises(InvalidField, match="key"):
        stored(Call("Order", 1, "order.paid", {}, key=""))


def test_the_call_is_recognised_by_its_row() -> None:
    call = Call("Order", 7, "order.paid", {"a": [1]}, headers={"h": 1}, tenant="t", max_attempts=3)
    made = stored_call(stored(call))
    assert made == Call(
        "Order", "7", "order.paid", {"a": [1]}, headers={"h": 1, "tenant": "t"}, tenant="t", max_attempts=3
    )
    assert stored_call(stored(Call("Order", 7, "order.paid", b"\0"))).payload == b"\0"


def test_a_payload_that_cannot_be_read_does_not_matter_where_no_key_needs_it() -> None:
    event = stored(CALLS[0], payload=None, payload_data=b"?", payload_encoding="of the future")
    plain = Settings(destinations=DESTINATIONS, routes=[Route("*", to="plain")])
    assert [target.destination for target in StoredRouter(plain).targets(event)] == ["plain"]
    with pytest.raises(ValueError, match="of the future"):
        StoredRouter(Settings(destinations=DESTINATIONS, routes=[ROUTE])).targets(event)


def test_what_is_scheduled_waits_only_where_it_would_hold_up_a_key() -> None:
    event = stored(CALLS[0], scheduled=True)
    for to, count in (("plain", 1), (["plain", "by 0"], 0), (["plain", "by 3"], 2)):
        router = StoredRouter(Settings(destinations=DESTINATIONS, routes=[Route("order.*", to=to)]))
        assert router.takes("order.paid")
        assert len(router.targets(event)) == count
        assert not router.takes("nobody.asked")


class FakeRouter:
    """Sends everything to ``mail``, but for what it cannot tell."""

    def takes(self, event_type: str) -> bool:
        return True

    def targets(self, event: StoredEvent) -> Sequence[Target]:
        if event.event_type == "order.odd":
            raise KeyError("customer")
        return [Target("mail", None, 5)]


@pytest.fixture
def woken() -> list[list[str]]:
    return []


@pytest.fixture
def job(clock: Clock, upkeep: Any, woken: list[list[str]]) -> Reroute:
    return Reroute(upkeep.unrouted, FakeRouter(), lambda names: woken.append(sorted(names)), clock, going_on)


async def test_a_new_term_begins_with_a_round_then_an_interval(
    clock: Clock, upkeep: Any, job: Reroute
) -> None:
    counts = []
    for term, passes in ((1, 0.0), (1, INTERVAL - 1), (1, 1.0), (2, 0.0), (2, 0.0)):
        clock.time += passes
        await job(term, 1)
        counts.append(len(upkeep.asked))
    assert counts == [1, 1, 2, 3, 3]


async def test_who_does_not_lead_begins_with_a_round_and_then_takes_its_turns(
    clock: Clock, upkeep: Any, job: Reroute
) -> None:
    counts = []
    waits, goes_on = (None, None, 0.0), (8, None, INTERVAL)
    for leads, mine, passes in (waits, (7, None, 0.0), goes_on, goes_on, (9, 9, 0.0)):
        clock.time += passes
        upkeep.leads = leads
        await job(mine, 2)
        counts.append(upkeep.terms[:])
    assert counts == [[], [7], [7], [7, 8], [7, 8, 9]]


async def test_who_does_not_lead_tries_again_when_the_term_is_over(upkeep: Any, job: Reroute) -> None:
    upkeep.leads, upkeep.slices = 7, [None]
    assert not (await job(None, 2)).led
    upkeep.leads = 8
    assert (await job(None, 2)).led
    assert upkeep.terms == [7, 8]


async def test_a_round_that_failed_goes_on_at_once_where_it_was(upkeep: Any, job: Reroute) -> None:
    turn = (NOON, 7)
    upkeep.slices = [Slice(3, turn), StoreError("away"), Slice(2, None)]
    with pytest.raises(StoreError):
        await job(1, 1)
    assert await job(1, 1) == Round(2)
    assert upkeep.asked == [None, turn, turn]


async def test_a_round_under_a_term_that_is_over_says_so(upkeep: Any, job: Reroute) -> None:
    upkeep.slices = [None]
    assert await job(1, 1) == Round(0, done=False, led=False)


async def test_lanes_are_woken_after_each_batch_that_has_something_for_them(
    upkeep: Any, job: Reroute, woken: list[list[str]]
) -> None:
    await job.round(1)
    assert woken == []
    upkeep.events = [stored(CALLS[0])]
    upkeep.slices = [Slice(1, (NOON, 1)), StoreError("perhaps committed")]
    with pytest.raises(StoreError):
        await job.round(1)
    assert woken == [["mail"], ["mail"]]


async def test_what_cannot_be_routed_is_said_once_and_again_when_it_is_another(
    upkeep: Any, job: Reroute, caplog: pytest.LogCaptureFixture
) -> None:
    odd = [stored(Call("Order", n, "order.odd", {})) for n in range(3)]
    with caplog.at_level(logging.WARNING):
        for events in (odd[:2], odd[:2], odd[2:], []):
            upkeep.events = events
            await job.round(1)
    first, second = [record.getMessage() for record in caplog.records]
    assert first.startswith("2 events stay unrouted")
    assert str(odd[0].event_id) in first
    assert "KeyError: 'customer'" in first
    assert second.startswith("1 event stays unrouted")


async def test_the_caretaker_routes_soon_after_its_start_with_other_jobs(clock: Clock, upkeep: Any) -> None:
    me = Member(f"host:1:{uuid4()}", "host", 1, "0.1.0")
    tally = Tally(me.name, DatabaseTime(clock, lambda: NOON))
    here = Caretaker(upkeep, [], me, clock, tally, router=FakeRouter())
    assert (await here.once()).routed == Round(0)
    assert (await Caretaker(upkeep, [], me, clock, tally).once()).routed is None
    upkeep.asked.clear()
    task = asyncio.create_task(here.run())
    await await_for(lambda: upkeep.asked)
    here.stop()
    await asyncio.wait_for(task, PATIENCE)
    assert upkeep.asked[0] is None
