"""What operators ask, on every database."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from relaybox.core.outcome import Delivered
from relaybox.database.steps import Steps
from relaybox.errors import ConfigError
from relaybox.stores.ledger import Choice, Filter, State
from relaybox.stores.sql.expressions import Part
from relaybox.stores.sql.search import Search
from tests.integration.operated import Operated, details, stop_counting_at

FAILED = Filter(status="failed", destination="mail")


async def test_stats_count_each_state_of_each_destination(outbox: Operated) -> None:
    outbox.emit("mail")
    await outbox.deliver("mail")
    outbox.emit("mail")
    await outbox.fail("mail")
    outbox.emit("mail", deliver_at=datetime.now(UTC) + timedelta(hours=1))
    outbox.emit("mail")
    await outbox.claim("mail")
    outbox.emit("shop", "mail")
    await outbox.back_off("shop")
    outbox.emit("shop")
    assert (await outbox.claim("shop")).parked == 1
    outbox.emit("gone")
    outbox.beat()
    stats = await outbox.admin.stats()
    by_name = {destination.name: destination for destination in stats.destinations}
    assert list(by_name) == ["gone", "mail", "shop", "spare", "web"]
    mail, shop = by_name["mail"].counts, by_name["shop"].counts
    assert (mail.due, mail.scheduled, mail.parked, mail.sending) == (1, 1, 0, 1)
    assert (mail.delivered, mail.failed, mail.capped) == (1, 1, frozenset())
    assert (shop.due, shop.scheduled, shop.parked, shop.sending) == (0, 1, 1, 0)
    assert shop.oldest_pending is not None
    assert abs(shop.oldest_pending - datetime.now(UTC)) < timedelta(minutes=1)
    assert by_name["spare"].counts.oldest_pending is None
    assert [name for name, one in by_name.items() if not one.configured] == ["gone"]
    total = stats.total
    assert (total.due, total.scheduled, total.parked, total.sending) == (2, 2, 1, 1)
    assert (total.delivered, total.failed) == (1, 1)
    assert [relay.name for relay in stats.relays] == ["relay-1"]


async def test_stats_say_what_holds_a_destination_up(outbox: Operated) -> None:
    until = datetime.now(UTC) + timedelta(hours=1)
    await outbox.admin.pause("mail", "maintenance", until)
    await outbox.store.open_circuit("shop", 3600.0, "refused")
    places = {one.name: one.place for one in (await outbox.admin.stats()).destinations}
    mail, shop = places["mail"], places["shop"]
    assert mail is not None
    assert shop is not None
    assert (mail.paused, mail.paused_by, mail.pause_reason) == (True, "tester", "maintenance")
    assert mail.paused_until is not None
    assert abs(mail.paused_until - until) < timedelta(milliseconds=1)
    assert (shop.circuit, shop.circuit_reason, shop.paused) == ("open", "refused", False)
    assert places["spare"] is None


async def test_stats_say_why_the_next_one_is_tried_again(outbox: Operated) -> None:
    async def retrying() -> str | None:
        by_name = {one.name: one.counts for one in (await outbox.admin.stats()).destinations}
        return by_name["mail"].retrying

    later = datetime.now(UTC) + timedelta(days=1)
    outbox.emit("mail", deliver_at=later)
    assert await retrying() is None
    outbox.emit("mail")
    await outbox.back_off("mail", "401 Unauthorized")
    assert await retrying() == "401 Unauthorized"
    failed = outbox.emit("mail")
    await outbox.fail("mail", "422")
    outbox.change(failed, next_attempt_at=None)
    assert await retrying() == "401 Unauthorized"


async def test_events_are_listed_newest_first_in_pages(outbox: Operated) -> None:
    ids = [outbox.emit("mail") for _ in range(5)]
    first = await outbox.admin.events(limit=2)
    assert [entry.id for entry in first.entries] == ids[:2:-1]
    second = await outbox.admin.events(limit=2, cursor=first.cursor)
    assert [entry.id for entry in second.entries] == ids[2:0:-1]
    third = await outbox.admin.events(limit=2, cursor=second.cursor)
    assert [entry.id for entry in third.entries] == ids[:1]
    assert third.cursor is None


async def test_a_filter_finds_what_it_says(outbox: Operated) -> None:
    failed = outbox.emit("mail", event_type="mail.sent", aggregate_id="a-1")
    await outbox.fail("mail", "550 No such 100% user_x")
    delivered = outbox.emit("mail")
    await outbox.deliver("mail")
    later = outbox.emit("mail", deliver_at=datetime.now(UTC) + timedelta(hours=1))
    sending = outbox.emit("mail")
    await outbox.claim("mail")
    due = outbox.emit("mail")
    head = outbox.emit("shop", key="k")
    await outbox.back_off("shop")
    parked = outbox.emit("shop", key="k")
    await outbox.claim("shop")
    other = outbox.emit("shop", "mail", key="x")
    both = [row.id for row in outbox.rows(event_id=other)]
    outbox.change(due, created_at=datetime.now(UTC) - timedelta(days=2))

    async def found(**given: Any) -> set[UUID]:
        entries = (await outbox.admin.events(Filter(**given), limit=100)).entries
        return {entry.id for entry in entries}

    states: dict[Choice, set[UUID]] = {
        "failed": {failed},
        "delivered": {delivered},
        "completed": {delivered},
        "sending": {sending},
        "processing": {sending},
        "scheduled": {later, head},
        "parked": {parked},
        "due": {due, *both},
        "pending": {due, later, head, parked, *both},
        "discarded": set(),
    }
    for state, expected in states.items():
        assert await found(status=state) == expected, state
    assert await found(status="pending", destination="shop") == {head, parked, other}
    assert await found(status="failed", destination="shop") == set()
    assert await found(event_type="mail.sent") == {failed}
    assert await found(aggregate_type="Order", aggregate_id="a-1") == {failed}
    assert await found(aggregate_id="a-1") == {failed}
    assert await found(ordering_key="k") == {head, parked}
    assert await found(event_id=other) == set(both)
    assert await found(event_id=other, destination="mail") == set(both) - {other}
    assert await found(event_id=uuid4()) == set()
    assert await found(error="NO SUCH 100%") == {failed}
    assert await found(error="userax") == set()
    assert await found(until=datetime.now(UTC) - timedelta(days=1)) == {due}
    assert due not in await found(since=datetime.now(UTC) - timedelta(days=1))
    assert failed in await found(since=datetime.now(UTC) - timedelta(days=1))


async def test_a_filter_of_an_unknown_destination_is_answered_with_the_nearest(outbox: Operated) -> None:
    outbox.emit("gone")
    assert len((await outbox.admin.events(Filter(destination="gone"))).entries) == 1
    with pytest.raises(ConfigError, match=r"no destination is called 'shpo'; did you mean 'shop'\?"):
        await outbox.admin.events(Filter(destination="shpo"))


async def test_an_event_is_found_by_its_id_with_all_its_deliveries(outbox: Operated) -> None:
    event = outbox.emit("shop", "mail", "spare", headers={"trace": "1"})
    await outbox.back_off("mail")
    found = await outbox.admin.event(event)
    assert [detail.entry.destination for detail in found] == ["shop", "mail", "spare"]
    mail = found[1]
    assert mail.content is not None
    assert details(mail.content.payload) == {"total": 42}
    assert details(mail.content.headers) == {"trace": "1"}
    [attempt] = mail.attempts
    assert (attempt.attempt, attempt.relay) == (1, "relay-1")
    assert attempt.error_message == "500 Internal Server Error"
    alone = await outbox.admin.event(mail.entry.id)
    assert [detail.entry.id for detail in alone] == [mail.entry.id]
    assert await outbox.admin.event(uuid4()) == ()


async def test_an_event_is_found_when_its_first_delivery_is_gone(outbox: Operated) -> None:
    event = outbox.emit("mail", "shop")
    await outbox.settle("mail", Delivered(keep=False))
    assert [detail.entry.destination for detail in await outbox.admin.event(event)] == ["shop"]


async def test_a_search_through_windows_finds_all(outbox: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_counting_at(3, monkeypatch)
    ids = [outbox.emit("mail", event_type="rare" if number % 5 == 0 else "often") for number in range(20)]
    page = await outbox.admin.events(Filter(event_type="rare", status="pending"), limit=10)
    assert [entry.id for entry in page.entries] == ids[::5][::-1]
    assert page.cursor is None
    assert (await outbox.admin.discard(Filter(event_type="rare", status="pending"))).affected == 4
    assert {row.id for row in outbox.rows(status="discarded")} == set(ids[::5])


async def test_a_search_finds_all_though_there_are_more_than_were_counted(
    outbox: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [outbox.emit("mail") for _ in range(6)]
    await outbox.fail("mail")
    stop_counting_at(3, monkeypatch)
    length, counted = Search._length, []

    def less_at_first(search: Search, part: Part) -> Steps[int]:
        counted.append(part)
        return 3 if len(counted) == 1 else (yield from length(search, part))

    monkeypatch.setattr(Search, "_length", less_at_first)
    found = [entry.id for part in [part async for part in outbox.admin.walk(FAILED)] for entry in part]
    assert found == ids


async def test_counts_stop_at_the_cap(outbox: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_counting_at(3, monkeypatch)
    for _ in range(5):
        outbox.emit("mail")
    total = (await outbox.admin.stats()).total
    assert (total.due, total.capped) == (3, frozenset({"due"}))


async def test_the_states_of_entries_follow_the_databases_clock(outbox: Operated) -> None:
    event = outbox.emit("mail")
    [entry] = await outbox.ledger.entries.find(event)
    assert entry.state is State.DUE
    await outbox.claim("mail")
    [entry] = await outbox.ledger.entries.find(event)
    assert (entry.state, entry.backing_off) == (State.SENDING, False)
