"""Bulk actions in the background: at a pace, cancelled half-way, twice at once, in a process that dies."""

from __future__ import annotations

import asyncio
import math
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import pytest
import sqlalchemy as sa

from relaybox import Destination, Outbox
from relaybox.core.fingerprint import fingerprint
from relaybox.core.outcome import Delivered, Failed
from relaybox.errors import ConfigError, StoreError
from relaybox.operate.admin import Admin
from relaybox.operate.bulk import STOPPED, STOPPED_REPLAY, Bulk
from relaybox.operate.pace import Pace
from relaybox.stores.journal import STALLED, Operation
from relaybox.stores.ledger import Filter
from relaybox.stores.store import Settlement
from tests.databases import KINDS
from tests.integration.operated import Operated
from tests.waiting import await_for

pytestmark = pytest.mark.parametrize("outbox", KINDS, indirect=True)
RETRY_SLOWLY = """
import asyncio, sys
from relaybox import Destination, Outbox
from relaybox.operate.bulk import Bulk
from relaybox.stores.ledger import Filter

async def main():
    bulk = Bulk(Outbox(sys.argv[1], destinations=[Destination("mail", "console:")]).admin)
    operation = await bulk.start("ann", "retry", Filter(), rate=5)
    print(operation.id, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
async def bulk(outbox: Operated, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bulk]:
    @asynccontextmanager
    async def open_admin(actor: str) -> AsyncIterator[Admin]:
        yield outbox.admin.acting_as(actor)

    # It looks soon if it was cancelled.
    monkeypatch.setattr("relaybox.operate.runner.BEAT", 0.05)
    opened = Bulk(open_admin)
    yield opened
    await opened.close()


async def failed(outbox: Operated, count: int, destination: str = "mail", **options: object) -> list[UUID]:
    ids = [outbox.emit(destination, **options) for _ in range(count)]
    while claim := (await outbox.claim(destination)).deliveries:
        await outbox.store.settle([Settlement(one, Failed("busy")) for one in claim], on_failed="skip")
    return ids


async def ended(outbox: Operated, id_: UUID) -> Operation:
    async def operation() -> Operation | None:
        found = await outbox.operation(id_)
        return found if found.state != "running" and found.finished_at is not None else None

    over: Operation = await await_for(operation, "the operation has ended")
    return over


async def pending(outbox: Operated, count: int) -> None:
    await await_for(lambda: states(outbox)["pending"] >= count, f"{count} are pending")


def states(outbox: Operated) -> Counter[str]:
    return Counter(row.status for row in outbox.rows())


def between_batches(monkeypatch: pytest.MonkeyPatch, act: Callable[[], Awaitable[None]]) -> None:
    """Have an action wait after each batch, however slow the machine is, and do something meanwhile."""
    turn = Pace.turn

    async def watched(pace: Pace, count: int) -> bool:
        if count == 0:
            await act()
            pace._free_at = 0.0
        going = await turn(pace, count)
        pace._free_at = math.inf if count else 0.0
        return going

    monkeypatch.setattr(Pace, "turn", watched)


async def test_an_operation_does_it_and_says_so(outbox: Operated, bulk: Bulk) -> None:
    await failed(outbox, 30)
    begun = await bulk.start("ann", "retry", Filter(destination="mail"))
    assert (begun.state, begun.total, begun.capped, begun.actor) == ("running", 30, False, "ann")
    assert begun.details == {"filter": {"destination": "mail"}}
    operation = await ended(outbox, begun.id)
    assert (operation.state, operation.done, operation.skipped) == ("done", 30, 0)
    assert states(outbox) == {"pending": 30}
    assert outbox.done() == [("ann", "retry", 30)]


async def test_every_action_can_be_one(outbox: Operated, bulk: Bulk) -> None:
    await failed(outbox, 4)
    replay = await bulk.start("ann", "replay", Filter(status="failed"), to="web")
    assert (await ended(outbox, replay.id)).done == 4
    move = await bulk.start("ann", "move", Filter(destination="web"), to="spare", rate=1000)
    assert (move.total, (await ended(outbox, move.id)).done) == (4, 4)
    discard = await bulk.start("ann", "discard", Filter(status="pending", destination="spare"))
    assert (await ended(outbox, discard.id)).done == 4
    assert states(outbox) == {"failed": 4, "discarded": 4}
    assert [one.action for one in await outbox.admin.operations()] == ["discard", "move", "replay"]


async def test_what_cannot_be_is_refused_before_it_begins(outbox: Operated, bulk: Bulk) -> None:
    for arguments in (
        {"action": "retry", "filter": Filter(status="delivered")},
        {"action": "retry", "filter": Filter(destination="nowhere")},
        {"action": "replay", "filter": Filter(), "to": "nowhere"},
        {"action": "move", "filter": Filter(destination="mail")},
        {"action": "destroy", "filter": Filter()},
        {"action": "retry", "filter": Filter(), "rate": 0},
        {"action": "retry", "filter": Filter(), "rate": float("nan")},
    ):
        with pytest.raises(ConfigError):
            await bulk.start("ann", **arguments)  # type: ignore[arg-type]
    assert await outbox.admin.operations() == ()


async def test_it_keeps_its_pace_and_ends_half_way_when_it_is_cancelled(outbox: Operated, bulk: Bulk) -> None:
    await failed(outbox, 100)
    began = asyncio.get_running_loop().time()
    operation = await bulk.start("ann", "retry", Filter(), rate=5)
    await pending(outbox, 5)
    assert await outbox.admin.cancel(operation.id)
    over = await ended(outbox, operation.id)
    seconds = asyncio.get_running_loop().time() - began
    done = states(outbox)["pending"]
    assert (over.state, over.done, over.error) == ("cancelled", done, None)
    assert 5 <= done <= 5 * (seconds + 1)
    assert states(outbox)["failed"] == 100 - done


async def test_two_operators_who_retry_the_same_rows_retry_each_once(outbox: Operated, bulk: Bulk) -> None:
    await failed(outbox, 200)
    both = await asyncio.gather(*(bulk.start(who, "retry", Filter(), rate=2000) for who in ("ann", "bob")))
    done = [await ended(outbox, operation.id) for operation in both]
    assert {operation.state for operation in done} == {"done"}
    assert sum(operation.done for operation in done) == 200
    assert sum(affected for _, action, _, affected in outbox.audit() if action == "retry") == 200
    assert states(outbox) == {"pending": 200}


async def test_what_a_relay_settles_meanwhile_is_not_discarded(outbox: Operated, bulk: Bulk) -> None:
    for number in range(60):
        outbox.emit("shop", key=f"k{number % 6}")
    held = (await outbox.claim("shop", limit=20)).deliveries
    operation = await bulk.start("ann", "discard", Filter(status="pending", destination="shop"), rate=200)
    assert not await outbox.store.settle([Settlement(one, Delivered()) for one in held])
    discarded = await ended(outbox, operation.id)
    assert states(outbox)["delivered"] == len(held)
    assert states(outbox)["discarded"] == discarded.done
    # Whatever is left has a head that is due: nothing is stuck.
    while claim := (await outbox.claim("shop")).deliveries:
        assert not await outbox.store.settle([Settlement(one, Delivered()) for one in claim])
    assert set(states(outbox)) <= {"delivered", "discarded"}


@pytest.mark.parametrize("saved", [True, False], ids=["another saves it", "it fails for another reason"])
async def test_what_the_filter_no_longer_finds_meanwhile_is_not_discarded(
    outbox: Operated, bulk: Bulk, monkeypatch: pytest.MonkeyPatch, saved: bool
) -> None:
    first, second = await failed(outbox, 2)

    async def change() -> None:
        assert outbox.row(first).status == "discarded"
        if saved:
            assert (await outbox.admin.retry([second])).affected == 1
        else:
            outbox.change(second, error_message="ValueError: another thing")

    between_batches(monkeypatch, change)
    found = Filter(status="failed") if saved else Filter(fingerprint=fingerprint("mail", "busy").hash)
    operation = await bulk.start("ann", "discard", found, rate=1)
    over = await ended(outbox, operation.id)
    assert (over.state, over.done) == ("done", 1)
    assert outbox.row(second).status == ("pending" if saved else "failed")


async def test_a_replay_does_not_take_its_own_copies_though_an_emitters_clock_is_ahead(
    outbox: Operated, bulk: Bulk, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [outbox.emit("mail") for _ in range(4)]
    later = int((datetime.now(UTC) + timedelta(hours=1)).timestamp() * 1000)
    outbox.change(ids[-1], id=UUID(int=later << 80 | 7 << 76 | 2 << 62))
    await outbox.deliver("mail")
    seen: list[Counter[str]] = []

    async def deliver() -> None:
        if not seen:
            await outbox.deliver("mail")
        seen.append(states(outbox))

    between_batches(monkeypatch, deliver)
    operation = await bulk.start("ann", "replay", Filter(destination="mail"), rate=2)
    assert (await ended(outbox, operation.id)).done == 4
    assert seen[0] == {"delivered": 6}
    assert states(outbox) == {"delivered": 6, "pending": 2}


async def test_a_process_that_dies_leaves_a_stalled_operation_and_a_rest_to_do(
    outbox: Operated, bulk: Bulk
) -> None:
    await failed(outbox, 100)
    command = [sys.executable, "-c", RETRY_SLOWLY, outbox.url]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    id_ = UUID((await process.stdout.readline()).decode().strip())
    await pending(outbox, 5)
    process.kill()
    await process.wait()
    table = outbox.tables.operation
    long_ago = datetime.now(UTC) - timedelta(seconds=STALLED + 5)
    with outbox.engine.begin() as connection:
        connection.execute(sa.update(table).where(table.c.id == id_).values(updated_at=long_ago))
    operation = await outbox.operation(id_)
    assert operation.state == "stalled"
    left = states(outbox)["failed"]
    assert 0 < left < 100
    again = await bulk.start("ann", "retry", Filter())
    assert (again.total, (await ended(outbox, again.id)).done) == (left, left)
    assert states(outbox) == {"pending": 100}


@pytest.mark.parametrize(("action", "error"), [("retry", STOPPED), ("replay", STOPPED_REPLAY)])
async def test_closing_ends_what_runs_and_puts_it_on_record(
    outbox: Operated, bulk: Bulk, action: Any, error: str
) -> None:
    await failed(outbox, 30)
    operation = await bulk.start("ann", action, Filter(status="failed"), rate=1)
    await bulk.close()
    over = await outbox.operation(operation.id)
    assert (over.state, over.error) == ("cancelled", error)
    assert states(outbox)["pending"] == over.done < 30


async def test_an_action_that_breaks_is_on_record_as_failed(
    outbox: Operated, bulk: Bulk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed(outbox, 3)

    async def broken(*_: object, **__: object) -> frozenset[UUID]:
        raise RuntimeError("broken")

    monkeypatch.setattr(outbox.ledger.changes, "retry", broken)
    operation = await bulk.start("ann", "retry", Filter())
    over = await ended(outbox, operation.id)
    assert (over.state, over.error, over.done) == ("failed", "RuntimeError: broken", 0)


async def test_how_it_ended_is_on_record_though_the_database_was_away(
    outbox: Operated, bulk: Bulk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed(outbox, 3)
    finish, tries = outbox.ledger.journal.finish, 0

    async def away_at_first(*arguments: Any) -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise StoreError("server closed the connection")
        await finish(*arguments)

    monkeypatch.setattr(outbox.ledger.journal, "finish", away_at_first)
    operation = await bulk.start("ann", "retry", Filter())
    over = await ended(outbox, operation.id)
    assert (over.state, over.done, tries) == ("done", 3, 3)


async def test_a_sign_of_life_that_breaks_keeps_nothing_from_ending(
    outbox: Operated, bulk: Bulk, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed(outbox, 3)
    broken = asyncio.Event()

    async def breaks(*_: object) -> bool:
        broken.set()
        raise RuntimeError("broken")

    monkeypatch.setattr(outbox.ledger.journal, "advance", breaks)
    operation = await bulk.start("ann", "retry", Filter())
    assert (await ended(outbox, operation.id)).state == "done"
    assert broken.is_set()


async def test_closing_just_after_the_start_does_not_wait_for_another_connection(
    outbox: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed(outbox, 3)
    openings = 0

    @asynccontextmanager
    async def slow_the_second_time(actor: str) -> AsyncIterator[Admin]:
        nonlocal openings
        openings += 1
        if openings > 1:
            await asyncio.Event().wait()
        yield outbox.admin.acting_as(actor)

    monkeypatch.setattr("relaybox.operate.bulk.PATIENCE", 1.0)
    bulk = Bulk(slow_the_second_time)
    operation = await bulk.start("ann", "retry", Filter(), rate=1)
    await bulk.close()
    over = await outbox.operation(operation.id)
    assert over.state == "cancelled"


async def test_an_outbox_opens_the_service_for_its_own_destinations(outbox: Operated) -> None:
    own = Outbox(outbox.url, destinations=[Destination("mail", "console:")])
    async with own.admin("ann", connections=1) as admin:
        assert list(await admin.destinations()) == ["mail"]
        await admin.acting_as("bob").note("login", {})
        assert [row.actor for row in (await admin.audits()).rows] == ["bob"]
