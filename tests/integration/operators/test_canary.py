"""The test event that proves the path, in real tables: one row, whatever becomes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from relaybox import Destination, Event, Outbox, Reject
from relaybox.cli.listen import Monitor
from relaybox.core.event import TEST_TYPE
from relaybox.core.outcome import Failed
from relaybox.operate.admin import CanaryRows
from relaybox.stores.ledger import Filter
from relaybox.stores.store import DeadLetter, Settlement
from tests.databases import KINDS
from tests.integration.operated import Operated
from tests.trips import counted
from tests.waiting import await_for

on_each_kind = pytest.mark.parametrize("outbox", KINDS, indirect=True)
Migrated = Callable[[str], str]


@on_each_kind
async def test_the_one_that_is_left_is_found_wherever_it_is(outbox: Operated) -> None:
    rows = CanaryRows(outbox.admin, outbox.ledger, "mail")
    assert await rows.left() is None
    await outbox.admin.test("mail")
    await outbox.fail("mail")
    assert await rows.left() is None, "the relay counts an operator's event as its own"
    id_ = await rows.send()
    assert (await rows.left()).id == id_  # type: ignore[union-attr]
    assert await CanaryRows(outbox.admin, outbox.ledger, "web").left() is None
    await outbox.back_off("mail")
    assert (await rows.left()).id == id_  # type: ignore[union-attr]
    outbox.change(id_, next_attempt_at=sa.func.now())
    [claimed] = (await outbox.claim("mail")).deliveries
    assert (await rows.left()).id == id_  # type: ignore[union-attr]
    await outbox.store.settle([Settlement(claimed, Failed("422"))])
    entry = await rows.left()
    assert entry is not None
    assert (entry.id, entry.status, entry.error_message) == (id_, "failed", "422")


@on_each_kind
async def test_one_that_failed_is_forgotten_with_its_attempts_and_no_other_is(outbox: Operated) -> None:
    rows = CanaryRows(outbox.admin, outbox.ledger, "mail")
    failed = await rows.send()
    other = outbox.emit("mail")
    await outbox.fail("mail")
    waiting = await rows.send()
    await rows.forget(waiting)
    await rows.forget(failed)
    assert {row.id for row in outbox.rows()} == {other, waiting}
    assert (await rows.look(failed), len(await outbox.ledger.entries.attempts(failed))) == (None, 0)
    assert len(await outbox.ledger.entries.attempts(other)) == 1
    assert outbox.audit() == []


@on_each_kind
async def test_a_look_is_one_question(outbox: Operated) -> None:
    rows = CanaryRows(outbox.admin, outbox.ledger, "mail")
    id_ = await rows.send()
    with counted(outbox.store.driver) as asked:
        assert (await rows.look(id_)).id == id_  # type: ignore[union-attr]
    assert [len(queries) for queries in asked] == [1]


@on_each_kind
async def test_a_canary_that_failed_is_not_a_dead_letter(outbox: Operated) -> None:
    await CanaryRows(outbox.admin, outbox.ledger, "mail").send()
    other = outbox.emit("mail")
    claimed = (await outbox.claim("mail")).deliveries
    settlements = [Settlement(delivery, Failed("422")) for delivery in claimed]
    await outbox.store.settle(settlements, dead_letter=DeadLetter("spare"))
    assert [row.event_id for row in outbox.rows(destination="spare")] == [other]
    assert len(outbox.rows(destination="mail", status="failed")) == 2


@asynccontextmanager
async def running(outbox: Outbox, monitor: Monitor) -> AsyncIterator[Any]:
    relay = outbox.relay(observers=monitor.observers)
    task = asyncio.create_task(relay.run(signals=False))
    try:
        yield relay
    finally:
        relay.stop()
        await task


@pytest.mark.full
async def test_a_receiver_that_refuses_it_gets_one_after_the_other_and_leaves_one_row(
    migrated_database: Migrated,
) -> None:
    graves = Destination("graves", "console:")
    outbox = Outbox(
        migrated_database("sqlite"), destinations=[graves], canary="1s", canary_destination="on_order"
    )
    seen: list[str] = []

    @outbox.handler("order.*", name="on_order", dead_letter="graves")
    async def on_order(event: Event) -> None:
        seen.append(event.type)
        raise Reject("422 unknown event type")

    monitor = Monitor(outbox)
    async with outbox.admin("test") as admin:
        async with running(outbox, monitor) as relay:
            await await_for(lambda: len(seen) >= 4)
            await await_for(lambda: relay.canary.refused is not None)
            problems = [problem async for problem in monitor._problems(admin, relay)]
        page = await admin.events(Filter())
    assert set(seen) == {TEST_TYPE}
    assert len(page.entries) == 1
    assert [(one.destination, one.reason) for one in problems] == [
        ("on_order", "its test event was refused: 422 unknown event type")
    ]


@pytest.mark.full
async def test_relays_one_after_the_other_leave_one_where_it_cannot_be_sent(
    migrated_database: Migrated,
) -> None:
    url = migrated_database("sqlite")
    place = Destination("runner", "console:")
    settings: dict[str, Any] = {"destinations": [place], "canary": "1h", "canary_destination": "runner"}
    outbox = Outbox(url, **settings)
    async with outbox.admin("test") as admin:
        await admin.pause("runner", "tea")
        for _ in range(3):
            again = Outbox(url, **settings)
            async with running(again, Monitor(again)) as relay:
                await await_for(lambda relay=relay: relay.canary._event is not None)
        assert len((await admin.events(Filter())).entries) == 1


async def test_a_circuit_that_nobody_waits_for_is_not_a_reason(migrated_database: Migrated) -> None:
    dead = Destination("web", "http://127.0.0.1:1/", allow=["127.0.0.0/8"])
    outbox = Outbox(migrated_database("sqlite"), destinations=[dead])
    monitor = Monitor(outbox)
    async with outbox.admin("test") as admin, running(outbox, monitor) as relay:
        await admin.test("web")
        await await_for(lambda: any(monitor._flow.stops()))
        problems = [problem async for problem in monitor._problems(admin, relay)]
        assert [problem.destination for problem in problems] == ["web"]
        await admin.pause("web", "tea")
        monitor._health._at -= 10.0
        assert [stop.destination for stop in monitor._flow.stops()] == ["web"]
        assert [problem async for problem in monitor._problems(admin, relay)] == []
        # While the database is away, what the relay saw itself is all there is.
        monitor._health._at = float("-inf")
        monitor._health._task = asyncio.create_task(asyncio.sleep(60))
        found = [problem async for problem in monitor._problems(admin, relay)]
        assert [problem.destination for problem in found] == [None, "web"]
        await monitor._health.close()
